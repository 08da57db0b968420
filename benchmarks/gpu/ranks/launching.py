"""Ranks of a part: processes that share the GPU, and what they stored."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.gpu import checkout
from commfuse_dp.launch.ranks import RankDied, Ranks, python_module
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
        late = threading.Event()
        with Ranks([command] * size, environments) as ranks:

            def give_up() -> None:
                late.set()
                ranks.stop()

            timer = threading.Timer(limit_s, give_up)
            timer.daemon = True
            timer.start()
            try:
                for line in ranks.lines():
                    print(f"  [rank {line.rank}] {line.text}", flush=True)
            except RankDied as error:
                raise RuntimeError(f"{f'not done after {limit_s:.0f} s; ' if late.is_set() else ''}{error}") from None
            finally:
                timer.cancel()
        return collect(Path(folder))
