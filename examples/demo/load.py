"""How busy other programs kept the machine during a run: what tells a reader whether to trust its timings."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

NOTABLE_LOAD_CORES = 0.3
_STAT = Path("/proc/stat")


class OtherLoad:
    """From now on, the processor time that went neither to this process nor to its children, in cores.

    Interrupt time is left out: the kernel does a shaped link's work in it, for the children but not in their name.
    """

    def __init__(self) -> None:
        self._before = _busy_s()
        self._own_before = _own_s()
        self._started = time.monotonic()

    def cores(self) -> float | None:
        """Mean since the start; children count once they have been waited for. None where the machine cannot tell."""
        busy = _busy_s()
        elapsed = time.monotonic() - self._started
        if self._before is None or busy is None or elapsed <= 0:
            return None
        return max(0.0, (busy - self._before - (_own_s() - self._own_before)) / elapsed)


def _own_s() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _busy_s(stat: Path = _STAT) -> float | None:
    """Seconds that all processes together have run since boot; None where that is unknown or covers cores that are not ours."""
    try:
        lines = stat.read_text().splitlines()
        user, nice, system = (int(field) for field in lines[0].split()[1:4])
        cores = sum(1 for line in lines[1:] if line.startswith("cpu"))
        if cores != len(os.sched_getaffinity(0)):  # a container's share of a larger host
            return None
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")
