"""Transport p2p on real gloo communicators between processes: what ranks as threads cannot show."""

from __future__ import annotations

import datetime
import gc
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_dp.errors import DeadlineError, PeerLostError, TransportError, Where
from commfuse_dp.transport import kept
from commfuse_dp.transport.base import CHANNEL_GRAD, GRAD_LANE, PARAM_LANE, Tag
from commfuse_dp.transport.hierarchical import open as hierarchical_open
from commfuse_dp.transport.select import open_transport
from commfuse_dp.transport.two_sided import p2p, paired
from commfuse_dp.transport.two_sided.p2p import new_group, not_bound_to_a_device, open_lanes
from commfuse_dp.transport.two_sided.paired import open_p2p
from commfuse_dp.transport.waiting import wait_until
from tests.support import single
from tests.support.processes import RankPipe, RankProcesses
from tests.support.transports import pattern, pull_bytes

WHERE = Where(layer="blocks.2.fc", step=8, slice="1/0", nbytes=123)


def _step(rank: int, world_size: int) -> tuple[str, str, int]:
    """Uneven shards, pulled in another order by each rank and by one rank twice; gradients beside them."""
    users = torch.zeros(4)
    pending = dist.irecv(users, (rank - 1) % world_size, tag=1)  # the user's own traffic on the default group
    transport, reason = open_transport(
        "p2p", group=None, inbox_bytes=1_000_000 * (world_size - 1), deadline_s=30, probe=None, device=torch.device("cpu")
    )
    sizes = [[200_000 - 60_001 * owner if owner < 3 else 0 for owner in range(world_size)] for _ in range(3)]
    transport.expose(sizes)
    for epoch in (1, 2, 3):
        transport.wait_finished(epoch - 1)
        for key in range(3):
            transport.segments[key].copy_(pattern(rank, key, epoch, nbytes=sizes[key][rank]))
            transport.publish((key,), epoch)
        order = [(owner, key) for key in range(3) for owner in range(world_size)]
        for owner, key in (order if rank % 2 else reversed(order)) if rank else order + order[::-1]:
            got = pull_bytes(transport, owner, key, epoch, size=sizes[key][owner])
            assert torch.equal(got, pattern(owner, key, epoch, nbytes=sizes[key][owner]))
        for dst in range(world_size):
            if dst != rank:
                buffer = single.reserve(transport, dst, 400_000 + rank)
                assert buffer is not None
                buffer.copy_(pattern(9, rank, dst, epoch, nbytes=400_000 + rank))
                single.send(transport, dst, Tag(CHANNEL_GRAD, 1, epoch), buffer)
        for src in range(world_size):
            if src != rank:
                got = single.receive(transport, src, Tag(CHANNEL_GRAD, 1, epoch), WHERE)
                assert torch.equal(got, pattern(9, src, rank, epoch, nbytes=400_000 + src))
                single.release(transport, src, Tag(CHANNEL_GRAD, 1, epoch))
        transport.finish(epoch)
    transport.wait_finished(3)
    sending = dist.isend(torch.full((4,), float(rank)), (rank + 1) % world_size, tag=1)
    assert pending is not None and sending is not None
    pending.wait()
    sending.wait()
    assert users.tolist() == [float((rank - 1) % world_size)] * 4
    received = transport.probe.counters.param_bytes_received
    transport.close()
    expected = 3 * 3 * sum(sizes[0][owner] for owner in range(world_size) if owner != rank) * (1 if rank else 2)
    assert received == expected, (received, expected)
    return transport.name, reason, received


@pytest.mark.parametrize("world_size", [2, 3])
def test_steps_between_processes(workers: Any, world_size: int) -> None:
    for name, reason, received in workers(world_size).run(_step, timeout=90):
        assert name == "p2p" and "asked for" in reason and received > 0


def _lanes(rank: int, world_size: int) -> str:
    """Equal tags on two lanes do not meet; tags on one lane are told apart whatever the order. A late peer is named."""
    lanes, peer = open_lanes(None, setup_s=30).item, 1 - rank
    buffers = {(lane, tag): torch.zeros(1000) for lane in (PARAM_LANE, GRAD_LANE) for tag in (3, 4)}
    receives = {(lane, tag): lanes[lane].recv([buffer], peer, tag) for (lane, tag), buffer in buffers.items()}
    out = {(lane, tag): torch.full((1000,), 100.0 * rank + 10 * lane + tag) for lane, tag in reversed(list(buffers))}
    sends = [lanes[lane].send([data], peer, tag) for (lane, tag), data in out.items()]
    for (lane, tag), work in receives.items():
        work.wait()
        assert buffers[lane, tag].tolist() == [100.0 * peer + 10 * lane + tag] * 1000
    for work in sends:
        work.wait()
    dist.barrier()

    # Nobody sends this. Each rank on a lane of its own: gloo closes the connection of a wait that has timed out, which the
    # other end would take for a lost peer.
    with pytest.raises(RuntimeError) as caught:
        lanes[(PARAM_LANE, GRAD_LANE)[rank]].recv([torch.zeros(4)], peer, 9).wait(datetime.timedelta(seconds=1))
    error = p2p.transfer_error(caught.value, rank, peer, WHERE, deadline_s=1.0, backend="gloo")
    assert isinstance(error, DeadlineError) and error.peer == peer and error.where == WHERE
    dist.barrier()
    return str(error)


def test_lanes(workers: Any) -> None:
    texts = workers(2).run(_lanes, timeout=60)
    assert all(f"waited 1 s for rank {1 - rank}" in text for rank, text in enumerate(texts))


def test_without_torch_distributed() -> None:
    with pytest.raises(TransportError, match="init_process_group"):
        open_p2p(None, inbox_bytes=64, deadline_s=1)


def _wait_for_a_dead_peer(rank: int, pipe: RankPipe, port: int, victim: int) -> tuple[str, int, float]:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=datetime.timedelta(seconds=60))
    transport = open_p2p(None, inbox_bytes=4096, deadline_s=60)
    transport.expose([[100] * 3])
    pipe.exchange("ready")
    pipe.report("waiting")
    try:
        if rank == victim:
            signal.pause()
        single.receive(transport, 3 - rank - victim, Tag(CHANNEL_GRAD), WHERE)
    except PeerLostError as error:
        return str(error), error.peer, time.monotonic()
    finally:
        transport.close()
    raise AssertionError("nothing was sent")


def test_killed_rank_is_named_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    victim = 2
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with RankProcesses(3, _wait_for_a_dead_peer, store.port, victim) as ranks:
        for _ in range(3):
            ranks.next_report()
        killed = ranks.kill(victim)
        results = ranks.results(40.0)
    assert sorted(results) == [0, 1]
    for text, peer, seen in results.values():
        assert peer == victim and f"rank {victim}" in text and "blocks.2.fc" in text
        assert seen - killed < 10.0


@pytest.fixture
def slow_machine(workers: Any) -> Iterator[None]:
    """Where peers may say goodbye late: what would be left behind is waited for."""
    for size in (2, 3):
        workers(size).run(_set_linger, 60.0)
    yield
    for size in (2, 3):
        workers(size).run(_set_linger, paired.LINGER_S)


def _set_linger(rank: int, world_size: int, seconds: float) -> None:
    paired.LINGER_S = seconds


def _opened_again(rank: int, world_size: int) -> tuple[int, int]:
    made = []
    running = set(threading.enumerate())
    names = ["commfuse-p2p-sends", *(f"commfuse-p2p-{peer}" for peer in range(world_size) if peer != rank)]
    for step in range(3):
        transport = open_p2p(None, inbox_bytes=1 << 12, deadline_s=20)
        transport.expose([[64] * world_size])
        transport.segments[0].fill_(10 * step + rank)
        transport.publish((0,), 1)
        for peer in range(world_size):
            out = torch.zeros(64, dtype=torch.uint8)
            assert single.pull(transport, peer, 0, 1, out=out).wait(WHERE).tolist() == [10 * step + peer] * 64
        transport.finish(1)
        transport.wait_finished(1)
        dist.barrier()  # the readers of a peer that has closed are gone
        assert sorted(thread.name for thread in threading.enumerate() if thread not in running) == sorted(names)
        dist.barrier()
        transport.close()
        assert set(threading.enumerate()) <= running
        made.append(sum(kept.made.values()))
    return made[0], made[-1]


def test_communicators_are_kept_for_the_next_transport(workers: Any, slow_machine: None) -> None:
    """And a transport takes one thread for each peer, and one more, all of which end with it."""
    for first, last in workers(3).run(_opened_again, timeout=60):
        assert first == last


def _more_groups_on_some(rank: int, world_size: int) -> None:
    """torch would name a group of ours otherwise on each of them, and they would wait for each other."""
    extra = [dist.new_group([1, 2]) for _ in range(2)]
    transport = open_p2p(None, inbox_bytes=1 << 12, deadline_s=20)
    dist.barrier()
    transport.close()
    one = new_group([0, 1]) if rank < 2 else None
    if one is not None:
        total = torch.ones(3)
        dist.all_reduce(total, group=one)
        assert total.tolist() == [2.0] * 3
    for group in extra if rank else []:
        dist.destroy_process_group(group)


def test_ranks_may_be_in_unequally_many_groups(workers: Any) -> None:
    workers(3).run(_more_groups_on_some, timeout=60)


def _groups_made(port: int) -> list[Any]:
    """One process, one default group: weak references to what is kept with it."""
    store = dist.PrefixStore(str(time.monotonic_ns()), dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    lanes = open_lanes(None, setup_s=30)
    found = [weakref.ref(group) for group in (*lanes.item.values(), hierarchical_open._group_of([0]))]
    lanes.keep()
    assert hierarchical_open._group_of([0]) is found[-1]()
    dist.destroy_process_group()
    return found


def _kept_for_ever(rank: int, pipe: RankPipe, port: int) -> int:
    found = [group for _ in range(3) for group in _groups_made(port)]
    gc.collect()
    return sum(group() is not None for group in found)


def test_communicators_go_with_the_default_group() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with RankProcesses(1, _kept_for_ever, store.port) as ranks:
        assert ranks.results() == {0: 0}


def test_new_groups_do_not_inherit_the_device() -> None:
    class World:
        bound_device_id: Any = torch.device("cuda", 3)

    before = dist.group.WORLD
    dist.group.WORLD = World  # type: ignore[assignment]
    try:
        with not_bound_to_a_device():
            assert World.bound_device_id is None
    finally:
        dist.group.WORLD = before
    assert World.bound_device_id == torch.device("cuda", 3)


def _closed_in_turn(rank: int, world_size: int) -> list[str]:
    """Each closes when it has heard the others' goodbyes that came before; nobody waits for a goodbye that does not come."""
    left_behind = len(paired._left_behind)
    transport = open_p2p(None, inbox_bytes=1 << 12, deadline_s=20)
    transport.expose([[64] * world_size])
    closing = threading.Thread(target=transport.close)
    for turn in range(world_size):
        if turn == rank:
            wait_until(transport, lambda n=turn: len(transport._departed) == n, peer=-1, where=WHERE, doing="to leave")  # type: ignore[misc]
            closing.start()
        dist.barrier()
    closing.join(50.0)
    assert not closing.is_alive() and len(paired._left_behind) == left_behind
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("commfuse-p2p")]


def test_a_goodbye_is_answered(workers: Any, slow_machine: None) -> None:
    assert workers(2).run(_closed_in_turn, timeout=90) == [[], []]


def _failed(rank: int, world_size: int) -> str:
    """Rank 0 fails and closes; the others are busy elsewhere, and close when it has."""
    left_behind = len(paired._left_behind)
    transport = open_p2p(None, inbox_bytes=1 << 12, deadline_s=20)
    transport.expose([[64] * world_size])
    dist.barrier()
    if rank == 0:
        transport.close("out of memory")
    dist.barrier()
    assert len(paired._left_behind) == left_behind
    if rank == 0:
        return ""
    with pytest.raises(PeerLostError) as caught:
        single.receive(transport, 0, Tag(CHANNEL_GRAD), WHERE)
    transport.close()
    assert len(paired._left_behind) == left_behind
    return str(caught.value)


def test_who_fails_does_not_wait_for_peers_to_close(workers: Any, slow_machine: None) -> None:
    assert all("out of memory" in text for text in workers(2).run(_failed, timeout=60)[1:])
