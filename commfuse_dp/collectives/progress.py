"""What a rank that waits in one stream of communication does for its other streams.

    rank 0 -- waits for rank 1 in tensor parallelism        rank 1 -- waits for room in rank 3's inbox (data parallelism)
    rank 3 -- waits for rank 2 in tensor parallelism        rank 2 -- waits for room in rank 0's inbox (data parallelism)

Nobody moves unless rank 0 and rank 3 make room while they wait. So a stream that peers may wait for registers what it does
then, and every program that waits (execution.py) does it. A callback never blocks. It belongs to the thread that has registered
it, which alone may call into that stream."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import NamedTuple, cast

from commfuse_dp.transport.base import Transport

LOOK_S = 1e-3  # longest sleep of a wait beside which other streams want to be looked after: their peers cannot wake it

_Callback = Callable[[], object]


class _Entry(NamedTuple):
    thread: weakref.ref[threading.Thread]
    callback: weakref.WeakMethod[_Callback]


# Without a lock: garbage is collected wherever something is allocated, also in here, and what is collected may be a model whose
# end calls unregister(). Each step is one operation of the dictionary, which no other thread sees half done.
_known: dict[tuple[int, str], _Entry] = {}


def register(callback: _Callback) -> None:
    """callback: a bound method, called in waits of the calling thread for as long as its object lives."""
    key = _key(callback)
    reference = weakref.WeakMethod(callback, lambda _: _known.pop(key, None))
    _known[key] = _Entry(weakref.ref(threading.current_thread()), reference)


def unregister(callback: _Callback) -> None:
    """From any thread; nothing, if it is not known."""
    _known.pop(_key(callback), None)


def callbacks() -> list[_Callback]:
    """Of the calling thread."""
    me = threading.current_thread()
    return [found for entry in list(_known.values()) if entry.thread() is me and (found := entry.callback()) is not None]


def _key(callback: _Callback) -> tuple[int, str]:
    method = cast(MethodType, callback)
    return id(method.__self__), method.__name__


@contextmanager
def looking_often(transport: Transport, others: list[_Callback]) -> Iterator[None]:
    """Waits of `transport` inside the body never sleep for longer than LOOK_S, if there are others to be looked after."""
    before = transport.sleep_s
    transport.sleep_s = LOOK_S if others else before
    try:
        yield
    finally:
        transport.sleep_s = before
