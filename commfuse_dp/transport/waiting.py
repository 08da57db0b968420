"""Waits of the CPU for something that a transport brings, with its deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from commfuse_dp.errors import DeadlineError, PeerLostError, Where
from commfuse_dp.interrupts import HELD, deliver_held
from commfuse_dp.transport.base import Transport
from commfuse_dp.transport.checks import too_late

LONGEST_WAIT_S = 0.05  # callers whose condition changes by something other than a message look again this often


def await_news(news: threading.Event, timeout_s: float) -> None:
    """A thread of the transport sets it when something has arrived; whoever looks afterwards sees all that came before."""
    news.wait(min(timeout_s, LONGEST_WAIT_S))
    news.clear()


def wait_until(transport: Transport, ready: Callable[[], bool], *, peer: int, where: Where, doing: str) -> None:
    """Block until ready(), with progress and the deadline. peer: who is waited for; -1: all of them, or nobody in particular.
    `doing` completes "rank 1 waits for ..." in errors.

    Raises DeadlineError, or PeerLostError: a loss that is heard of in here says what was waited for."""
    here = transport.membership.called(transport.rank)
    who = f"rank {transport.membership.called(peer)}" if peer >= 0 else "its peers"
    limit = time.monotonic() + transport.deadline_s
    recovery = transport.recovery
    try:
        while True:
            if HELD.pending:
                deliver_held()
            before = transport.activity
            if ready():
                return
            if recovery is not None:
                recovery.check(peer, ready, where, doing)
            if transport.activity != before:  # something was taken in while it looked: it may be ready now, do not sleep
                continue
            left = limit - time.monotonic()
            if left <= 0:
                text = too_late(here, transport.deadline_s, f"{who}: {doing}", who, where, transport.name)
                raise DeadlineError(text, rank=here, peer=transport.membership.called(peer), where=where)
            transport.progress(min(left, transport.sleep_s))
    except PeerLostError as error:
        if error.where is not None:
            raise
        text = f"{error} Rank {here} was waiting for {who}: {doing} ({where})."
        raise PeerLostError(text, rank=here, peer=error.peer, where=where) from None
