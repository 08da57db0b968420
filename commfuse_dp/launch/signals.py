"""Signals that end a program, as what Python can clean up after."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def terminate_as_exit() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block by SystemExit (128 + number), so that clean-up runs. Handlers of the caller are left
    alone; outside the main thread, which alone may set handlers, nothing is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    ours = [number for number in _ENDING if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold back what would interrupt clean-up, also in its child processes, until it is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_ENDING})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
