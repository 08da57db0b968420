"""When a Ctrl-C raises: at once, but not while code of ours is at work. Signals are real, the code at work is made up."""

from __future__ import annotations

import _thread
import functools
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from commfuse_dp.integrations import fsdp2
from torch.distributed import HashStore

from commfuse_dp import interrupts
from commfuse_dp.engine import replicas
from commfuse_dp.engine.engine import Engine
from commfuse_dp.interrupts import HELD, OURS, Handler, deliver_held, rests, unwatch, watch
from commfuse_dp.transport.membership import Membership

PATIENCE_S = 30.0  # in which what must come has come, however busy the machine is

OUR_FILE = os.path.join(OURS[0], "engine", "made_up.py")
OTHER_FILES = (
    "observe/made_up.py",
    "errors.py",
    "config.py",
    "__init__.py",
    "integrations/made_up.py",
    "a_new_room/made_up.py",
)
PROGRAMS = ("cli/made_up.py", "launch/made_up.py", "examples/demo/made_up.py", "run.py", "mpi_launch.py", "autoload.py")
TORCH_FILE = os.path.join(os.path.dirname(torch.__file__), "made_up.py")
LIBRARY_FILE = os.path.join(os.path.dirname(os.__file__), "made_up.py")
USER_FILES = ("/home/user/train.py", os.path.join(os.path.dirname(pytest.__file__), "made_up.py"))

press = functools.partial(signal.raise_signal, signal.SIGINT)  # the handler is called in the frame that calls this


class User:
    def __init__(self) -> None:
        self.heard: list[BaseException] = []
        self.may_tell: list[bool] = []

    def interrupted(self, error: BaseException, *, tell: bool) -> None:
        self.heard.append(error)
        self.may_tell.append(tell)


START = """
def start(function, arguments):
    asking.append(Thread(target=function))
    asking[-1].start()
"""


@pytest.fixture
def user(monkeypatch) -> Iterator[User]:
    """A step runs, with the handler that a program begins with. Engines of other tests are none of its business."""
    asking: list[threading.Thread] = []
    scope: dict[str, Any] = {"asking": asking, "Thread": threading.Thread}
    # As if it were part of the handler: the thread may ask before its `start` returns, which must not look like user's code.
    exec(compile(START, interrupts.__file__, "exec"), scope)
    how = SimpleNamespace(start_new_thread=scope["start"], interrupt_main=_thread.interrupt_main)
    monkeypatch.setattr(interrupts, "_thread", how)
    monkeypatch.setattr(interrupts, "_users", weakref.WeakSet())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    made = User()
    watch(made)
    try:
        yield made
    finally:
        HELD.pending = False
        for thread in asking:  # while our handler is there, which hears that nothing is held back
            thread.join()
        HELD.asked = False
        unwatch(made)
        signal.signal(signal.SIGINT, before)


def in_file(file: str, *actions: Callable[[], object]) -> Callable[[], None]:
    """A function of a source file that does this, one after the other."""
    scope: dict[str, Any] = {}
    exec(compile("def work(actions):\n    for action in actions:\n        action()\n", file, "exec"), scope)
    return functools.partial(scope["work"], actions)


def linger() -> None:
    """Code of the user's that runs until it is interrupted."""
    limit = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit:
        time.sleep(0.001)


@pytest.fixture
def unasked(monkeypatch) -> list[Callable[[], None]]:
    """Nobody asks again but who calls what is in here."""
    found: list[Callable[[], None]] = []

    def start(function: Callable[[], None], arguments: object) -> None:
        found.append(function)

    monkeypatch.setattr(interrupts, "_thread", SimpleNamespace(start_new_thread=start, interrupt_main=_thread.interrupt_main))
    return found


def done(order: list[str]) -> Callable[[], object]:
    return functools.partial(order.append, "done")


@pytest.mark.parametrize("between", [None, TORCH_FILE, LIBRARY_FILE, "<string>"])
def test_it_raises_behind_what_is_half_done(user, between):
    order: list[str] = []
    action = press if between is None else in_file(between, press)
    with pytest.raises(KeyboardInterrupt) as caught:
        in_file(OUR_FILE, action, done(order))()
        linger()
    assert order == ["done"]
    assert user.heard == [caught.value]
    assert not HELD.pending


@pytest.mark.parametrize("file", OTHER_FILES)
def test_all_of_the_package_is_ours(user, unasked, file):
    order: list[str] = []
    in_file(os.path.join(OURS[0], file), press, done(order))()
    assert order == ["done"] and HELD.pending


def test_integrations_that_lie_beside_the_package_are_ours():
    assert fsdp2.__file__.startswith(OURS)


@pytest.mark.parametrize("file", [*USER_FILES, TORCH_FILE, LIBRARY_FILE, *(os.path.join(OURS[0], name) for name in PROGRAMS)])
def test_elsewhere_it_raises_at_once(user, file):
    order: list[str] = []
    with pytest.raises(KeyboardInterrupt) as caught:
        in_file(file, press, done(order))()
    assert not order and user.heard == [caught.value]


def test_a_hook_of_the_user_is_no_code_of_ours(user):
    order: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        in_file(OUR_FILE, in_file(USER_FILES[0], press), done(order))()
    assert not order


def test_it_raises_in_a_sleep(user):
    order: list[str] = []

    @rests
    def sleep() -> None:
        press()

    code = sleep.__code__.replace(co_filename=OUR_FILE)
    interrupts._resting.add(code)
    ours = type(sleep)(code, sleep.__globals__)
    with pytest.raises(KeyboardInterrupt):
        in_file(OUR_FILE, ours, done(order))()
    assert not order


def test_where_an_exception_is_planned_for_it_raises(user, unasked):
    order: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        in_file(OUR_FILE, press, done(order), deliver_held, done(order))()
    assert order == ["done"]


def test_who_insists_is_heard(user, unasked, monkeypatch):
    order: list[str] = []
    monkeypatch.setattr(interrupts, "INSIST_S", 1000.0)
    in_file(OUR_FILE, press, press, done(order))()  # twice at once: a launcher passes on what the terminal has sent, too
    assert order == ["done"] and HELD.pending
    monkeypatch.setattr(interrupts, "INSIST_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        in_file(OUR_FILE, press, done(order))()
    assert order == ["done"] and not HELD.pending
    assert user.may_tell == [False]  # our code may hold the lock that this takes
    with pytest.raises(KeyboardInterrupt):
        press()
    with pytest.raises(KeyboardInterrupt):
        in_file(OUR_FILE, press, deliver_held)()
    assert user.may_tell == [False, True, True]


def test_a_handler_of_the_program_is_called_once_and_need_not_raise(user, unasked):
    calls: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append((number, frame)))
    watch(user)
    in_file(OUR_FILE, press, deliver_held)()
    press()
    assert [number for number, _ in calls] == [signal.SIGINT] * 2
    assert calls[0][1] is not None and calls[0][1].f_code.co_filename == OUR_FILE
    assert not user.heard


def test_a_handler_that_is_put_back_is_that_of_before(user):
    calls: list[str] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append("for a while"))
    watch(user)
    press()
    signal.signal(signal.SIGINT, before)
    watch(user)
    with pytest.raises(KeyboardInterrupt):
        press()
    assert calls == ["for a while"]


def call_the_one_of_before(calls: list[str]) -> None:
    """Set a handler that does, and says so."""
    before = signal.getsignal(signal.SIGINT)
    assert isinstance(before, Handler)

    def handler(number: int, frame: FrameType | None) -> None:
        calls.append("called")
        before(number, frame)

    signal.signal(signal.SIGINT, handler)


def test_a_handler_that_calls_the_one_of_before(user, unasked):
    calls: list[str] = []
    call_the_one_of_before(calls)
    watch(user)
    order: list[str] = []
    in_file(OUR_FILE, press, done(order))()
    assert order == ["done"] and not calls
    with pytest.raises(KeyboardInterrupt):
        in_file(OUR_FILE, deliver_held)()
    assert calls == ["called"]


def test_a_handler_that_calls_the_one_of_before_is_called_once(user):
    """No step has begun since it was set."""
    calls: list[str] = []
    call_the_one_of_before(calls)
    with pytest.raises(KeyboardInterrupt) as caught:
        press()
    assert calls == ["called"] and user.heard == [caught.value]


@pytest.mark.parametrize("ask", [True, False])
def test_a_handler_that_calls_the_one_of_before_is_called_once_for_what_is_held_back(user, unasked, ask):
    """No step has begun since it was set: it has called ours, which holds back what it calls itself."""
    calls: list[str] = []
    call_the_one_of_before(calls)
    order: list[str] = []
    in_file(OUR_FILE, press, done(order))()
    assert order == ["done"] and calls == ["called"] and HELD.pending and len(unasked) == 1
    with pytest.raises(KeyboardInterrupt) as caught:
        if ask:
            unasked[0]()
            linger()
        else:
            in_file(OUR_FILE, deliver_held)()
    assert calls == ["called"] and user.heard == [caught.value] and not HELD.pending
    with pytest.raises(KeyboardInterrupt):
        press()  # a new one
    assert calls == ["called"] * 2


def test_a_handler_that_comes_while_a_signal_is_held_back_gets_it(user, unasked):
    calls: list[str] = []
    in_file(OUR_FILE, press)()
    signal.signal(signal.SIGINT, lambda number, frame: calls.append("called"))
    (ask_again,) = unasked
    ask_again()
    assert calls == ["called"] and not HELD.pending


def test_it_is_asked_for_as_long_as_it_is_held_back(user, unasked):
    """An answer that comes when the signal has been delivered is none."""
    in_file(OUR_FILE, press)()
    (ask_again,) = unasked
    order: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        in_file(OUR_FILE, deliver_held)()
    ask_again()  # returns
    HELD.asked = True  # the thread has come so far, and then the signal is delivered
    in_file(OUR_FILE, press, done(order))()
    assert order == ["done"] and not HELD.pending and len(unasked) == 1


@pytest.mark.parametrize("kind", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_program_without_a_handler_stays_without(kind):
    before = signal.signal(signal.SIGINT, kind)
    user = User()
    try:
        watch(user)
        assert signal.getsignal(signal.SIGINT) is kind
    finally:
        unwatch(user)
        signal.signal(signal.SIGINT, before)


def test_the_last_one_takes_it_away():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    first, second = User(), User()
    try:
        watch(first)
        watch(second)
        watch(first)
        unwatch(first)
        assert isinstance(signal.getsignal(signal.SIGINT), Handler)
        unwatch(second)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_steps_in_a_thread_are_none_of_its_business(user):
    other = User()

    def run() -> None:
        watch(other)
        HELD.pending = True
        deliver_held()
        HELD.pending = False

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    with pytest.raises(KeyboardInterrupt):
        press()
    assert user.heard and not other.heard


@pytest.mark.parametrize("place", ["finish", "drain"])
def test_the_end_of_a_backward_raises_before_the_step_counts_as_gone_through(user, unasked, place):
    """Later it comes outside of our code: peers have gone through, too."""
    engine, told = Engine.__new__(Engine), []
    pressed = in_file(OUR_FILE, press)
    parts = {name: pressed if name == place else (lambda: None) for name in ("finish", "drain")}
    engine._backward = SimpleNamespace(finish=parts["finish"])  # type: ignore[assignment]
    engine.gradients = SimpleNamespace(drain=parts["drain"])  # type: ignore[assignment]
    engine.transport = SimpleNamespace(device=None)  # type: ignore[assignment]
    engine.probe = SimpleNamespace(ended=lambda *_: None)  # type: ignore[assignment]
    engine.breakage = SimpleNamespace(by=lambda what, error: told.append(error), complete=False)  # type: ignore[assignment]
    if place == "finish":
        with pytest.raises(KeyboardInterrupt) as caught:
            engine.finish_backward()
        assert told == [caught.value]
    else:
        engine.finish_backward()
        assert HELD.pending and not told
    assert engine.breakage.complete == (place == "drain")


def waiting_for(monkeypatch: pytest.MonkeyPatch, work: Any) -> tuple[replicas.Replicating, replicas.ReplicaGroup]:
    """`work` is an all-reduce of two replicas."""
    made_up = SimpleNamespace(
        PrefixStore=lambda name, store: store, get_rank=lambda: 0, get_process_group_ranks=lambda _: [0, 1]
    )
    monkeypatch.setattr(replicas, "dist", made_up)
    group: Any = SimpleNamespace(size=lambda: 2, group_name="replicas")
    kept: Any = SimpleNamespace(item=replicas.Communicator(group))
    shards: Any = SimpleNamespace(membership=Membership(2), progress=lambda: None)
    group_of = replicas.ReplicaGroup(kept, HashStore(), PATIENCE_S, shards)
    return replicas.Replicating(group_of, work, 1, 1), group_of


@pytest.mark.parametrize("interruptible", [True, False])
def test_a_wait_for_replicas_raises_where_that_is_planned_for(user, unasked, monkeypatch, interruptible):
    """The other replica comes after the third look."""
    looks: list[str] = []

    class Work:
        def wait(self, patience: object = None) -> None:
            looks.append("look")
            if len(looks) == 1:
                in_file(OUR_FILE, press)()
            if len(looks) < 3:
                raise RuntimeError("time is up")

        def is_completed(self) -> bool:
            return False

    waiting, _ = waiting_for(monkeypatch, Work())
    if interruptible:
        with pytest.raises(KeyboardInterrupt):
            waiting.wait(interruptible=True)
        assert len(looks) == 1
    else:
        waiting.wait()
        assert len(looks) == 3 and HELD.pending


def test_an_all_reduce_that_comes_through_as_the_patience_ends_is_no_loss(monkeypatch):
    outcomes = iter([RuntimeError("Operation timed out!"), None])

    class Work:
        def wait(self, patience: object = None) -> None:
            outcome = next(outcomes)
            if outcome is not None:
                raise outcome

        def is_completed(self) -> bool:
            return True

    waiting, group = waiting_for(monkeypatch, Work())
    group._open = 1  # begun
    waiting.wait()
    assert next(outcomes, "none is left") == "none is left" and group._open == 0


def test_what_is_held_back_is_that_of_the_handler_set_since(user, unasked):
    """A step begins between the signal and its delivery, behind a handler that the program has set meanwhile."""
    heard: list[int] = []
    in_file(OUR_FILE, press)()
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    watch(user)
    deliver_held()
    assert heard == [signal.SIGINT] and not HELD.pending
