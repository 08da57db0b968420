"""The end of a transport, also of one whose program ends without close(): it still says goodbye, as peers may go on."""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing.util
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from commfuse_dp.device.base import Event
from commfuse_dp.transport.base import Transport

CLOSE_S = 5.0  # longest time that close() waits for a transport's streams, and again after releasing them

_log = logging.getLogger("commfuse_dp")
never_freed: list[object] = []  # memory that streams may still touch: see `never_free`
left_to_parent: weakref.WeakSet[Any] = weakref.WeakSet()  # whose copies in a child made by fork are told `leave_to_parent`
_open: weakref.WeakKeyDictionary[Transport, Callable[[Transport], object]] = weakref.WeakKeyDictionary()


def close_at_exit(transport: Transport, close: Callable[[Transport], object] = lambda transport: transport.close()) -> None:
    """Close it when the process ends, if it is still there and open. close: how, if a program that ends has less patience."""
    _open[transport] = close
    _register(os.getpid())


def forget(transport: Transport) -> None:
    """It is closed, or must not be."""
    _open.pop(transport, None)


@functools.cache
def _register(pid: int) -> None:
    """Once per process. A child forked by multiprocessing ends without running atexit functions, but runs finalizers."""
    atexit.register(_close_all)
    multiprocessing.util.Finalize(None, _close_all, exitpriority=100)


def _close_all() -> None:
    for transport, close in list(_open.items()):
        try:
            close(transport)
        except Exception as error:  # the process ends, and others are still to be closed
            rank = transport.membership.called(transport.rank)
            _log.debug("transport %s of rank %d at exit: %s", transport.name, rank, error)


def never_free(transport: Transport, why: str, *memory: object) -> None:
    """The end of a transport whose streams cannot be freed: what they may still touch is kept until the process ends."""
    never_freed.append(memory)
    _log.warning("rank %d: transport %s: %s", transport.membership.called(transport.rank), transport.name, why)


def _after_fork() -> None:
    for copy in list(left_to_parent):
        copy.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def done_within(events: Sequence[Event], seconds: float, meanwhile: Callable[[], object] = lambda: None) -> bool:
    """Wait until all of them are done; False after so many seconds, or once meanwhile() is true."""
    limit = time.monotonic() + seconds
    while not all(event.done() for event in events):
        if time.monotonic() > limit or meanwhile():
            return False
        time.sleep(0.0005)
    return True
