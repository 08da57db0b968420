"""How a thread of a transport tells the user's thread that something has arrived."""

from __future__ import annotations

import threading

LONGEST_WAIT_S = 0.05  # callers whose condition changes by something other than a message look again this often


class News:
    """A counted bell. One thread waits, any thread rings.

    `wait` returns at once if the bell rang since the last `wait`, so nothing can be missed between the waiting thread's look
    at its state and its call.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._count = 0
        self._seen = 0

    def ring(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        with self._changed:
            if self._seen == self._count:
                self._changed.wait(min(timeout_s, LONGEST_WAIT_S))
            self._seen = self._count
