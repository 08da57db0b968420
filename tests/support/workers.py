"""Worker processes that live as long as the test session: one pool per world size, one gloo process group per pool.

    def body(rank: int, world_size: int, factor: float) -> float: ...        # a top-level function of any importable module

    def test_it(workers):
        results = workers(2).run(body, 3.0, timeout=60)                      # one result per rank, in rank order

Arguments and results are pickled. A rank that raises, dies or passes the deadline fails the call with every rank's traceback
(or stack) and the end of its output; the pool is then thrown away and built anew, so that no test inherits its wreckage.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import reduce
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_STARTUP_S = 120.0
_GRACE_S = 5.0  # after the first failure, for the other ranks to fail by themselves
_TAIL = 4000  # characters of a rank's output in an error, before what faulthandler wrote
_STACKS = re.compile(r"^(Fatal Python error: |(Current thread|Thread) 0x)", re.MULTILINE)  # how what it writes begins
_STACK_LINES = 200  # of that: of more, the first and the last, for the thread that failed may be either
_PR_SET_PDEATHSIG = 1
# Imported once, by the fork server. The last two are what the first optimizer, the first compiled block and DeepSpeed's first
# engine of a process import: 5 s, which every rank of every pool paid.
PRELOAD = (
    "torch",
    "torch.distributed.fsdp",
    "commfuse_dp.integrations.fsdp2",
    "torch._dynamo",
    "torch._inductor.compile_fx",
)


class WorkerError(AssertionError):
    """A call on a pool failed. `errors`: rank -> (type name, message) of the ranks that raised."""

    def __init__(self, message: str, errors: dict[int, tuple[str, str]]) -> None:
        super().__init__(message)
        self.errors = errors


# ---- in the worker ---------------------------------------------------------------------------------------------------
def _serve(rank: int, world_size: int, port: int, conn: Connection, output: str) -> None:
    # No orphans, even if the session is killed: our parent, the fork server, ends with the session, and we with it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the session's business
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # the imported modules: collecting after each call is then quick
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    conn.send_bytes(pickle.dumps((True, None)))
    modules = len(sys.modules)
    with contextlib.suppress(EOFError):
        while True:
            conn.send_bytes(_call(rank, world_size, conn.recv_bytes()))
            gc.collect()
            if len(sys.modules) > modules:  # a framework: a quarter of a second for each collection that looks through it
                modules = len(sys.modules)
                gc.freeze()


def _call(rank: int, world_size: int, request: bytes) -> bytes:
    try:
        path, module, name, payload = pickle.loads(request)
        sys.path[:] = path  # as in the session, which may have added folders of tests since
        fn = reduce(getattr, name.split("."), importlib.import_module(module))
        args, kwargs = pickle.loads(payload)  # may name classes of `module`
        random.seed(0)  # what a call draws does not depend on the calls before it
        sys.modules["torch"].manual_seed(0)
        return pickle.dumps((True, fn(rank, world_size, *args, **kwargs)))
    except BaseException as error:
        return pickle.dumps((False, (type(error).__name__, str(error), traceback.format_exc())))


# ---- in the session --------------------------------------------------------------------------------------------------
class WorkerPool:
    """`world_size` processes with a gloo group among them. Built at first use, rebuilt after a failed call."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[Any] = []
        self._conns: list[Connection] = []
        self._store: Any = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """[fn(rank, world_size, *args, **kwargs) for every rank], each in its own process. Raises WorkerError."""
        if not self._processes:
            self._start()
        self._signal(signal.SIGCONT)
        request = pickle.dumps((list(sys.path), fn.__module__, fn.__qualname__, pickle.dumps((args, kwargs))))
        for conn in self._conns:
            with contextlib.suppress(BrokenPipeError):  # the answer that does not come tells the rest
                conn.send_bytes(request)
        results = self._collect(timeout, f"{fn.__module__}.{fn.__qualname__}{args!r}")
        # Between calls they stand still: each gloo group that a test has made keeps a thread that looks around a hundred times
        # a second for as long as the process lives, and idle pools together took a sixth of the processor.
        self._signal(signal.SIGSTOP)
        return results

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        for conn in self._conns:
            conn.close()
        for process in self._processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._forget()

    def _start(self) -> None:
        import torch.distributed as dist

        self._folder = tempfile.TemporaryDirectory(prefix="workers-")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")  # imports torch once for all workers of the session
        context.set_forkserver_preload(list(PRELOAD))
        with _environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"):
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                args = (rank, self.world_size, self._store.port, theirs, self._output(rank))
                process = context.Process(target=_serve, args=args, name=f"rank-{rank}-of-{self.world_size}", daemon=True)
                process.start()
                theirs.close()  # so that the pipe ends when the worker does
                self._processes.append(process)
                self._conns.append(ours)
        self._collect(_STARTUP_S, "the start of the workers")

    def _collect(self, timeout: float, what: str) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        errors: dict[int, tuple[str, str]] = {}
        pending = {conn: rank for rank, conn in enumerate(self._conns)}
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), max(deadline - time.monotonic(), 0.0))
            if not ready:
                break
            for conn in ready:
                assert isinstance(conn, Connection)
                rank = pending.pop(conn)
                try:
                    good, value = pickle.loads(conn.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(1.0)
                    failures[rank] = f"died with exit code {self._processes[rank].exitcode}"
                else:
                    if good:
                        results[rank] = value
                        continue
                    errors[rank] = value[:2]
                    failures[rank] = value[2]
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        if not pending and not failures:
            return [results[rank] for rank in range(self.world_size)]
        stuck = sorted(pending.values())
        for rank in stuck:
            failures[rank] = f"was still running when its time was up ({timeout} s, {_GRACE_S} s after another rank's failure)"
            os.kill(self._processes[rank].pid, signal.SIGUSR1)  # have it write its stacks to its output
        if stuck:
            time.sleep(0.3)
        outputs = {rank: self._tail(rank) for rank in failures}
        self._kill()
        lines = [f"{what} failed on ranks {sorted(failures)} of {self.world_size}"]
        for rank, failure in sorted(failures.items()):
            lines += [f"---- rank {rank}: {failure.rstrip()}", f"---- rank {rank}, end of its output:", outputs[rank]]
        raise WorkerError("\n".join(lines), errors)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def _output(self, rank: int) -> str:
        assert self._folder is not None
        return str(Path(self._folder.name) / f"rank-{rank}.txt")

    def _tail(self, rank: int) -> str:
        try:
            output = Path(self._output(rank)).read_text(errors="replace").rstrip()
        except OSError:
            return ""
        found = _STACKS.search(output)
        start = found.start() if found else len(output)
        stacks = output[start:].splitlines()
        if len(stacks) > _STACK_LINES:
            half = _STACK_LINES // 2
            stacks[half:-half] = [f"... ({len(stacks) - 2 * half} lines)"]
        return output[:start][-_TAIL:] + "\n".join(stacks)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for conn in self._conns:
            conn.close()
        self._forget()

    def _forget(self) -> None:
        self._processes, self._conns, self._store = [], [], None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class Workers:
    """All pools of a session, by world size: `workers(2).run(...)`."""

    def __init__(self) -> None:
        self._pools: dict[int, WorkerPool] = {}

    def __call__(self, world_size: int) -> WorkerPool:
        return self._pools.setdefault(world_size, WorkerPool(world_size))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@contextlib.contextmanager
def _environment(**values: str):
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
