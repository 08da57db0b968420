"""`commfuse env`: which transports work here. Each is really used, by two ranks that are threads of this process."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

_NBYTES = 1 << 16
_DEADLINE_S = 5.0
_WORLD_SIZE = 2


class Finding(NamedTuple):
    """Whether something works here, and how or why not."""

    works: bool
    detail: str


def try_transports() -> dict[str, Finding]:
    """Transport -> finding, for those that a configuration can name. Never raises."""
    trials: dict[str, Callable[[], Finding]] = {
        "shm": _try_shm,
        "tcp": _try_tcp,
        "p2p (gloo)": _try_gloo,
        "p2p (nccl)": _try_nccl,
        "symmetric": _ask_symmetric,
        "mpi": _try_mpi,
    }
    return {name: _found(trial) for name, trial in trials.items()}


def ask_kernels() -> dict[str, Finding]:
    """Kind of kernel -> whether it can be used here. Never raises."""
    return {"triton": _found(_ask_triton), "cuda c++": _found(_ask_nvrtc)}


def _found(trial: Callable[[], Finding]) -> Finding:
    try:
        return trial()
    except Exception as error:
        return Finding(False, f"{type(error).__name__}: {error}")


def _try_shm() -> Finding:
    from commfuse_dp.transport.shm.transport import ShmTransport

    _exchange_bytes(
        lambda rank, exchange: ShmTransport(rank, _WORLD_SIZE, exchange, inbox_bytes=_NBYTES, deadline_s=_DEADLINE_S)
    )
    return Finding(True, "anonymous shared memory (memfd) and UNIX-domain sockets, tried; for ranks of one host")


def _try_tcp() -> Finding:
    from commfuse_dp.transport.tcp.connect import choose_address
    from commfuse_dp.transport.tcp.transport import TcpTransport

    address = choose_address()
    _exchange_bytes(
        lambda rank, exchange: TcpTransport(
            rank, _WORLD_SIZE, exchange, inbox_bytes=_NBYTES, deadline_s=_DEADLINE_S, address=address
        )
    )
    return Finding(True, f"tried at {address}, the address that this environment chooses")


def _try_gloo() -> Finding:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return Finding(False, "this torch was built without gloo")
    from commfuse_dp.transport.two_sided.paired import PairedTransport

    store = dist.HashStore()
    patience = datetime.timedelta(seconds=_DEADLINE_S)

    def open_one(rank: int, exchange: Any) -> PairedTransport:
        groups = [dist.PrefixStore(str(lane), store) for lane in range(3)]
        lanes: Any = {lane: dist.ProcessGroupGloo(group, rank, _WORLD_SIZE, patience) for lane, group in enumerate(groups)}
        return PairedTransport(rank, _WORLD_SIZE, exchange, lanes=lanes, inbox_bytes=_NBYTES, deadline_s=_DEADLINE_S)

    _exchange_bytes(open_one)
    return Finding(True, "CPU tensors over torch.distributed, tried")


def _try_nccl() -> Finding:
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_nccl_available():
        return Finding(False, "this torch was built without NCCL")
    count = torch.cuda.device_count()
    if count == 0:
        return Finding(False, "no GPU is visible")
    return Finding(
        True, f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {count} GPU(s); not tried: it needs a GPU a rank"
    )


def _ask_symmetric() -> Finding:
    import torch

    if torch.cuda.device_count() == 0:
        return Finding(False, "no GPU is visible")
    from commfuse_dp.device.cuda import card

    own = card(torch.device("cuda", torch.cuda.current_device()))
    if own.problem is not None:
        return Finding(False, own.problem)
    return Finding(True, f"{own.name}: streams can wait for words; not tried: it needs the peers' GPUs")


def _ask_triton() -> Finding:
    import torch

    if torch.cuda.device_count() == 0:
        return Finding(False, "GEMMs that wait for slices: no GPU is visible")
    from commfuse_dp.kernels.choice import unavailable

    why = unavailable(torch.device("cuda", torch.cuda.current_device()), (torch.bfloat16,))
    return Finding(why is None, why or "GEMMs that wait for slices, where they are faster than cuBLAS by slices")


def _ask_nvrtc() -> Finding:
    import torch

    if torch.cuda.device_count() == 0:
        return Finding(False, "sums and packing: no GPU is visible")
    from commfuse_dp.kernels.nvrtc import unavailable

    why = unavailable()
    return Finding(why is None, why or "sums and packing, compiled at first use")


def _try_mpi() -> Finding:
    from commfuse_dp import mpi_launch

    problem = mpi_launch.obstacle()
    if problem is not None:
        return Finding(False, problem)
    return Finding(True, "mpi4py loads its MPI library; start with: mpiexec -n N python -m commfuse_dp.run train.py")


def _exchange_bytes(open_one: Callable[[int, Callable[[Any], list[Any]]], Any]) -> None:
    """Two ranks open a transport, publish a segment each and read the other's. Raises what the first of them raised."""
    import torch

    from commfuse_dp.transport.base import PullRequest

    barrier = threading.Barrier(_WORLD_SIZE)
    slots: list[Any] = [None] * _WORLD_SIZE
    errors: list[Exception] = []

    def body(rank: int) -> None:
        def exchange(item: Any) -> list[Any]:
            slots[rank] = item
            barrier.wait(_DEADLINE_S)
            everyone = list(slots)
            barrier.wait(_DEADLINE_S)
            return everyone

        transport = None
        try:
            transport = open_one(rank, exchange)
            transport.expose([[_NBYTES] * _WORLD_SIZE])
            transport.segments[0].fill_(rank + 1)
            transport.publish((0,), 1)
            peer = 1 - rank
            out = None if transport.in_place else torch.empty(_NBYTES, dtype=torch.uint8, device="cpu")
            received = transport.pull(1, (PullRequest(peer, 0, 0, _NBYTES, out),))[0].wait()
            if not bool((received == peer + 1).all()):
                raise RuntimeError("the bytes that arrived are not those that were sent")
            transport.finish(1)
            transport.wait_finished(1)
        except Exception as error:
            errors.append(error)
            barrier.abort()
        finally:
            if transport is not None:
                transport.close()

    ranks = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(_WORLD_SIZE)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(4 * _DEADLINE_S)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in ranks):
        raise TimeoutError(f"not done within {4 * _DEADLINE_S:g} s")
