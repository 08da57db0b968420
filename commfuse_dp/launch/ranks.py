"""Starts the ranks of one job as child processes, relays what they print, and makes sure that none outlives the job.

[Note: No orphans]
Every rank is the leader of a session of its own, so a Ctrl-C at the terminal reaches the parent only, which then ends the
ranks in order. If the parent itself is killed, a rank sees the end of its standard input (`die_with_parent`) and leaves.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, NamedTuple, NoReturn

from commfuse_dp.errors import CommFuseError

LAST_LINES = 15
_GRACE_S = 3.0  # for the other ranks to name their own error, and for a rank to leave after SIGTERM


class RankDied(CommFuseError):
    """A rank ended with an error; the message has its last lines."""


class RanksLate(RankDied):
    """The ranks were not done in time, and were ended."""


class Line(NamedTuple):
    """One line that a rank printed on its standard output."""

    rank: int
    text: str


class Ranks:
    """The processes of one job; a context manager. Iterate over `lines()` until all have ended.

    `commands[r]` runs rank r; `environments[r]` is added to this process's environment.
    """

    def __init__(self, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self._last: list[deque[str]] = [deque(maxlen=LAST_LINES) for _ in commands]
        self._queue: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._readers: list[threading.Thread] = []
        try:
            for rank, (command, extra) in enumerate(zip(commands, environments, strict=True)):
                self._start(rank, command, extra)
        except BaseException:
            self.stop()
            raise

    def _start(self, rank: int, command: Sequence[str], extra: Mapping[str, str]) -> None:
        process = subprocess.Popen(
            list(command),
            env={**os.environ, **extra},
            stdin=subprocess.PIPE,  # never written to: its end tells the rank that this process is gone
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._processes.append(process)
        assert process.stdout is not None and process.stderr is not None
        for stream, relay in ((process.stdout, True), (process.stderr, False)):
            reader = threading.Thread(target=self._read, args=(rank, stream, relay), daemon=True, name=f"rank{rank}-output")
            reader.start()
            self._readers.append(reader)

    def _read(self, rank: int, stream: IO[str], relay: bool) -> None:
        for text in stream:
            text = text.rstrip("\n")
            if relay:
                self._queue.put(Line(rank, text))
            elif text.strip():
                self._last[rank].append(text)
        self._queue.put(None)  # this stream has ended

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def lines(self, limit_s: float | None = None) -> Iterator[Line]:
        """Standard output of all ranks as it comes; ends when all ranks ended well. Raises RankDied as soon as one did not;
        RanksLate, once they are ended, if they are not done after limit_s."""
        until = math.inf if limit_s is None else time.monotonic() + limit_s
        open_streams = len(self._readers)
        while open_streams:
            self._raise_if_dead()
            if time.monotonic() > until:
                self._end_late()
            try:
                item = self._queue.get(timeout=0.1)
            except queue.Empty:
                continue
            if item is None:
                open_streams -= 1
            else:
                yield item
        for process in self._processes:
            try:
                process.wait(None if limit_s is None else max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._end_late()
        self._raise_if_dead()

    def _end_late(self) -> None:
        self.stop()
        self._raise_if_dead(RanksLate)

    def _raise_if_dead(self, kind: type[RankDied] = RankDied) -> None:
        first = [rank for rank, process in enumerate(self._processes) if process.poll() not in (None, 0)]
        if not first:
            return
        limit = time.monotonic() + _GRACE_S
        while time.monotonic() < limit and any(process.poll() is None for process in self._processes):
            time.sleep(0.05)
        for reader in self._readers:
            reader.join(0.2)
        dead = {rank: process.returncode for rank, process in enumerate(self._processes) if process.poll() not in (None, 0)}
        # A rank that was killed could not say so, and its peers then fail because of it: name it first.
        order = sorted(dead, key=lambda rank: (dead[rank] > 0, rank not in first, rank))
        parts = [self._obituary(rank, dead[rank]) for rank in order]
        raise kind("\n".join(parts))

    def _obituary(self, rank: int, code: int) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        if code == -signal.SIGKILL:
            how += " (by the kernel for lack of memory, or by hand)"
        said = "\n".join(f"    {line}" for line in self._last[rank]) or "    (it printed nothing on its standard error)"
        return f"rank {rank} {how}. Its last lines:\n{said}"

    def stop(self) -> None:
        """End what still runs, by SIGTERM and then SIGKILL to each rank's process group, and reap it. Safe to call twice."""
        alive = [process for process in self._processes if process.poll() is None]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in alive:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)
            limit = time.monotonic() + _GRACE_S
            for process in alive:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, limit - time.monotonic()))
            alive = [process for process in alive if process.poll() is None]
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for reader in self._readers:
            reader.join(1.0)


def die_with_parent() -> None:
    """In a rank: leave at once when the parent is gone (its end of our standard input closes)."""

    def watch() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(0, 1024):
                pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def run_as_rank(main: Callable[[], int | None]) -> NoReturn:
    """The whole of a rank's process: `main`, which returns its exit status (None: 0) or raises SystemExit with it; any other
    exception is printed, and is 1.

    [Note: No finalization] The process ends without the interpreter's own clean-up. With FSDP2 a device mesh keeps gloo's
    threads alive behind `destroy_process_group` (torch 2.13). Such a thread lets go of the last collective's tensors some time
    after that has returned, and takes the GIL for it; if the interpreter is being finalized it is ended there, inside a
    destructor, and the process aborts: "terminate called without an active exception". After an error threads of a backend may
    still wait for a peer that is gone."""
    die_with_parent()
    try:
        status = main() or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # whoever read it is gone
            stream.flush()
    os._exit(status)


def python_module(name: str) -> list[str]:
    """Command that runs a module with this interpreter, unbuffered."""
    return [sys.executable, "-u", "-m", name]
