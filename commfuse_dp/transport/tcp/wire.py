"""The wire engine of the TCP transport: framed, prioritised, chunked transfer, one I/O thread a rank.

What it knows: frames, lanes, chunks, sockets. What it does not know: epochs, credits, what a message means (see `tcp`).

A frame is a 16-byte prefix (magic, lane, payload bytes, offset), the 40-byte message it belongs to (messages.py) and a payload.
Every peer has two connections. Control messages have one to themselves: a request must not queue behind megabytes of payload in
the kernel's send buffer (measured at 2 Gbit/s: 9 of 30 ms of an exchange of 5 MB). On the other, data are cut into chunks, each
a frame of its own, so that a slice of parameters waits for at most one chunk of gradients, and for what the kernel has taken of
one for another peer (turns.py). Within a lane the order is kept; between lanes it is not.

[Note: Few wake-ups]
The cores that move the bytes are those that compute, so CPU seconds per GB is the figure that counts here. A receiver woken for
every segment spends most of its time in wake-ups: SO_RCVLOWAT holds the wake-up back until (nearly) the whole chunk is there.
The mark never exceeds what is still due of the chunk under way, so the kernel never waits for bytes that do not come; the end
of a connection is reported whatever the mark. One `recvmsg` takes the rest of a chunk and the next header together.

[Note: Sending copies]
`sendfile` from a memfd, which attaches the pages themselves to the socket, was tried: on a virtual link the receiver then
copies from the sender's memory, in pages of 4 KB that nobody has just written, and exchanges cost as much or more.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from commfuse_dp.probe import now_ns
from commfuse_dp.transport.closing import left_to_parent
from commfuse_dp.transport.one_sided.messages import HEADER_BYTES
from commfuse_dp.transport.tcp.links import (
    CONTROL_LANE,
    CONTROL_ROLE,
    DATA_ROLE,
    HEADER,
    Frame,
    Link,
    Outgoing,
)
from commfuse_dp.transport.tcp.pace import Pace
from commfuse_dp.transport.tcp.turns import Turns, limit_unsent, unacknowledged

if TYPE_CHECKING:
    from commfuse_dp.transport.tcp.transport import TcpChannel

MAGIC = 0xCF
CHUNK_BYTES = 2 << 20
NOTSENT_BYTES = 2 << 20
LOWAT_FLOOR = 32 << 10  # below this much still due, a receive low-water mark costs more calls than it saves wake-ups
READ_BUDGET = 4 << 20  # bytes read from one peer before the others get their turn
CONTROL_JOIN_BYTES = 32 << 10


class Wire:
    """Sockets to all peers and the thread that serves them. `control` and `data` may be called from any thread.

    Args:
        handler: what the thread calls; every method of its is quick and does not block.
        sockets: by peer and role (CONTROL_ROLE, DATA_ROLE); connected stream sockets, which the wire owns from now on.
    """

    def __init__(
        self,
        rank: int,
        sockets: Mapping[tuple[int, int], socket.socket],
        handler: TcpChannel,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        notsent_bytes: int = NOTSENT_BYTES,
    ) -> None:
        self.bytes_sent = 0  # headers included; written by the I/O thread only
        self.bytes_received = 0
        self._handler = handler
        self._chunk_bytes = chunk_bytes
        self._links = {(peer, role): Link(peer, role, sock, Pace(notsent_bytes)) for (peer, role), sock in sockets.items()}
        self._numbers = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._turns = Turns([link for link in self._links.values() if link.role == DATA_ROLE], self._want_write)
        self._bell_in, self._bell_out = socket.socketpair()
        self._sleeping = False
        self._announcing = threading.Lock()
        self._stop = False
        self._started = False
        self._drain_until = 0.0
        for end in (self._bell_in, self._bell_out):
            end.setblocking(False)
        self._selector.register(self._bell_out, selectors.EVENT_READ, None)
        for link in self._links.values():
            _tune(link.sock)
            limit_unsent(link.sock, notsent_bytes)
            self._selector.register(link.sock, selectors.EVENT_READ, link)
        left_to_parent.add(self)
        self._thread = threading.Thread(target=self._run, name=f"commfuse-tcp-{rank}", daemon=True)

    # ---- called by users ---------------------------------------------------------------------------------------------
    def start(self) -> None:
        if self._links:
            self._started = True
            self._thread.start()

    def control(self, peer: int, message: bytes, *, wake: bool = True) -> None:
        """Queue a message of the highest priority; what exceeds the 40 bytes of a header is sent as its payload.

        wake: False leaves it to the thread's next turn, or to `push`."""
        text = message[HEADER_BYTES:]
        self._links[peer, CONTROL_ROLE].control.append(
            HEADER.pack(MAGIC, CONTROL_LANE, len(text), 0, message[:HEADER_BYTES]) + text
        )
        if wake:
            self.push()

    def data(self, peer: int, item: Outgoing) -> None:
        """Queue a transfer. Those to several peers leave one after the other: see turns.py."""
        item.number = next(self._numbers)
        self._links[peer, DATA_ROLE].lanes[item.lane].append(item)
        self.push()

    def push(self) -> None:
        """Wake the I/O thread if it sleeps."""
        # The thread announces that it will sleep, then looks at the queues, then sleeps; callers append, then look at the
        # announcement. Either's look is ordered behind the other's step by the lock, with or without the interpreter's.
        with self._announcing:
            sleeping = self._sleeping
        if sleeping:
            with contextlib.suppress(BlockingIOError, OSError):
                self._bell_in.send(b"\0")

    def idle(self) -> bool:
        """True if everything queued has been handed to the kernel."""
        return all(not link.open or link.idle() for link in self._links.values())

    def close(self, linger_s: float) -> None:
        """Send what is queued and let the peers acknowledge it, both for at most `linger_s`; then close all sockets."""
        self._drain_until = time.monotonic() + linger_s
        self._stop = True
        if self._started:
            with contextlib.suppress(OSError):
                self._bell_in.send(b"\0")
            self._thread.join(linger_s + 5.0)
        else:
            self._free()

    # ---- the I/O thread ----------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self._handler.broken(error)
        finally:
            self._free()

    def _loop(self) -> None:
        while not (self._stop and self._drained()):
            with self._announcing:
                self._sleeping = True
            self._write_control()
            while (turn := self._turns.whose()) is not None and not turn.writing:
                self._write(turn)
                self._write_control()
            events = self._selector.select(0.005 if self._stop else self._turns.patience)
            with self._announcing:
                self._sleeping = False
            for key, mask in events:
                link = key.data
                if link is None:
                    with contextlib.suppress(BlockingIOError):
                        self._bell_out.recv(4096)
                    continue
                if mask & selectors.EVENT_READ and link.open:
                    self._read(link)
                if mask & selectors.EVENT_WRITE and link.open:
                    self._write(link)

    def _write_control(self) -> None:
        for link in self._links.values():
            if link.role == CONTROL_ROLE and link.open and not link.writing and link.control:
                self._write(link)

    def _drained(self) -> bool:
        if time.monotonic() >= self._drain_until:
            return True
        return all(not link.open or (link.idle() and not unacknowledged(link.sock)) for link in self._links.values())

    def leave_to_parent(self) -> None:
        """In a process made by fork: close our copies of the descriptors, or the peers would not see the parent's death.

        Nothing is unregistered: the epoll instance is shared with the parent, whose registrations would go.
        """
        self._started = False
        for link in self._links.values():
            link.open = False
            link.sock.close()
        self._selector.close()
        self._bell_in.close()
        self._bell_out.close()

    def _free(self) -> None:
        for link in self._links.values():
            self._shut(link)
        self._selector.close()
        self._bell_in.close()
        self._bell_out.close()

    def _shut(self, link: Link) -> None:
        if link.open:
            link.open = False
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(link.sock)
            link.sock.close()
        link.control.clear()
        for lane in link.lanes.values():
            lane.clear()
        link.pending = link.chunk = link.sink = None

    def _lose(self, link: Link, reason: str) -> None:
        """The peer is lost when both of its connections have ended: the other one may still bring its last messages."""
        self._shut(link)
        others = [other for other in self._links.values() if other.peer == link.peer and other.open]
        for other in others:
            with contextlib.suppress(OSError):
                other.sock.shutdown(socket.SHUT_WR)  # if only this connection broke, the peer must learn that we gave up
        if not others:
            self._handler.lost(link.peer, reason)

    # ---- sending -----------------------------------------------------------------------------------------------------
    def _write(self, link: Link) -> None:
        try:
            while self._next(link):
                if link.pending is not None:
                    count = link.sock.send(link.pending, socket.MSG_MORE if link.chunk else 0)
                    self.bytes_sent += count
                    link.written += count
                    link.pending = link.pending[count:] if count < len(link.pending) else None
                elif not self._write_payload(link):
                    self._wait_for_room(link)  # the queue is full now; another call would only tell us so
                    return
        except BlockingIOError:
            self._wait_for_room(link)
        except OSError as error:
            self._read_last(link, str(error))
        else:
            link.pace.idle()
            self._want_write(link, False)

    def _wait_for_room(self, link: Link) -> None:
        self._want_write(link, True)
        if link.role == DATA_ROLE and link.pace.blocked(time.monotonic(), link.written):
            limit_unsent(link.sock, link.pace.queue_bytes)

    def _next(self, link: Link) -> bool:
        """Choose the next frame if none is under way; False when there is nothing to send."""
        if link.pending is not None or link.chunk is not None:
            return True
        if link.control:
            joined, count = bytearray(), 0
            while count < len(link.control) and len(joined) < CONTROL_JOIN_BYTES:
                joined += link.control[count]
                count += 1
            link.pending = memoryview(joined)
            for _ in range(count):  # not before: `idle` is asked by other threads
                link.control.popleft()
            return True
        if link.role == DATA_ROLE and not self._turns.keeps(link):
            return False
        for lane in link.lanes.values():
            if lane:
                item = lane[0]
                if not item.done:
                    item.start_ns = now_ns()
                nbytes = min(self._chunk_bytes, link.pace.queue_bytes, len(item.view) - item.done)
                link.pending = memoryview(HEADER.pack(MAGIC, item.lane, nbytes, item.done, item.message))
                if nbytes:
                    link.chunk, link.chunk_left = item, nbytes
                if item.done + nbytes == len(item.view):
                    lane.popleft()
                return True
        return False

    def _write_payload(self, link: Link) -> bool:
        """True if the kernel took all of what was offered."""
        item = link.chunk
        assert item is not None
        count = link.sock.send(item.view[item.done : item.done + link.chunk_left])
        self.bytes_sent += count
        link.written += count
        item.done += count
        link.chunk_left -= count
        if not link.chunk_left:
            link.chunk = None
            if item.done == len(item.view):
                self._handler.sent(link.peer, item)
            return True
        return False

    def _want_write(self, link: Link, wanted: bool) -> None:
        if link.open and link.writing != wanted:
            link.writing = wanted
            self._selector.modify(link.sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0), link)

    def _read_last(self, link: Link, reason: str) -> None:
        """The peer takes nothing any more; but what it had sent before (a goodbye, say) is still in our queue."""
        while link.open:
            before = self.bytes_received
            self._read(link)
            if self.bytes_received == before:
                break
        if link.open:
            self._lose(link, reason)

    # ---- receiving ---------------------------------------------------------------------------------------------------
    def _read(self, link: Link) -> None:
        budget = READ_BUDGET
        try:
            while budget > 0:
                head = memoryview(link.head)[link.head_got :]
                if link.sink is None:
                    asked = len(head)
                    count = link.sock.recv_into(head)
                else:
                    rest = link.sink[link.sink_got :]
                    asked = len(rest) + len(head)
                    count = link.sock.recvmsg_into([rest, head])[0]
                if count == 0:
                    self._lose(link, "the connection was closed")
                    return
                self.bytes_received += count
                budget -= count
                self._take(link, count)
                if not link.open:
                    return
                if count < asked:  # the queue is empty now; another call would only tell us so
                    break
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(link, str(error))
            return
        self._set_lowat(link)

    def _take(self, link: Link, count: int) -> None:
        """Account for `count` bytes that went into the sink and, beyond it, into the header."""
        if link.sink is not None:
            rest = len(link.sink) - link.sink_got
            if count < rest:
                link.sink_got += count
                return
            count -= rest
            frame = link.frame
            link.sink = link.frame = None
            assert frame is not None
            self._handler.deliver(link.peer, frame)
        link.head_got += count
        if link.head_got < HEADER.size:
            return
        link.head_got = 0
        magic, lane, nbytes, offset, message = HEADER.unpack(link.head)
        if magic != MAGIC:
            raise OSError(f"the byte stream is out of step (0x{magic:02x} where a frame should start)")
        frame = Frame(lane, nbytes, offset, message)
        if nbytes:
            link.frame, link.sink, link.sink_got = frame, self._handler.sink(link.peer, frame), 0
            if len(link.sink) != nbytes:
                raise OSError(f"a frame of {nbytes} bytes came where {len(link.sink)} were due")
        else:
            self._handler.deliver(link.peer, frame)

    def _set_lowat(self, link: Link) -> None:
        due = len(link.sink) - link.sink_got if link.sink is not None else 0
        wanted = due if due >= LOWAT_FLOOR else 1
        if wanted != link.lowat:
            link.lowat = wanted
            link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)


def _tune(sock: socket.socket) -> None:
    # SO_SNDBUF and SO_RCVBUF stay untouched: setting them switches the kernel's own tuning off and caps them at
    # net.core.{w,r}mem_max, which is 208 KiB on many systems; measured, the kernel's tuning reaches the rate of the link.
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
