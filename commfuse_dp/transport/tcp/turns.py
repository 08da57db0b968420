"""Whose payload leaves: collectives to several peers leave one after the other, parameters and gradients side by side.

[Note: One after the other, or side by side]
A rank gives its slice of a gather to all its peers at once, first to the one that consumes it first. Connections that send
at the same time get equal shares of the link: every peer would have its slice when the last byte of all is through (tensor
parallelism at four ranks, communication of 0.56 of compute: 54 ms of 435 exposed side by side, none one after the other).
One after the other, the first peer has it after a third of that time; and since all ranks give at the same time and each begins
with another peer, each has one slice on its way to it at any time.

What peers pull ahead of their compute is asked for at other times, by each when it has room. One after the other, two ranks
would now and then send to the same peer, at half of the rate of their own links, while another peer gets nothing, and nobody
waits for the slice that comes first (FSDP2 at four ranks, communication = compute: 740 ms of a step of 2,900 exposed one after
the other, 100 side by side). Side by side a link is full as long as one of its connections is not held up by its receiver.
They pause for collectives, at the end of a chunk.

A connection keeps its turn until the kernel has sent all but UNSENT_BYTES of what it was given, so that the link never runs
dry. At the end of a chunk it gives the turn up in the same way to an older collective. A peer that acknowledges nothing for
PATIENCE_S (its process was stopped, say) loses it: the others do not wait for that one. (So where a round trip takes longer,
connections share the link as ever.) A frame without payload takes nothing of the link and needs no turn: a goodbye that waited
for another peer's megabytes could come after the end of its own connection.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import time
from collections.abc import Callable, Sequence

from commfuse_dp.transport.tcp.links import Link

UNSENT_BYTES = 128 << 10
PATIENCE_S = 0.1
_SIOCOUTQNSD = 0x894B  # linux/sockios.h


class Turns:
    """Of the data connections of one wire; used by its I/O thread only."""

    def __init__(self, links: Sequence[Link], watch: Callable[[Link, bool], None]) -> None:
        """watch: whether to wake the thread when a link may be written to."""
        self._links = links
        self._watch = watch
        self._holder: Link | None = None
        self._leaving = False  # the holder's turn is over but for what the kernel has not sent
        self._taken = 0  # bytes that the holder's peer has acknowledged
        self._since = 0.0
        self.patience: float | None = None  # seconds after which `whose` is to be asked again; None: after the next event

    def keeps(self, link: Link) -> bool:
        """Whether a link without a frame under way goes on with its next one."""
        if len(self._links) == 1 or link.next_up() is None or link.next_is_empty():
            return link.next_up() is not None
        leader = self._leader(self._ready())
        return leader is None or (link is leader and link is self._holder)

    def whose(self) -> Link | None:
        """The link that may be written to next."""
        if len(self._links) == 1:
            return self._links[0] if self._links[0].open and not self._links[0].idle() else None
        holder, ready = self._holder, self._ready()
        others_wait = any(link is not holder for link in ready)
        self.patience = PATIENCE_S if holder is not None and others_wait else None
        if not others_wait:
            self._taken = -1  # the time in which nobody waits does not count
        for link in ready:
            if link.next_is_empty() and not link.writing:
                return link
        leader = self._leader(ready)
        if leader not in (None, holder) and holder is not None and holder.open and not self._has_left(holder):
            return None
        self._stay()
        if leader is None:  # A holder stays one: what it was given last may not have left when the next collective comes.
            return min(ready, key=Link.next_up, default=None)  # type: ignore[arg-type]
        if leader is not holder:
            self._holder, self._taken = leader, -1
        elif others_wait and leader.writing and self._stuck(leader):
            self._holder = None
            return self.whose()
        return leader

    def _ready(self) -> list[Link]:
        """Links that have something to send, and are not in the middle of a frame."""
        return [link for link in self._links if link.open and not link.under_way() and link.next_up() is not None]

    def _leader(self, ready: Sequence[Link]) -> Link | None:
        """Whose collective goes now: the holder's, if a frame is under way there, else the oldest."""
        if self._holder is not None and self._holder.under_way() and self._holder.sends_collective():
            return self._holder
        return min((link for link in ready if link.sends_collective()), key=Link.next_up, default=None)  # type: ignore[arg-type]

    def _has_left(self, holder: Link) -> bool:
        """Of what it was given for its turn, the kernel has sent so much that the turn may pass on."""
        if unsent(holder.sock) <= UNSENT_BYTES or self._stuck(holder):
            return True
        if not self._leaving:
            self._leaving = True
            limit_unsent(holder.sock, 2 * UNSENT_BYTES)
        self._watch(holder, True)
        return False

    def _stay(self) -> None:
        """The holder is not leaving, or has left."""
        if self._leaving and self._holder is not None:
            self._leaving = False
            if self._holder.open:
                limit_unsent(self._holder.sock, self._holder.pace.queue_bytes)
                self._watch(self._holder, self._holder.under_way())

    def _stuck(self, holder: Link) -> bool:
        """The peer has acknowledged nothing for PATIENCE_S."""
        taken, now = holder.written - unacknowledged(holder.sock), time.monotonic()
        if taken != self._taken:
            self._taken, self._since = taken, now
        return now - self._since >= PATIENCE_S


def limit_unsent(sock: socket.socket, nbytes: int) -> None:
    """The kernel takes no more while it has so many bytes that it has not sent, and says so when half of them are gone."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, nbytes)


def unacknowledged(sock: socket.socket) -> int:
    """Bytes that the kernel has taken and the peer's has not acknowledged; 0 if it does not say."""
    return _ask(sock, termios.TIOCOUTQ)


def unsent(sock: socket.socket) -> int:
    """Those of them that have not been sent at all."""
    return _ask(sock, _SIOCOUTQNSD)


def _ask(sock: socket.socket, request: int) -> int:
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), request, b"\0\0\0\0"))[0])
    except OSError:
        return 0
