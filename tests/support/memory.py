"""What is said of memory, what is taken, and what a process holds."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from commfuse_dp.transport.one_sided.memory import FetchedMemory
from commfuse_dp.transport.one_sided.parts import Memory
from commfuse_dp.transport.shm.transport import SharedMemory


def resident() -> int:
    """Bytes of this process that are in memory and its own, less what the C library keeps for later; and its part of what it
    shares, which staging of transport tcp counts as."""
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Anonymous:", "Pss_Shmem:"))) * 1024


class _Lines(logging.Handler):
    def __init__(self, events: list[Any]) -> None:
        super().__init__(logging.INFO)
        self.events = events

    def emit(self, record: logging.LogRecord) -> None:
        if "takes memory" in record.getMessage():
            self.events.append(record)


@contextmanager
def said_and_taken() -> Iterator[list[Any]]:
    """In their order: what is logged about memory (records), and that which a transport takes for messages (its `Memory`)."""
    events: list[Any] = []
    handler, log = _Lines(events), logging.getLogger("commfuse_dp")
    level, kept = log.level, {kind: kind.__init__ for kind in (SharedMemory, FetchedMemory)}
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    for kind, known in kept.items():

        def begin(self: Memory, *args: Any, known: Any = known, **kwargs: Any) -> None:
            events.append(self)
            known(self, *args, **kwargs)

        kind.__init__ = begin  # type: ignore[method-assign]
    try:
        yield events
    finally:
        for kind, known in kept.items():
            kind.__init__ = known  # type: ignore[method-assign]
        log.removeHandler(handler)
        log.setLevel(level)


def held_for_messages(memory: Memory) -> int:
    """Bytes of a rank's rings."""
    rings = [*memory.incoming.values(), *(() if memory.in_place else memory.outgoing.values())]
    return sum(ring.numel() for ring in rings)
