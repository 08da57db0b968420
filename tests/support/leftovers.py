"""What a process holds: to show that nothing of a transport stays behind."""

from __future__ import annotations

import gc
import os
import threading
from typing import NamedTuple


class Leftovers(NamedTuple):
    descriptors: list[str]
    threads: list[threading.Thread]
    children: list[str]
    shared_memory: list[str]  # mapped by this process


def leftovers() -> Leftovers:
    """As it is now, after a garbage collection."""
    gc.collect()
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        children = file.read().split()
    targets = [_target(fd) for fd in os.listdir("/proc/self/fd")]
    return Leftovers([target for target in targets if target], threading.enumerate(), children, shared_memory())


def shared_memory() -> list[str]:
    """Memory of transports that this process has mapped. It has no name by which one could look for it from outside: in
    /dev/shm it is #<inode> here (multiprocessing's semaphores lie there, too), and /dev/zero if it is not shared with peers."""
    with open("/proc/self/maps") as file:
        places = [line.split(maxsplit=5)[5].strip() for line in file if line.count("/")]
    return [place for place in places if place.startswith(("/memfd:commfuse", "/dev/shm/#", "/dev/zero"))]


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # the one that lists the folder
        return ""


def assert_nothing_left(before: Leftovers) -> None:
    after = leftovers()
    for what, old, new in zip(Leftovers._fields, before, after, strict=True):
        assert set(new) <= set(old) and len(new) <= len(old), f"new {what}: {[x for x in new if x not in old]}"
