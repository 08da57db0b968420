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

from commfuse_dp.transport.base import Transport

LOOK_S = 1e-3  # longest sleep of a wait beside which other streams want to be looked after: their peers cannot wake it

_Callback = Callable[[], object]

_lock = threading.Lock()
# Thread -> what it has registered. By the object: an identifier comes again when its thread has ended.
_known: weakref.WeakKeyDictionary[threading.Thread, tuple[weakref.WeakMethod[_Callback], ...]] = weakref.WeakKeyDictionary()


def register(callback: _Callback) -> None:
    """callback: a bound method, called in waits of the calling thread for as long as its object lives."""
    me = threading.current_thread()
    with _lock:
        living = tuple(ref for ref in _known.get(me, ()) if ref() is not None)
        _known[me] = (*living, weakref.WeakMethod(callback))


def unregister(callback: _Callback) -> None:
    """From any thread; nothing, if it is not known."""
    with _lock:
        for thread, refs in list(_known.items()):
            left = tuple(ref for ref in refs if ref() is not None and ref() != callback)
            if left:
                _known[thread] = left
            else:
                del _known[thread]


def callbacks() -> list[_Callback]:
    """Of the calling thread."""
    return [found for ref in _known.get(threading.current_thread(), ()) if (found := ref()) is not None]


@contextmanager
def looking_often(transport: Transport) -> Iterator[None]:
    """Waits of `transport` inside the body never sleep for longer than LOOK_S."""
    before, transport.sleep_s = transport.sleep_s, LOOK_S
    try:
        yield
    finally:
        transport.sleep_s = before
