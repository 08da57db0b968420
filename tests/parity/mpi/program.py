"""What the ranks of an MPI job do in tests/parity/mpi/test_jobs.py: an ordinary script, run by `python -m commfuse_dp.run`.

program.py checks                 every function check_*; rank 0 prints RESULT and {name: "" or traceback}
program.py raise|die|stop         rank 1 ends that way while rank 0 waits for it in a transport
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import commfuse_dp
from commfuse_dp.transport.base import CHANNEL_GRAD, Tag, Transport
from commfuse_dp.transport.exchange import exchange_of
from commfuse_dp.transport.two_sided import mpi, mpi_channel
from commfuse_dp.transport.two_sided.mpi import MpiTransport
from tests.support import single
from tests.support.mpi import tell_segments
from tests.support.transports import pattern, pull_bytes

RESULT = "RESULT "


@contextmanager
def opened(
    group: dist.ProcessGroup | None = None, *, inbox_bytes: int = 1 << 20, deadline_s: float = 30.0
) -> Iterator[MpiTransport]:
    transport = MpiTransport(
        dist.get_rank(group), dist.get_world_size(group), exchange_of(group), inbox_bytes=inbox_bytes, deadline_s=deadline_s
    )
    try:
        yield transport
    finally:
        transport.close()


def everybody_reads(transport: Transport, nbytes: int, mark: int) -> None:
    """One epoch: every rank reads all others' bytes, and sends each a message of another size."""
    rank, world_size = transport.rank, transport.world_size
    transport.expose([[nbytes] * world_size])
    transport.segments[0].copy_(pattern(mark, rank, nbytes=nbytes))
    transport.publish((0,), 1)
    peers = [peer for peer in range(world_size) if peer != rank]
    for peer in peers:
        buffer = single.reserve(transport, peer, nbytes + peer)
        assert buffer is not None
        buffer.copy_(pattern(mark, rank, peer, nbytes=nbytes + peer))
        single.send(transport, peer, Tag(CHANNEL_GRAD, mark), buffer)
    for peer in peers:
        assert torch.equal(pull_bytes(transport, peer, 0, 1, size=nbytes), pattern(mark, peer, nbytes=nbytes))
    for peer in peers:
        got = single.receive(transport, peer, Tag(CHANNEL_GRAD, mark))
        assert torch.equal(got, pattern(mark, peer, rank, nbytes=nbytes + rank))
        single.release(transport, peer, Tag(CHANNEL_GRAD, mark))
    transport.finish(1)
    transport.wait_finished(1)


# ---- checks ------------------------------------------------------------------------------------------------------------
def check_environment() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    expected = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    assert {name: int(os.environ[name]) for name in expected} == expected
    assert os.environ["MASTER_ADDR"] == "127.0.0.1" and int(os.environ["MASTER_PORT"]) > 0
    assert os.environ["COMMFUSE_TRANSPORT"] == "mpi"
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)


class Model(nn.Module):
    """Rows that no number of ranks divides, a bias, a norm and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(29, 24)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 37), nn.GELU(), nn.Linear(37, 24)) for _ in range(2)
        )
        self.head = nn.Linear(24, 29, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _train(transport: str | None) -> tuple[str, list[torch.Tensor]]:
    """(report's transport, all gradients and parameters of three steps). None: what the environment says."""
    torch.manual_seed(5)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    config = None if transport is None else commfuse_dp.CommFuseConfig(transport=transport)  # type: ignore[arg-type]
    report = commfuse_dp.apply(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.Generator().manual_seed(100 + dist.get_rank())
    seen: list[torch.Tensor] = []
    for _ in range(3):
        batch = torch.randint(0, 29, (4, 9), generator=tokens)
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        seen += [loss.detach().clone(), *(p.grad.to_local().clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    seen += [p.detach().to_local().clone() for p in model.parameters()]
    commfuse_dp.remove(model)
    return report.transport, seen


def check_training_is_bitwise_that_of_other_transports() -> None:
    name, ours = _train(None)
    assert name == "mpi", name
    assert any(bool(t.any()) for t in ours)
    for other in ("shm", "tcp"):
        name, theirs = _train(other)
        assert name == other and len(theirs) == len(ours)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), other


def check_groups() -> None:
    """Two halves at the same time, then all ranks in reverse order."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    halves = [dist.new_group(list(range(part, world_size, 2))) for part in range(2)]
    with opened(halves[rank % 2]) as transport:
        assert (transport.rank, transport.world_size) == (rank // 2, 2)
        everybody_reads(transport, 5000, mark=10 + rank % 2)
    forward = exchange_of(None)
    turned = MpiTransport(
        world_size - 1 - rank, world_size, lambda item: forward(item)[::-1], inbox_bytes=1 << 16, deadline_s=20
    )
    everybody_reads(turned, 777, mark=3)
    assert f"(MPI rank {rank}," in turned._channel.describe(turned.rank, rank)
    turned.close()


def check_chunks_and_lanes() -> None:
    """Payloads of many chunks; never more gradients under way than allowed; small ones travel with their records."""
    before = mpi_channel.CHUNK_BYTES
    mpi_channel.CHUNK_BYTES = 5000
    try:
        with opened() as transport:
            channel: Any = transport._channel
            start, most, chunks = channel._start, [0], [0]

            def counted(item: Any, call: Callable[..., Any], chunk: memoryview) -> None:
                most[0] = max(most[0], *channel._grad_chunks.values(), 0)
                chunks[0] += item.message is not None
                assert len(chunk) <= max(5000, mpi_channel.CONTROL_BYTES)
                start(item, call, chunk)

            channel._start = counted
            everybody_reads(transport, 100_001, mark=4)
            # Ours to and theirs from three peers: a slice of 21 chunks and a message of as many.
            assert chunks[0] == 3 * 4 * 21, chunks
            assert most[0] == mpi_channel.GRAD_CHUNKS
        with opened() as transport:
            channel = transport._channel
            everybody_reads(transport, mpi_channel.INLINE_BYTES - 4, mark=5)
            assert not any(channel._payloads_in.values())
    finally:
        mpi_channel.CHUNK_BYTES = before


def check_waiting_burns_no_core() -> None:
    """Rank 0 blocks in a wait, rank 1 has an open transport and does nothing: CPU time of all threads over wall time."""
    with opened() as transport:
        dist.barrier()
        cpu, wall = time.process_time(), time.monotonic()
        if transport.rank == 0:
            single.receive(transport, 1, Tag(CHANNEL_GRAD))
        else:
            time.sleep(1.5)
        used = (time.process_time() - cpu) / (time.monotonic() - wall)
        if transport.rank == 1:
            buffer = single.reserve(transport, 0, 8)
            assert buffer is not None
            single.send(transport, 0, Tag(CHANNEL_GRAD), buffer)
        everyone = exchange_of(None)(used)
        if transport.rank == 0:
            print("CPU of a wait, of idle ranks:", [f"{share:.3f}" for share in everyone], flush=True)
        assert max(everyone) < 0.2, everyone


def check_communicators_are_used_again() -> None:
    made, longest = [], 0.0
    for turn in range(4):
        with opened() as transport:
            everybody_reads(transport, 9000, mark=20 + turn)
            dist.barrier()
            start = time.monotonic()
        longest = max(longest, time.monotonic() - start)
        made.append(sum(mpi._made.values()))
    assert made[0] == made[-1], made
    assert longest < mpi_channel.LINGER_S / 2, longest


def check_who_leaves_early_waits_for_nobody() -> None:
    """Rank 3 closes while a long message of it is under way, which still arrives whole, though the goodbye is quicker. It does
    not linger, and the others go on with each other, also with new notices for rank 3."""
    nbytes = 24 << 20
    with opened(inbox_bytes=nbytes) as transport:
        message = torch.arange(nbytes // 8).view(torch.uint8)
        transport.expose([[6000] * 4])
        transport.segments[0].copy_(pattern(transport.rank, nbytes=6000))
        transport.publish((0,), 1)
        if transport.rank == 3:
            for peer in range(3):
                pull_bytes(transport, peer, 0, 1, size=6000)
            transport.finish(1)
            transport.wait_finished(1)
            buffer = single.reserve(transport, 0, nbytes)
            assert buffer is not None
            buffer.copy_(message)
            start = time.monotonic()
            single.send(transport, 0, Tag(CHANNEL_GRAD, 9), buffer)
            transport.close()
            assert time.monotonic() - start < mpi_channel.LINGER_S / 2
            dist.barrier()
            return
        pull_bytes(transport, 3, 0, 1, size=6000)
        transport.finish(1)
        if transport.rank == 0:
            assert torch.equal(single.receive(transport, 3, Tag(CHANNEL_GRAD, 9)), message)
            single.release(transport, 3, Tag(CHANNEL_GRAD, 9))
        dist.barrier()
        transport.wait_finished(1)
        transport.publish((0,), 2)
        for peer in range(3):
            pull_bytes(transport, peer, 0, 2, size=6000)
        transport.finish(2)
        transport.wait_finished(2)


ANY_RANKS = ("check_environment", "check_training_is_bitwise_that_of_other_transports")  # the others are for four


def checks() -> None:
    outcome: dict[str, str] = {}
    mpi_channel.LINGER_S = 60.0  # a close that waits so long is told from one that does not on a busy machine, too
    for name, check in sorted(globals().items()):
        if name.startswith("check_") and (name in ANY_RANKS or dist.get_world_size() == 4):
            text = ""
            try:
                check()
            except BaseException:
                text = f"rank {dist.get_rank()}: {traceback.format_exc()}"
            outcome[name] = "\n".join(filter(None, exchange_of(None)(text)))
            if outcome[name]:
                break  # the ranks are no longer in step
    if dist.get_rank() == 0:
        print(RESULT + json.dumps(outcome), flush=True)


# ---- ends --------------------------------------------------------------------------------------------------------------
def end(how: str) -> None:
    print(f"rank {dist.get_rank()} pid {os.getpid()}", flush=True)
    deadline_s = 60.0 if how == "raise" else 1.0
    transport = MpiTransport(dist.get_rank(), dist.get_world_size(), exchange_of(None), inbox_bytes=4096, deadline_s=deadline_s)
    tell_segments()
    dist.barrier()
    if dist.get_rank() == 0:
        single.receive(transport, 1, Tag(CHANNEL_GRAD))
    elif dist.get_rank() == 2:
        time.sleep(300)  # busy with something that nobody interrupts
    elif how == "raise":
        raise ValueError("on purpose")
    else:
        os.kill(os.getpid(), signal.SIGKILL if how == "die" else signal.SIGSTOP)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if sys.argv[1] == "checks":
        tell_segments()
        checks()
        dist.destroy_process_group()
    else:
        end(sys.argv[1])
