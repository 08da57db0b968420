"""Ctrl-C in a step: it raises at once, but not where something of ours is half done.

[Note: Ctrl-C]
The interpreter calls the handler of SIGINT between any two instructions of the main thread, and Python's own raises there:
behind a message that was taken from a socket and is not yet looked at, between a place that was reserved and the name that it
was to get, in a `finally`. What was weighed against that:

* Recovery that rebuilds all of a broken step. It does so for what belongs to one step. But what has left the kernel's queue and
  was dropped, or was counted and not sent, is known to nobody any more; and an exception in a `__del__` is lost.
* An order of updates in which each is whole between two instructions: for hundreds of places, and undone by the next change.
* Critical sections that hold the signal back. They cost two calls each, many times a layer, and every one has to be found.
* What is done: the *handler* looks at the stack. As long as there are steps, it stands before the one of the program. If the
  innermost frame that is neither torch's nor the standard library's is one of ours, the signal is held back; else it goes on at
  once. Our own code has nothing to do but `deliver_held` where an exception is planned for: in every turn of a wait, and at the
  end of what a layer does. To sleep in a wait (`rests`) is no state: there it raises at once.

What is held back comes at the latest when our code has returned: the signal is asked for again every few milliseconds. Who
presses Ctrl-C again after a second means it: that one raises wherever it is.

The program's handler stays its own. It is called with the arguments that it expects, may raise or not, and may be set at any
time, also by code that puts back what was there before: the next step, and a signal that is held
back, put a handler of ours in front again. The last engine
that is closed takes it away. In threads nothing of this is needed, for signals never raise there.

If the program's handler raises, whoever runs a step is told first (`Interruptible`), so that peers need not wait until this
rank begins its next one: hooks of torch that are `always_call`ed are not for a KeyboardInterrupt. Not so after a second Ctrl-C
inside our code, which may hold the locks that telling takes: then peers hear of it from where it passes through, or later.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

ASK_S = 0.005  # until a signal that is held back is asked for again
INSIST_S = 1.0  # a second one that comes later than this after the first is not held back

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
OURS = (_PACKAGE, os.path.join(os.path.dirname(os.path.dirname(_PACKAGE)), "integrations") + os.sep)  # editable: it lies beside
_PROGRAMS = ("cli" + os.sep, "examples" + os.sep, "launch" + os.sep, "run.py", "mpi_launch.py", "autoload.py")  # hold no state
_NOT_OURS = tuple(_PACKAGE + program for program in _PROGRAMS)
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_INSTALLED = (os.path.join(_LIBRARY, "site-packages"), os.path.join(_LIBRARY, "dist-packages"))


class Interruptible(Protocol):
    """Whoever runs steps."""

    def interrupted(self, error: BaseException, *, tell: bool) -> None:
        """The handler of Ctrl-C has raised, wherever the program is. tell: peers may be told; else it came in code of ours,
        which may hold the lock that this takes."""
        ...


class _Held:
    """The signal of this process that is held back."""

    __slots__ = ("asked", "delivering", "pending", "rest", "since")

    def __init__(self) -> None:
        self.pending = False
        self.since = 0.0  # it has come
        self.rest: Callable[[int, FrameType | None], Any] = signal.default_int_handler  # what has not yet been called for it
        self.asked = False  # the next call of the handler is no new signal
        self.delivering = False  # the program's handler runs


HELD = _Held()
_users: weakref.WeakSet[Any] = weakref.WeakSet()  # that run in the main thread
_resting: set[CodeType] = set()


def rests(function: F) -> F:
    """Decorator: a function that only sleeps until something may be done. An exception in it leaves all as it was."""
    _resting.add(function.__code__)
    return function


class Handler:
    """Stands before the handler that the program has set."""

    __slots__ = ("behind",)

    def __init__(self, behind: Callable[[int, FrameType | None], Any]) -> None:
        self.behind = behind

    def __call__(self, number: int, frame: FrameType | None) -> None:
        held = HELD
        asked, held.asked = held.asked, False
        if asked and not held.pending:  # it has come meanwhile
            return
        if held.delivering:  # a handler that was set after this one calls it, or Ctrl-C comes again while one runs
            self.behind(number, frame)
            return
        insisted = half_done(frame)
        if insisted:
            if not held.pending:
                held.since, held.pending, held.rest = time.monotonic(), True, self.behind
                _stand_in_front()  # else a handler that has called this one would be called again when the signal is asked for
                _thread.start_new_thread(_ask_again, ())
                return
            if asked or time.monotonic() - held.since < INSIST_S:
                return
        # Not who is set now: that one may have called this.
        _deliver(held.rest if asked else self.behind, frame, tell=not insisted)


def half_done(frame: FrameType | None) -> bool:
    """Whether it is our code that runs there, itself or through torch or the standard library."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    torch_files = os.path.dirname(torch) + os.sep if torch else "<"
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if code in _resting:
            return False
        here = file == __file__
        if not here and file.startswith(OURS) and not file.startswith(_NOT_OURS):
            return True
        library = file.startswith(_LIBRARY) and not file.startswith(_INSTALLED)
        if not here and not library and not file.startswith(("<", torch_files)):
            return False
        frame = frame.f_back
    return False


def watch(user: Interruptible) -> None:
    """A step of `user` begins in this thread."""
    if threading.get_ident() != threading.main_thread().ident:
        _users.discard(user)
        return
    _users.add(user)
    handler = _stand_in_front()
    if HELD.pending and handler is not None:  # set since the signal came, which is its own now
        HELD.rest = handler


def _stand_in_front() -> Callable[[int, FrameType | None], Any] | None:
    """Before the handler that is set now, if the program has one: that one, unless ours stood there already."""
    handler: Any = signal.getsignal(signal.SIGINT)
    main = threading.get_ident() == threading.main_thread().ident
    if not callable(handler) or isinstance(handler, Handler) or not main:
        return None
    signal.signal(signal.SIGINT, Handler(handler))
    return handler  # type: ignore[no-any-return]


def unwatch(user: Interruptible) -> None:
    """`user` runs no more steps."""
    _users.discard(user)
    if not _users and threading.get_ident() == threading.main_thread().ident:
        handler = signal.getsignal(signal.SIGINT)
        if isinstance(handler, Handler):
            signal.signal(signal.SIGINT, handler.behind)


def deliver_held() -> None:
    """To be called where an exception may come, if `HELD.pending`: the program's handler is called, which may raise."""
    if HELD.pending and threading.get_ident() == threading.main_thread().ident:
        handler: Any = signal.getsignal(signal.SIGINT)
        if isinstance(handler, Handler):
            handler = HELD.rest
        if callable(handler):
            _deliver(handler, sys._getframe(1), tell=True)
        else:  # the program has changed its mind since
            HELD.pending = False
            signal.raise_signal(signal.SIGINT)


def _deliver(handler: Callable[[int, FrameType | None], Any], frame: FrameType | None, *, tell: bool) -> None:
    HELD.pending = False
    HELD.delivering = True
    try:
        handler(signal.SIGINT, frame)
    except BaseException as error:
        HELD.delivering = False
        for user in list(_users):
            user.interrupted(error, tell=tell)
        raise
    finally:
        HELD.delivering = False


def _ask_again() -> None:
    """In a thread of its own, as long as a signal is held back."""
    while True:
        time.sleep(ASK_S)
        if not HELD.pending:
            return
        if not isinstance(signal.getsignal(signal.SIGINT), Handler):  # the program has set another one since: it is that one's
            HELD.pending = False
            _thread.interrupt_main(signal.SIGINT)
            return
        if not HELD.asked:  # else the last one is still to come: it would take this mark, and the next would be a new signal
            HELD.asked = True
            _thread.interrupt_main(signal.SIGINT)
