"""Numbers of things, for ops that take tensors and numbers only."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class Numbers(Generic[T]):
    """What has which number: given on first use, from 1 on, to one thing only. They keep nothing alive."""

    def __init__(self, gone: str) -> None:
        """gone: the error for the number of what is no more."""
        self._gone = gone
        self._lock = threading.Lock()
        self._next = itertools.count(1)
        self._numbers: weakref.WeakKeyDictionary[T, int] = weakref.WeakKeyDictionary()
        self._things: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def of(self, thing: T) -> int:
        with self._lock:
            number = self._numbers.get(thing)
            if number is None:
                number = self._numbers[thing] = next(self._next)
                self._things[number] = thing
            return number

    def find(self, number: int) -> T:
        """Raises RuntimeError."""
        thing = self._things.get(number)
        if thing is None:
            raise RuntimeError(self._gone)
        return thing
