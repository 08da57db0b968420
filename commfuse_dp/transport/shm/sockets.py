"""A full mesh of UNIX-domain stream sockets between the ranks of one host, and the control channel over it.

[Note: No names]
The listening sockets live in the abstract namespace (leading NUL): there is no file to leave behind, whatever kills a
rank. The address carries a random token; a peer is accepted only if the kernel says that it runs under the same user
(SO_PEERCRED) and if it knows this rank's token, which travels through `exchange` only.

[Note: Death]
The kernel closes the sockets of a process that dies, by whatever signal, so its peers read end-of-file at once. A child
made by fork (a DataLoader worker) would keep a copy of the sockets open and hide the death of its parent: the copies are
closed in the child right after the fork.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from commfuse_dp.errors import DeadlineError
from commfuse_dp.interrupts import rests
from commfuse_dp.transport.base import ExchangeFn
from commfuse_dp.transport.checks import all_together, raise_failures
from commfuse_dp.transport.closing import left_to_parent
from commfuse_dp.transport.membership import called_in
from commfuse_dp.transport.one_sided import messages as msg
from commfuse_dp.transport.one_sided.parts import Channel, Receiver

_HELLO = struct.Struct("<32sI")  # token of the listener, rank of the caller
_UCRED = struct.Struct("3i")  # pid, uid, gid
_HELLO_DEADLINE_S = 5.0  # a stranger of the same user that connects and says nothing is dropped after this


class Mesh:
    """One connected stream socket to every peer. `sockets[peer]`, `pids[peer]`."""

    def __init__(self) -> None:
        self.sockets: dict[int, socket.socket] = {}
        self.pids: dict[int, int] = {}

    def close(self) -> None:
        for sock in self.sockets.values():
            sock.close()
        self.sockets.clear()


def _credentials(sock: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end, as the kernel knows them."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def receive_exactly(sock: socket.socket, nbytes: int) -> bytes:
    """Raises ConnectionError if the other end closes before."""
    data = b""
    while len(data) < nbytes:
        more = sock.recv(nbytes - len(data))
        if not more:
            raise ConnectionError("closed during the greeting")
        data += more
    return data


def connect_mesh(rank: int, members: Sequence[int], exchange: ExchangeFn, deadline_s: float) -> Mesh:
    """Collective: connect every pair of `members`, the ranks of this one's host, ascending. `exchange` may reach more ranks,
    which then set up meshes of theirs, and all succeed or fail together.

    Nobody waits for a connection: a rank that dies here is missed, and named, by the next `exchange`.

    Raises TransportError on all ranks if one of them cannot connect.
    """
    mesh, called = Mesh(), partial(called_in, exchange)
    token = secrets.token_hex(16).encode()
    error: str | None = None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        address = b"\0commfuse-" + secrets.token_hex(16).encode()
        try:
            listener.bind(address)
            listener.listen(len(members))
        except OSError as failure:
            error = f"cannot listen on an abstract UNIX-domain socket: {failure}"
        cards = exchange((address, token, error))
        raise_failures(exchange, (card[2] for card in cards))
        steps = (
            # A connection is complete once it stands in the listener's queue: no rank waits for another one's accept.
            lambda: _connect_all(rank, members, [card[:2] for card in cards], mesh, deadline_s, called),
            lambda: _accept_all(rank, members, listener, token, mesh, deadline_s, called),
        )
        all_together(exchange, steps, mesh.close, what="cannot connect to its peers on this host: ")
    return mesh


def _connect_all(
    rank: int,
    members: Sequence[int],
    cards: Sequence[tuple[bytes, bytes]],
    mesh: Mesh,
    deadline_s: float,
    called: Callable[[int], int],
) -> None:
    """To all lower ranks. cards: address and token of every rank. called: what a rank is called in errors."""
    for peer in (other for other in members if other < rank):
        address, token = cards[peer]
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mesh.sockets[peer] = sock
        sock.settimeout(deadline_s)
        sock.connect(address)
        mesh.pids[peer], uid = _credentials(sock)
        if uid != os.getuid():
            raise PermissionError(f"the listener of rank {called(peer)} runs under user {uid}, this rank under {os.getuid()}")
        sock.sendall(_HELLO.pack(token, rank))


def _accept_all(
    rank: int,
    members: Sequence[int],
    listener: socket.socket,
    token: bytes,
    mesh: Mesh,
    deadline_s: float,
    called: Callable[[int], int],
) -> None:
    limit = time.monotonic() + deadline_s
    while missing := {peer for peer in members if peer > rank} - set(mesh.sockets):
        listener.settimeout(max(limit - time.monotonic(), 0.001))
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            raise DeadlineError(
                f"rank {called(rank)} waited {deadline_s:g} s for ranks {sorted(map(called, missing))} to connect to it on "
                "this host; look at their logs",
                rank=called(rank),
                peer=min(map(called, missing)),
            ) from None
        try:
            pid, uid = _credentials(sock)
            if uid != os.getuid():
                raise ConnectionError("another user")
            sock.settimeout(_HELLO_DEADLINE_S)
            given, peer = _HELLO.unpack(receive_exactly(sock, _HELLO.size))
            if not hmac.compare_digest(given, token) or peer not in missing:
                raise ConnectionError("not a rank of this group")
        except OSError:  # a stranger: it does not hinder the ranks
            sock.close()
            continue
        mesh.sockets[peer], mesh.pids[peer] = sock, pid


def pass_descriptor(rank: int, members: Sequence[int], exchange: ExchangeFn, fd: int, deadline_s: float) -> dict[int, int]:
    """Collective: give `fd` to every other of `members`; returns the peers' descriptors, which the caller must close.

    Over sockets of its own, so that descriptors never mix with control messages already under way.
    """
    received: dict[int, int] = {}
    mesh = connect_mesh(rank, members, exchange, deadline_s)

    def pass_on() -> None:
        with contextlib.closing(mesh):
            for sock in mesh.sockets.values():
                sock.settimeout(deadline_s)
                socket.send_fds(sock, [b"f"], [fd])
            for peer, sock in mesh.sockets.items():
                _, fds, _, _ = socket.recv_fds(sock, 1, 1)
                if len(fds) != 1:
                    raise OSError(
                        f"nothing came from rank {called_in(exchange, peer)}; is the limit of open files (ulimit -n) reached?"
                    )
                received[peer] = fds[0]

    def close() -> None:
        for got in received.values():
            os.close(got)

    all_together(exchange, [pass_on], close, what="cannot exchange shared memory with its peers: ")
    return received


HELD_BYTES = 16384  # held messages are sent at the latest when there are so many: the peer may have use for them


class SocketChannel(Channel):
    """Control messages over a mesh. There is no thread: the user's does everything, inside `post` and `poll`.

    Sockets are non-blocking; what does not fit is queued per peer and sent by later calls, in order. A waiting rank
    sleeps in epoll: no core is spun. Another thread may `post` and `wake` meanwhile (transport hierarchical does).
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._receiver: Receiver  # from `start` on
        self._queued: dict[int, bytearray] = {}
        self._held: set[int] = set()  # peers whose queue was not tried to be sent yet
        self._partial: dict[int, bytes] = {}
        self._peer_of: dict[int, int] = {}
        self._closed = False
        self._sending = threading.Lock()  # the queues, and what the kernel is asked to report
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._bell, select.EPOLLIN)
        for peer, sock in mesh.sockets.items():
            sock.setblocking(False)
            self._queued[peer] = bytearray()
            self._partial[peer] = b""
            self._peer_of[sock.fileno()] = peer
            self._epoll.register(sock.fileno(), select.EPOLLIN)
        left_to_parent.add(self)

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def post(self, dst: int, message: bytes, payload: torch.Tensor | None = None, *, hold: bool = False) -> None:
        with self._sending:
            sock = self._mesh.sockets.get(dst)
            if sock is None:  # lost, which poll has reported, or closed
                return
            queue = self._queued[dst]
            if hold and (not queue or dst in self._held) and len(queue) < HELD_BYTES:
                queue += message
                self._held.add(dst)
                return
            if queue:
                queue += message
                if dst in self._held:
                    self._send_held(dst)
                return
            sent = self._try_send(sock, message)
            if sent < len(message):
                queue += message[sent:]
                self._epoll.modify(sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def push(self) -> None:
        with self._sending:
            for peer in tuple(self._held):
                self._send_held(peer)

    def wake(self) -> None:
        with self._sending:
            if not self._closed:
                os.eventfd_write(self._bell, 1)

    def _send_held(self, peer: int) -> None:
        self._held.discard(peer)
        sock = self._mesh.sockets.get(peer)
        if sock is None:
            return
        queue = self._queued[peer]
        del queue[: self._try_send(sock, queue)]
        if queue:
            self._epoll.modify(sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def poll(self, timeout_s: float) -> None:
        if self._closed:
            return
        if self._held and timeout_s > 0:
            self.push()
        for fd, events in self._epoll.poll(0) if timeout_s <= 0 else _sleep(self._epoll, timeout_s):
            peer = self._peer_of.get(fd)
            if peer is None:
                if fd == self._bell:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._bell)
                continue
            if events & select.EPOLLOUT:
                self._send_queued(peer)
            if events & ~select.EPOLLOUT:
                self._take_in(peer)

    def flush(self, timeout_s: float) -> bool:
        limit = time.monotonic() + timeout_s
        while any(self._queued.values()):
            left = limit - time.monotonic()
            if left <= 0:
                return False
            self.poll(left)
        return True

    def close(self) -> None:
        with self._sending:
            if not self._closed:
                self._closed = True
                self._epoll.close()
                self._mesh.close()
                os.close(self._bell)

    def describe(self, peer: int, called: int) -> str:
        return f"rank {called} (pid {self._mesh.pids.get(peer, '?')})"

    @staticmethod
    def _try_send(sock: socket.socket, data: bytes | bytearray) -> int:
        """Bytes taken over. All of them if the peer is gone: nothing is to be sent again, and reading reports the end."""
        try:
            return sock.send(data)
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            return len(data)

    def _send_queued(self, peer: int) -> None:
        with self._sending:
            queue = self._queued[peer]
            sock = self._mesh.sockets[peer]
            if queue:
                del queue[: self._try_send(sock, queue)]
            if not queue:
                self._epoll.modify(sock.fileno(), select.EPOLLIN)

    def _take_in(self, peer: int) -> None:
        try:
            data = self._mesh.sockets[peer].recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._end(peer)
            return
        if self._partial[peer]:
            data = self._partial[peer] + data
        if len(data) == msg.HEADER_BYTES and data[0] not in msg.WITH_TEXT:
            self._partial[peer] = b""
            self._receiver.handle(peer, data)
            return
        at, messages = 0, []
        while len(data) - at >= msg.HEADER_BYTES:
            end = at + msg.HEADER_BYTES
            if data[at] in msg.WITH_TEXT:
                end += msg.text_bytes(data[at:end])
                if end > len(data):
                    break
            messages.append(data[at:end])
            at = end
        self._partial[peer] = data[at:]
        self._receiver.handle(peer, *messages)

    def _end(self, peer: int) -> None:
        with self._sending:
            sock = self._mesh.sockets.pop(peer)
            self._epoll.unregister(sock.fileno())
            del self._peer_of[sock.fileno()]
            self._queued[peer].clear()
            sock.close()
        self._receiver.lost(
            peer,
            "its connection ended without a goodbye, so the process died or left in the middle of a step (killed, out of "
            "memory, crashed): look at its log and at the kernel's (dmesg)",
        )

    def leave_to_parent(self) -> None:
        """In a child made by fork: close the copies of the sockets without a word to the peers."""
        if self._closed:
            return
        self._closed = True
        self._mesh.close()
        self._epoll.close()  # the set itself belongs to the parent, which keeps it: only these descriptors go
        os.close(self._bell)


@rests
def _sleep(epoll: select.epoll, timeout_s: float) -> list[tuple[int, int]]:
    """What may be done. It is told again as long as it was not."""
    return epoll.poll(timeout_s)
