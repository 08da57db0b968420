"""Starts the ranks of one case in a shaped world or on this host, and ends them whatever happens."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.case import BenchmarkError, Case, CaseResult
from benchmarks.worker import PROGRESS
from commfuse_dp.launch.netns import ShapedWorld
from commfuse_dp.launch.ranks import RankDied, Ranks, RanksLate, python_module
from commfuse_dp.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
_PORT_OF_A_WORLD = 29500  # nobody else is in its namespaces


def run_case(
    case: Case,
    world: ShapedWorld | None,
    *,
    timeout_s: float,
    say: Callable[[str], None],
    program: Sequence[str] | None = None,
) -> CaseResult:
    """Run the ranks in `world` (None: this host) and return what they measured.

    `program`, given the paths of a case file and a result file, is what every rank executes; the default is the worker.
    Raises BenchmarkError with the rank and its last lines when one dies, or when timeout_s have passed.
    """
    with tempfile.TemporaryDirectory(prefix="commfuse-bench-") as folder:
        case_file, result_file = Path(folder, "case.json"), Path(folder, "result.json")
        case.save(case_file)
        command = [*(program or python_module("benchmarks.worker")), str(case_file), str(result_file)]
        port = _PORT_OF_A_WORLD if world is not None else free_port()
        size = range(case.world_size)
        commands = [
            [*(world.command_prefix(rank // case.ranks_per_host) if world is not None else []), *command] for rank in size
        ]
        environments = [_environment(rank, case, port, world) for rank in size]
        with Ranks(commands, environments) as ranks:
            try:
                for line in ranks.lines(timeout_s):
                    if line.rank == 0 and line.text.startswith(PROGRESS):
                        say(line.text[len(PROGRESS) :])
            except RanksLate as error:
                raise BenchmarkError(
                    f"the ranks were not done after {timeout_s:g} s (--timeout) and were ended:\n{error}"
                ) from None
            except RankDied as error:
                raise BenchmarkError(f"a rank died:\n{error}") from None
        if not result_file.exists():
            raise BenchmarkError("all ranks ended well, but rank 0 stored no result.")
        return CaseResult.load(result_file)


def _environment(rank: int, case: Case, port: int, world: ShapedWorld | None) -> dict[str, str]:
    size = case.world_size
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // size))
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": threads,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    if world is not None:
        host = rank // case.ranks_per_host
        return {**variables, **world.environment(host), "BENCH_INTERFACE": world.interface(host)}
    return {**variables, "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
