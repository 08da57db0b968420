"""Ctrl-C at places drawn over a whole step, on one rank and on all: the next steps are the framework's own, nothing is left."""

from __future__ import annotations

import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from commfuse_dp.transport.shm import sockets
from tests.faults.interrupted_rigs import ShardedRig
from tests.faults.interrupted_steps import DEFECTS, NAMED, interruptible, plans, run, table
from tests.support.cells import slow
from tests.support.versions import NEEDS_RESET

SEED = 20
DEADLINE_S = 30.0  # who waits for so long was not told


def settings(**more: Any) -> dict[str, Any]:
    return {"transport": "shm", "deadline_s": DEADLINE_S, "inbox_bytes": 1 << 20, "prefetch_bytes": 1 << 20, **more}


CELLS = [
    ("fsdp2", 2, 30, False, {}),
    slow("fsdp2", 2, 180, False, {}),
    slow("fsdp2", 2, 90, True, {}),
    slow("fsdp2", 2, 60, False, {"replay": False}),
    slow("fsdp2", 2, 60, False, {"transport": "tcp"}),
    slow("fsdp2", 2, 60, True, {"transport": "tcp", "prefetch_bytes": 8192}),
    slow("fsdp2", 3, 45, False, {}),
    pytest.param("fsdp2", 2, 45, False, {"exclude": ("layers.2",)}, marks=[pytest.mark.slow, NEEDS_RESET]),
    slow("tensor parallel", 2, 60, False, {}),
    slow("zero", 2, 45, False, {}),
]


@pytest.mark.parametrize(("kind", "ranks", "count", "meet", "more"), CELLS)
def test_the_steps_after_a_ctrl_c(workers, kind, ranks, count, meet, more):
    chosen = plans(SEED, count, ranks)
    cycles = workers(ranks).run(run, kind, chosen, settings(**more), meet=meet, timeout=240.0)[0]
    outcomes = {cycle.outcome for cycle in cycles}
    assert not outcomes & {*DEFECTS, NAMED}, f"seed {SEED}:\n{table(cycles)}"
    reached = [cycle for cycle in cycles if any(cycle.places)]
    assert len(reached) >= len(cycles) * 2 // 3  # a step that waits less than the one that was counted has fewer places
    rooms = {place.split("/")[0] for cycle in reached for place in cycle.places if "/" in place}
    assert len(rooms) >= 3, rooms


def pressed_in_a_wait(rank: int, world_size: int) -> None:
    """Rank 1 begins nothing before rank 0, which waits for it, has been interrupted."""

    def press(thread: int) -> None:
        limit = time.monotonic() + DEADLINE_S
        while sys._current_frames()[thread].f_code is not sockets._sleep.__code__ and time.monotonic() < limit:
            time.sleep(0.001)
        signal.pthread_kill(thread, signal.SIGINT)

    with interruptible():
        rig = ShardedRig(rank, world_size, settings())
        if rank == 0:
            presser = threading.Thread(target=press, args=(threading.get_ident(),))
            presser.start()
            told = rig.attempt(1)
            presser.join()
            assert told.startswith("KeyboardInterrupt"), told
            dist.barrier()
        else:
            dist.barrier()
            told = rig.attempt(1)
            assert told.startswith("BrokenStepError") and "rank 0: KeyboardInterrupt" in told, told
        for version in (2, 0):
            assert rig.attempt(version) == "ok"
        assert not rig.left_behind()
        rig.end()


def test_a_ctrl_c_ends_a_wait(workers):
    workers(2).run(pressed_in_a_wait)
