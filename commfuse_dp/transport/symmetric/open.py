"""Whether a group of ranks can use transport `symmetric`, why (not), and opening it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.distributed as dist

from commfuse_dp.device.base import Word
from commfuse_dp.errors import TransportError
from commfuse_dp.probe import Probe
from commfuse_dp.transport.base import ExchangeFn
from commfuse_dp.transport.membership import called_in, numbers_of
from commfuse_dp.transport.shm.sockets import SocketChannel, connect_mesh
from commfuse_dp.transport.symmetric.memory import SymmetricMemory, TorchSymmetricMemory
from commfuse_dp.transport.symmetric.transport import SymmetricTransport

if TYPE_CHECKING:
    from commfuse_dp.device.cuda import Card, CudaDevice

TRIAL_S = 5.0  # longest wait for a word that a peer writes in the trial


class Verdict(NamedTuple):
    """`possible`: a reason to say it was chosen. Not: what is missing and the fix."""

    possible: bool
    reason: str


def judge(
    hosts: Sequence[str], cards: Sequence[Card], links: Sequence[Sequence[str | None]], numbers: Sequence[int] | None = None
) -> Verdict:
    """cards: of all ranks; links[a][b]: how rank a reaches the memory of rank b (`device.cuda.link`); numbers: of the ranks in
    the default group, None: their own. Pure."""
    called = range(len(cards)) if numbers is None else numbers
    count = len(hosts)
    if len(set(hosts)) > 1:
        return Verdict(
            False,
            f"{count} ranks on {len(set(hosts))} hosts (counting network namespaces and users apart): symmetric memory ends at "
            "the host; use 'p2p' (NCCL)",
        )
    broken = [
        f"rank {rank} ({facts.name}): {facts.problem}"
        for rank, facts in zip(called, cards, strict=True)
        if facts.problem is not None
    ]
    if broken:
        return Verdict(False, "; ".join(broken))
    kinds = {(facts.name, facts.capability) for facts in cards}
    if len(kinds) > 1:
        names = ", ".join(f"rank {rank}: {facts.name}" for rank, facts in zip(called, cards, strict=True))
        return Verdict(
            False,
            f"mixed GPU types ({names}): all ranks must have the same, as kernels are chosen for one; choose equal GPUs by "
            "CUDA_VISIBLE_DEVICES, or use 'p2p' (NCCL)",
        )
    apart = [(a, b) for a in range(count) for b in range(count) if a != b and links[a][b] is None]
    if apart:
        a, b = apart[0]
        return Verdict(
            False,
            f"no peer access: the GPU of rank {called[a]} cannot reach memory of the GPU of rank {called[b]}"
            + (f" (nor {len(apart) - 1} other pairs)" if len(apart) > 1 else "")
            + "; look at `nvidia-smi topo -p2p r` (IOMMU, PCIe switches, virtual machines), or use 'p2p' (NCCL)",
        )
    found = sorted({str(links[a][b]) for a in range(count) for b in range(count) if a != b})
    ways = ", ".join("a GPU that is not visible here" if way == "unknown" else way for way in found)
    return Verdict(True, f"{count} ranks on one host" + (f", by {ways}" if ways else ""))


def try_writes(device: CudaDevice, memory: SymmetricMemory, rank: int, world_size: int, exchange: ExchangeFn) -> str:
    """Collective: find a way to write words of peers, see [Note: Writing a word of a peer] in device/cuda.py, and set it.

    Returns it for the reason given to the user. Raises TransportError on all ranks if none works.
    """
    pads = [block[: 4 * world_size].view(torch.int32) for block in memory.allocate(4 * world_size, "a trial")]
    failures: list[str] = []
    ways: tuple[Literal["value", "copy"], ...] = ("value", "copy")
    for value, way in enumerate(ways, start=1):
        device.peer_writes = way
        error = None
        try:
            device.write_values(device.side_stream("scatter"), [Word(pad, rank, value) for pad in pads])
        except TransportError as failure:
            error = f"rank {called_in(exchange, rank)}: {failure}"
        limit = time.monotonic() + TRIAL_S
        while error is None and device.peek(pads[rank]) != [value] * world_size:
            if time.monotonic() > limit:
                error = f"rank {called_in(exchange, rank)}: words are {device.peek(pads[rank])} instead of {value}"
            time.sleep(0.001)
        errors = [text for text in exchange(error) if text is not None]
        if not errors:
            return "stream memory operations" if way == "value" else f"4-byte copies ({'; '.join(failures)})"
        failures += errors
    raise TransportError(f"GPUs cannot write each other's words: {'; '.join(failures)}. Use transport 'p2p' (NCCL).")


def survey(device: torch.device, hosts: Sequence[str], exchange: ExchangeFn) -> tuple[Verdict, list[Card]]:
    """Collective: look at all ranks' GPUs."""
    from commfuse_dp.device import cuda

    own = cuda.card(device)
    cards: list[Card] = exchange(own)
    links: list[str | None] = []
    for peer in cards:
        try:
            links.append(cuda.link(own, peer) if own.problem is None and len(set(hosts)) == 1 else "unknown")
        except TransportError:
            links.append("unknown")  # the driver does not say: the mapping itself will tell
    return judge(hosts, cards, exchange(links), numbers_of(exchange)), cards


def open_symmetric(
    group: dist.ProcessGroup | None,
    rank: int,
    world_size: int,
    exchange: ExchangeFn,
    cards: Sequence[Card],
    *,
    device: torch.device,
    inbox_bytes: int,
    deadline_s: float,
    probe: Probe | None,
    kernels_may_wait: bool = True,
) -> tuple[SymmetricTransport, str]:
    """Collective. Returns the transport and how words are written. Raises TransportError on all ranks.

    kernels_may_wait: False: not even if every rank has a GPU of its own, see [Note: Kernels that wait] in transport.py.
    """
    from commfuse_dp.device.cuda import CudaDevice

    accelerator = CudaDevice(device)
    overlapping = len({card.ordinal for card in cards}) < len(cards)
    memory = TorchSymmetricMemory(group, exchange, accelerator.torch_device, overlapping=overlapping)
    how = try_writes(accelerator, memory, rank, world_size, exchange)
    transport = SymmetricTransport(
        rank,
        world_size,
        exchange,
        device=accelerator,
        memory=memory,
        channel=SocketChannel(connect_mesh(rank, range(world_size), exchange, deadline_s)),
        inbox_bytes=inbox_bytes,
        deadline_s=deadline_s,
        probe=probe,
        kernels_may_wait=kernels_may_wait and len({card.uuid for card in cards}) == len(cards),
    )
    return transport, how
