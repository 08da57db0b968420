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
    shm: list[str]  # of this user's processes together: others' tests may run beside


def leftovers() -> Leftovers:
    """As it is now, after a garbage collection."""
    gc.collect()
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        children = file.read().split()
    targets = [_target(fd) for fd in os.listdir("/proc/self/fd")]
    names = [name for name in os.listdir("/dev/shm") if "commfuse" in name]
    return Leftovers([target for target in targets if target], threading.enumerate(), children, names)


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # the one that lists the folder
        return ""


def assert_nothing_left(before: Leftovers) -> None:
    after = leftovers()
    for what, old, new in zip(Leftovers._fields, before, after, strict=True):
        assert set(new) <= set(old) and len(new) <= len(old), f"new {what}: {[x for x in new if x not in old]}"
