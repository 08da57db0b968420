"""Ranks as processes of their own, for what threads cannot show: death by a signal, fork, resources given back at exit."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from tests.support.workers import PRELOAD

# The server, which is that of workers.py, imports torch once; the ranks are forked from it and not from the test's process
# with its threads.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(list(PRELOAD))


class RankPipe:
    """The child's end: `exchange` (collective) and `report` (to the test)."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def exchange(self, item: Any) -> list[Any]:
        self._connection.send(("exchange", item))
        return self._connection.recv()

    def report(self, value: Any) -> None:
        self._connection.send(("report", value))


def _main(body: Callable[..., Any], rank: int, connection: Any, arguments: tuple[Any, ...]) -> None:
    try:
        result = ("result", body(rank, RankPipe(connection), *arguments))
    except BaseException:
        result = ("error", traceback.format_exc())
    connection.send(result)


class RankProcesses:
    """with RankProcesses(3, body, *arguments) as ranks: body(rank, pipe, *arguments) runs in each; body is a module's function.

    `next_report()` -> (rank, value); `kill(rank)`; `results(timeout_s)` -> {rank: result} of the ranks that were not killed.
    Every process is ended when the block is left.
    """

    def __init__(self, world_size: int, body: Callable[..., Any], *arguments: Any) -> None:
        self._reports: queue.Queue[tuple[int, Any]] = queue.Queue()
        self._results: dict[int, Any] = {}
        self._errors: dict[int, str] = {}
        self._pipes: dict[Any, int] = {}
        self.processes = []
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_main, args=(body, rank, theirs, arguments), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes[ours] = rank
        self._hub = threading.Thread(target=self._serve, daemon=True)
        self._hub.start()

    def _serve(self) -> None:
        waiting: dict[int, tuple[Any, Any]] = {}
        open_pipes = dict(self._pipes)
        while open_pipes:
            for pipe in multiprocessing.connection.wait(list(open_pipes)):
                rank = open_pipes[pipe]
                try:
                    kind, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):  # the rank has ended, or close() was called
                    del open_pipes[pipe]
                    continue
                if kind == "exchange":
                    waiting[rank] = (pipe, value)
                    if len(waiting) == len(self._pipes):
                        everyone = [waiting[r][1] for r in range(len(waiting))]
                        for waiter, _ in waiting.values():
                            waiter.send(everyone)
                        waiting = {}
                elif kind == "report":
                    self._reports.put((rank, value))
                elif kind == "result":
                    self._results[rank] = value
                else:
                    self._errors[rank] = value
                    self._reports.put((rank, RuntimeError(value)))

    def next_report(self, timeout_s: float = 60.0) -> tuple[int, Any]:
        rank, value = self._reports.get(timeout=timeout_s)
        if isinstance(value, RuntimeError):
            raise value
        return rank, value

    def kill(self, rank: int) -> float:
        """SIGKILL; the monotonic time just before it."""
        now = time.monotonic()
        os.kill(self.processes[rank].pid, signal.SIGKILL)
        return now

    def results(self, timeout_s: float = 60.0) -> dict[int, Any]:
        limit = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(limit - time.monotonic(), 0.0))
        self._hub.join(5.0)
        if self._errors:
            raise AssertionError("\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(self._errors.items())))
        stuck = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        if stuck:
            raise TimeoutError(f"ranks {stuck} did not end within {timeout_s} s")
        return dict(self._results)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(5.0)
        for pipe in self._pipes:
            pipe.close()  # type: ignore[attr-defined]
