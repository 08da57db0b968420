"""Ranks as threads of one process: quick, and every exception comes back with the rank that raised it first."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
ExchangeFn = Callable[[Any], "list[Any]"]


def _find_each_op_once() -> None:
    """Let one thread at a time make the objects behind torch.ops.

    [Note: Ops found twice] torch makes the object of an op when it is first asked for, and C++ keeps a bare pointer to it for
    all later calls: its attribute in the namespace keeps it alive. Two threads that ask at once make two, the later one takes
    the attribute, and the first one is freed behind C++'s back: a segmentation fault in some later call of that op under a
    TorchDispatchMode. (torch 2.13; seen twice in tests whose ranks are threads, and every time with a pause in
    torch._C._get_schema.)
    """
    lock = threading.RLock()

    def guard(kind: Any) -> None:
        make = kind.__getattr__

        def find(self: Any, name: str) -> Any:
            with lock:
                known = self.__dict__.get(name)
                return make(self, name) if known is None else known

        kind.__getattr__ = find

    guard(torch._ops._OpNamespace)
    guard(torch._ops.OpOverloadPacket)


_find_each_op_once()


class Gathering:
    """A collective object exchange built on a barrier. After `fail`, nobody waits in it any more."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self._slots: list[Any] = [None] * world_size
        self._barrier = threading.Barrier(world_size)
        self._timeout_s = timeout_s

    def of(self, rank: int) -> ExchangeFn:
        def exchange(item: Any) -> list[Any]:
            self._slots[rank] = item
            self._barrier.wait(self._timeout_s)
            everyone = list(self._slots)
            self._barrier.wait(self._timeout_s)
            return everyone

        return exchange

    def fail(self) -> None:
        self._barrier.abort()


def run_ranks(world_size: int, body: Callable[[int, ExchangeFn], T], *, timeout_s: float = 60.0) -> list[T]:
    """Run body(rank, exchange) in a thread per rank; the results in rank order.

    If ranks raise, the first exception in time is raised again here, with its rank and the others' exceptions as notes.

    [Note: No collection beside ranks] A garbage collection in one rank's thread looks into the autograd graphs of all threads,
    also of those that run a backward without the interpreter's lock, against which torch has no guard. So cyclic garbage waits
    until the ranks have ended.
    """
    gathering = Gathering(world_size, timeout_s)
    results: list[Any] = [None] * world_size
    errors: list[tuple[float, int, BaseException]] = []

    def main(rank: int) -> None:
        try:
            results[rank] = body(rank, gathering.of(rank))
        except BaseException as error:
            errors.append((time.monotonic(), rank, error))
            gathering.fail()

    threads = [threading.Thread(target=main, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(world_size)]
    collects = gc.isenabled()
    gc.disable()
    try:
        for thread in threads:
            thread.start()
        limit = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(limit - time.monotonic(), 0.0))
    finally:
        if collects:
            gc.enable()
    stuck = [thread.name for thread in threads if thread.is_alive()]
    if errors:
        errors.sort(key=lambda entry: entry[0])
        _, rank, first = errors[0]
        notes = [f"raised first, by rank {rank} of {world_size}"]
        notes += [f"then rank {other} raised {type(error).__name__}: {error}" for _, other, error in errors[1:]]
        notes += [f"still running: {stuck}"] if stuck else []
        if hasattr(first, "add_note"):
            for note in notes:
                first.add_note(note)
        raise first
    if stuck:
        raise TimeoutError(f"{stuck} of {world_size} ranks did not end within {timeout_s} s")
    return results
