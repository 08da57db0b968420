"""A program that ends without close() still says goodbye: its peers may not need it any more."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing.util
import os
import weakref

from commfuse_dp.transport.base import Transport

_open: weakref.WeakSet[Transport] = weakref.WeakSet()


def close_at_exit(transport: Transport) -> None:
    """Close it when the process ends, if it is still there and open."""
    _open.add(transport)
    _register(os.getpid())


@functools.cache
def _register(pid: int) -> None:
    """Once per process. A child forked by multiprocessing ends without running atexit functions, but runs finalizers."""
    atexit.register(_close_all)
    multiprocessing.util.Finalize(None, _close_all, exitpriority=100)


def _close_all() -> None:
    for transport in list(_open):
        with contextlib.suppress(Exception):
            transport.close()
