"""One-sided transport between processes of one host: shared memory for the bytes, UNIX-domain sockets for the signals.

[Note: Nothing to leave behind]
The memory has no name at any time (`memfd_create`). Its descriptor is handed to the peers over a socket; the kernel frees the
pages when the last rank that maps them is gone, by a normal end, an exception or kill -9. A named segment would need somebody
left alive to unlink it. Nor is it bounded by the size of /dev/shm, which containers often set to 64 MiB.

[Note: Memory is had at once or refused]
Pages are allocated by `posix_fallocate` at set-up. Without it, lack of memory would show as SIGBUS at the first write to
a page, in the middle of a step. As a memfd is bounded by nothing but the machine, what all ranks of the host ask for is
first compared with what is available (MemAvailable and the limit of the control group).

[Note: Ordering]
A plain store from Python is no fence, and PyTorch's kernels write from many threads. The order is made by the kernel:
publishing or sending is (1) write the bytes, (2) send a message on a socket; reading is (3) receive that message, (4) read
the bytes. The socket's queue is protected by a lock inside the kernel, which (2) releases and (3) acquires, on x86 and Arm
alike; so (1) happens before (4). (1) has ended when (2) starts, as PyTorch's CPU operators return after their threads have
been joined. The way back, freeing a slot (credit) or a segment (finish) for writing again, is ordered in the same way.
No atomic operation from Python is needed, and a waiting rank sleeps in the kernel until the message comes.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from commfuse_dp.errors import TransportError
from commfuse_dp.transport.base import ExchangeFn
from commfuse_dp.transport.checks import raise_failures
from commfuse_dp.transport.free_memory import available_memory
from commfuse_dp.transport.one_sided.parts import Channel, Memory, check_same_sizes, cut
from commfuse_dp.transport.one_sided.protocol import OneSidedTransport
from commfuse_dp.transport.one_sided.ring import align
from commfuse_dp.transport.shm.sockets import SocketChannel, connect_mesh, pass_descriptor

_KEEP_FREE = 64 << 20  # bytes of available memory that shared memory must leave to the rest of the machine


def _page(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _allocate(nbytes: int) -> int:
    """Descriptor of nbytes (> 0) of zeroed anonymous shared memory, every page of it allocated."""
    fd = os.memfd_create("commfuse", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


# mmap objects keep a copy of the descriptor unless told not to, which they can be from Python 3.13 on.
_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


def _map(fd: int, offset: int, nbytes: int) -> torch.Tensor:
    """uint8 view of a shared mapping. The tensor's storage refers to the mapping, which ends with the last tensor on it."""
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    mapping = mmap.mmap(fd, _page(nbytes), flags=flags, offset=offset, **_UNTRACKED)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes)


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class _SharedBlocks:
    """One object per rank, cut into blocks (block `i` of rank `owner`: bytes and place), mapped as far as it is used."""

    def __init__(self, rank: int, members: Sequence[int], exchange: ExchangeFn, deadline_s: float) -> None:
        self.rank, self.members, self.exchange, self.deadline_s = rank, members, exchange, deadline_s

    def make(self, nbytes: int, purpose: str) -> dict[int, int]:
        """Collective: allocate nbytes on this rank; returns all ranks' descriptors. Raises the same error on all ranks."""
        everyone = self.exchange((nbytes, available_memory()))
        wanted = [everyone[rank] for rank in self.members]
        total = sum(asked for asked, _ in wanted)
        known = [free for _, free in wanted if free is not None]
        if known and total > min(known) - _KEEP_FREE:
            raise TransportError(
                f"not enough memory for {purpose}: the {len(self.members)} ranks of this host ask for {total} bytes of shared "
                f"memory together (this one {nbytes}), {min(known)} are available, {_KEEP_FREE} of which are left to the "
                "machine. Use fewer ranks per host, a smaller inbox_bytes, or more memory (also of the container)."
            )
        fd, error = -1, None
        try:
            fd = _allocate(_page(max(nbytes, 1)))
        except OSError as failure:
            error = (
                f"cannot get {nbytes} bytes of shared memory for {purpose} ({failure.strerror}): {available_memory()} bytes of "
                "memory are available"
            )
        try:
            raise_failures(self.exchange, self.exchange(error))
            fds = pass_descriptor(self.rank, self.members, self.exchange, fd, self.deadline_s)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        fds[self.rank] = fd
        return fds


class SharedMemory(Memory):
    """Inbox rings (made at once) and segments (made by `expose`) in two anonymous objects per rank.

    Nothing is unmapped by hand: a tensor that outlives the transport must stay readable."""

    in_place: ClassVar[bool] = True

    def __init__(self, blocks: _SharedBlocks, inbox_bytes: int) -> None:
        self._blocks = blocks
        rank, members = blocks.rank, blocks.members
        ring = align(inbox_bytes)
        slot = _page(ring)  # every ring starts on a page, so that a rank maps only the ring that it fills
        incoming: dict[int, torch.Tensor] = {}
        outgoing: dict[int, torch.Tensor] = {}
        peers = len(members) - 1
        fds = blocks.make(slot * peers, f"inboxes (inbox_bytes = {inbox_bytes} for each of {peers} peers)")
        try:
            inbox = _map(fds[rank], 0, slot * peers) if peers else _NOTHING
            own = members.index(rank)
            for place, peer in enumerate(members):
                if peer != rank:
                    # The ring of source s is block s of its owner's object; the owner itself is left out of the count.
                    incoming[peer] = inbox.narrow(0, slot * (place - (place > own)), ring)
                    outgoing[peer] = _map(fds[peer], slot * (own - (own > place)), ring)
        finally:
            for fd in fds.values():
                os.close(fd)
        self.incoming, self.outgoing = incoming, outgoing

    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        blocks = self._blocks
        check_same_sizes(sizes, blocks.exchange(sizes), blocks.exchange)
        totals = {owner: sum(align(row[owner]) for row in sizes) for owner in blocks.members}
        fds = blocks.make(totals[blocks.rank], f"the published shards ({len(sizes)} windows)")
        segments: dict[int, list[torch.Tensor]] = {}
        try:
            for owner, fd in fds.items():
                whole = _map(fd, 0, totals[owner]) if totals[owner] else _NOTHING
                segments[owner] = cut(whole, [row[owner] for row in sizes])
        finally:
            for fd in fds.values():
                os.close(fd)
        self.segments = segments


class ShmTransport(OneSidedTransport):
    """Shared memory between the processes of one host; Linux only.

    members: the ranks of this one's host, ascending, if there are others; these set up transports of theirs in the same calls.
    """

    name: ClassVar[str] = "shm"
    in_place: ClassVar[bool] = True

    def _connect(self, exchange: ExchangeFn, members: Sequence[int]) -> tuple[Channel, Memory]:
        if not hasattr(os, "memfd_create"):
            raise TransportError("transport 'shm' needs Linux (memfd_create, abstract UNIX-domain sockets); use 'tcp' or 'p2p'")
        mesh = connect_mesh(self.rank, members, exchange, self.deadline_s)
        try:
            memory = SharedMemory(_SharedBlocks(self.rank, members, exchange, self.deadline_s), self.message_limit)
        except BaseException:
            mesh.close()
            raise
        return SocketChannel(mesh), memory
