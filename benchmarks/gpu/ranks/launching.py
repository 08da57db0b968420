"""Ranks of a part: processes that share the GPU, and what they stored."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.gpu import checkout
from commfuse_dp.launch.ranks import RankDied, Ranks, RanksLate, python_module
from commfuse_dp.ports import free_port

Result = TypeVar("Result")


def run_ranks(
    module: str,
    size: int,
    arguments: Sequence[str],
    *,
    limit_s: float,
    collect: Callable[[Path], Result],
    extra: Mapping[str, str] | None = None,
) -> Result:
    """Run `python -m module FOLDER *arguments` as `size` ranks; `collect(folder)` reads what they left there.

    Raises RuntimeError with the ranks' last lines when one dies or when limit_s have passed; all are ended in any case.
    """
    with tempfile.TemporaryDirectory(prefix="commfuse-gpu-") as folder:
        command = [*python_module(module), folder, *arguments]
        port = free_port()
        environments = [
            {
                **checkout.environment(),
                "RANK": str(rank),
                "LOCAL_RANK": "0",  # of the one GPU that they share: a DeviceMesh may choose the device by it
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                **(extra or {}),
            }
            for rank in range(size)
        ]
        with Ranks([command] * size, environments) as ranks:
            try:
                for line in ranks.lines(limit_s):
                    print(f"  [rank {line.rank}] {line.text}", flush=True)
            except RanksLate as error:
                raise RuntimeError(f"not done after {limit_s:.0f} s; {error}") from None
            except RankDied as error:
                raise RuntimeError(str(error)) from None
        return collect(Path(folder))
