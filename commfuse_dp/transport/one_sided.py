"""The one-sided protocol, once for all transports that speak it: `inproc`, `shm` and `tcp`.

What differs between them stands behind two abstractions:

* `Channel`: small control messages (messages.py), first in first out per pair of ranks, never blocking, never lost.
* `Memory`: how the bytes of a peer become readable and writable. Directly mapped (`in_place`: inproc, shm), a pull is a
  view of the owner's segment and a message is written straight into its inbox. Not mapped (tcp), `outgoing` is a staging
  ring of the same size and layout as the inbox ring it feeds; DEPOSIT carries the bytes along, and a pull is a PULL
  request answered by DATA. Offsets, credits and lifetimes are the same in both cases.

State of one rank
-----------------
* Windows: the latest epoch that each owner has published per key. A pull of a later epoch waits; a pull of an earlier one
  is an error, for its bytes are gone. FINISH(epoch) of all peers allows the owner to write its segments again.
* Inbox: one byte ring per (owner, source), filled by the source, which also runs its allocator (ring.py). A message is
  known to the owner as (source, tag) -> (offset, bytes). Releasing it sends the offset back: the credit.
* Peers: `departed` said goodbye (they will send nothing more: only a wait for one of them is an error), `lost` ended
  without (the program has failed: every operation raises PeerLostError). The first survivor to see a loss tells all
  others who it was, so that they name the dead rank and not the first survivor that gave up because of it.

[Note: Threads]
`Receiver` is called by the channel, either from `Channel.poll` in the user's thread (shm, inproc) or from an I/O thread
(tcp). All shared state is therefore changed under one lock; `changed` is notified after every message, so that a channel
with an I/O thread can wait on it in `poll`. `Channel.post` is called with the lock held and must not take it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from commfuse_dp.errors import MismatchError, PeerLostError, TransportError, Where
from commfuse_dp.probe import Probe
from commfuse_dp.transport import messages as msg
from commfuse_dp.transport.base import CHANNEL_PARAM, NOWHERE, Tag, Transfer, Transport
from commfuse_dp.transport.ring import Ring

CLOSE_FLUSH_S = 5.0  # longest time that close() gives the channel to hand over what is queued


class Receiver(ABC):
    """The side of the protocol that a channel delivers to."""

    @abstractmethod
    def handle(self, src: int, message: bytes) -> None:
        """One message of `src` has arrived (header, text of an ABORT; a payload, if any, is already in its landing)."""

    @abstractmethod
    def landing(self, src: int, header: bytes) -> torch.Tensor | None:
        """Where the payload that follows `header` must be written, before `handle`; None: read it and throw it away."""

    @abstractmethod
    def lost(self, src: int, reason: str) -> None:
        """The connection to `src` has ended. Harmless if `src` has said goodbye before."""


class Channel(ABC):
    """Control messages to all peers."""

    @abstractmethod
    def start(self, receiver: Receiver) -> None:
        """Deliver to `receiver` from now on."""

    @abstractmethod
    def post(self, dst: int, message: bytes, payload: torch.Tensor | None = None) -> None:
        """Queue a message, and the uint8 payload that follows it; never blocks, never raises for a peer that is gone."""

    @abstractmethod
    def poll(self, timeout_s: float) -> None:
        """Deliver what has come; wait at most timeout_s for the first. Sends what is still queued."""

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Send what is queued, for at most timeout_s. True if nothing is left."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. Safe to call twice."""

    def describe(self, peer: int) -> str:
        """How to find the peer, for errors: a process id or an address."""
        return f"rank {peer}"


class Memory(ABC):
    """The bytes behind windows and inboxes. All tensors are uint8, 1-D, contiguous and start 64-byte aligned."""

    in_place: ClassVar[bool]

    @abstractmethod
    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        """Collective: make the segments. sizes[key][rank] in bytes. Raises TransportError on all ranks if one cannot."""

    @abstractmethod
    def segment(self, owner: int, key: int) -> torch.Tensor:
        """The whole segment. Peers' only if in_place. Cheap: called for every pull."""

    @abstractmethod
    def outgoing(self, dst: int) -> torch.Tensor:
        """The ring that this rank fills for `dst`: the inbox itself if in_place, else its staging."""

    @abstractmethod
    def incoming(self, src: int) -> torch.Tensor:
        """The inbox ring of this rank that `src` fills."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; what tensors still alias stays mapped until they die. Safe to call twice."""


class OneSidedTransport(Transport, Receiver):
    """See the module. Subclasses only build the channel and the memory."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        channel: Channel,
        memory: Memory,
        inbox_bytes: int,
        deadline_s: float,
        probe: Probe | None = None,
    ) -> None:
        super().__init__(rank, world_size, deadline_s=deadline_s, probe=probe)
        self._channel = channel
        self._memory = memory
        self._message_limit = inbox_bytes
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self._sizes: list[tuple[int, ...]] | None = None
        self._published: list[dict[int, int]] = [{} for _ in range(world_size)]  # [owner][key] -> epoch
        self._finished = dict.fromkeys(self._peers, 0)
        self._own_finished = 0
        self._outbox = {dst: Ring(memory.outgoing(dst).numel()) for dst in self._peers}
        self._inbox: dict[tuple[int, Tag], tuple[int, int]] = {}
        self._pulls_waiting: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}  # (key, epoch) -> requests
        self._fetches: dict[int, _Fetch] = {}
        self._last_request = 0
        self._departed: set[int] = set()
        self._failure: tuple[int, str] | None = None  # (culprit or -1, reason)
        self._closed = False
        self._handlers = (
            self._on_publish,
            self._on_finish,
            self._on_deposit,
            self._on_credit,
            self._on_pull,
            self._on_data,
        )
        channel.start(self)

    # ---- windows -----------------------------------------------------------------------------------------------------
    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        self._check_open()
        if self._sizes is not None:
            raise TransportError("expose() was called twice: a transport exposes its windows once; open another for others")
        table = [tuple(int(n) for n in row) for row in sizes]
        for key, row in enumerate(table):
            if len(row) != self.world_size or min(row) < 0:
                raise ValueError(f"expose: sizes[{key}] = {row}: one size >= 0 for each of {self.world_size} ranks is needed")
        self._memory.expose(table)
        self._sizes = table

    def segment(self, key: int) -> torch.Tensor:
        self._size(self.rank, key)
        return self._memory.segment(self.rank, key)

    def publish(self, key: int, epoch: int) -> None:
        self._check_open()
        self._size(self.rank, key)
        with self._lock:
            before = self._published[self.rank].get(key, 0)
            if epoch != before + 1:
                raise ValueError(f"publish(key {key}, epoch {epoch}): epochs rise by one and {before} was the last")
            reading = [p for p in self._peers if self._finished[p] < epoch - 1 and p not in self._departed]
            if reading:
                raise TransportError(
                    f"publish(key {key}, epoch {epoch}): ranks {reading} may still read epoch {epoch - 1}; "
                    f"call wait_finished({epoch - 1}) before writing the segment"
                )
            self._published[self.rank][key] = epoch
            for src, request, start, nbytes in self._pulls_waiting.pop((key, epoch), ()):
                self._answer(src, key, request, start, nbytes)
        if self._memory.in_place:  # otherwise peers ask, and are answered when the time has come
            self._post_all(msg.pack(msg.PUBLISH, key, epoch))

    def pull(
        self, owner: int, key: int, epoch: int, *, start: int = 0, nbytes: int | None = None, out: torch.Tensor | None = None
    ) -> Transfer:
        self._check_open()
        size = self._size(owner, key)
        if nbytes is None:
            nbytes = size - start
        if start < 0 or nbytes < 0 or start + nbytes > size:
            raise ValueError(
                f"pull: bytes [{start}, {start + nbytes}) of key {key} of rank {owner}, which publishes {size} bytes there"
            )
        if epoch <= self._own_finished or epoch <= 0:
            raise ValueError(f"pull: epoch {epoch} is over: this rank has finished epoch {self._own_finished}")
        if self._memory.in_place:
            if out is not None:
                raise ValueError(f"pull: transport {self.name} reads in place: out must be None")
            return _View(self, owner, key, epoch, start, nbytes)
        if out is None or out.dtype != torch.uint8 or out.dim() != 1 or out.numel() != nbytes or not out.is_contiguous():
            given = "None" if out is None else f"{out.dtype} of shape {tuple(out.shape)}"
            raise ValueError(f"pull: transport {self.name} needs out = contiguous uint8 of {nbytes} bytes; {given} was given")
        if owner == self.rank:
            return _OwnCopy(self, owner, key, epoch, start, nbytes, out)
        fetch = _Fetch(self, owner, key, epoch, out)
        with self._lock:
            self._last_request = request = (self._last_request + 1) % (1 << 32)
            self._fetches[request] = fetch
            self._channel.post(owner, msg.pack(msg.PULL, key, epoch, request, x=start, y=nbytes))
        return fetch

    def finish(self, epoch: int) -> None:
        self._check_open()
        if epoch <= self._own_finished:
            raise ValueError(f"finish({epoch}): epoch {self._own_finished} is finished already; epochs rise")
        self._own_finished = epoch
        self._post_all(msg.pack(msg.FINISH, b=epoch))

    def wait_finished(self, epoch: int, where: Where = NOWHERE) -> None:
        self._check_open()
        if epoch <= 0:
            return
        for peer in self._peers:
            if self._finished[peer] < epoch and peer not in self._departed:
                self.wait_until(
                    lambda p=peer: self._finished[p] >= epoch or p in self._departed,  # type: ignore[misc]
                    peer=peer,
                    where=where,
                    doing=f"to finish reading epoch {epoch}",
                )

    # ---- messages ----------------------------------------------------------------------------------------------------
    @property
    def message_limit(self) -> int:
        return self._message_limit

    def try_reserve(self, dst: int, nbytes: int) -> torch.Tensor | None:
        self._check_open()
        ring = self._ring(dst)
        if not 0 <= nbytes <= self._message_limit:
            raise ValueError(
                f"a message of {nbytes} bytes to rank {dst}: 0 .. {self._message_limit} fit; "
                "send smaller slices (more slices_per_rank) or raise inbox_bytes"
            )
        with self._lock:
            offset = ring.reserve(nbytes)
        if offset is None:
            self.progress()  # a credit may be waiting to be taken in
            with self._lock:
                offset = ring.reserve(nbytes)
        if dst in self._departed:
            raise self._gone(dst, f"a message of {nbytes} bytes cannot be sent")
        return None if offset is None else self._memory.outgoing(dst).narrow(0, offset, nbytes)

    def send(self, dst: int, tag: Tag, buffer: torch.Tensor) -> None:
        self._check_open()
        ring = self._ring(dst)
        offset = buffer.storage_offset() * buffer.element_size()
        nbytes = buffer.numel() * buffer.element_size()
        base = self._memory.outgoing(dst)
        if buffer.untyped_storage().data_ptr() != base.untyped_storage().data_ptr() or not ring.holds(offset):
            raise ValueError(
                f"send to rank {dst}, {tag}: the buffer was not reserved by try_reserve({dst}, ...), or was sent before"
            )
        header = msg.pack(msg.DEPOSIT, *tag, offset, nbytes)
        payload = None if self._memory.in_place else base.narrow(0, offset, nbytes)
        with self._lock:
            self._count(tag.channel, nbytes, sent=True)
            self._channel.post(dst, header, payload)

    def arrived(self, src: int, tag: Tag) -> bool:
        if (src, tag) in self._inbox:
            return True
        self.progress()
        if (src, tag) in self._inbox:
            return True
        if src in self._departed and (src, tag) not in self._inbox:
            raise self._gone(src, f"its message {tag} will not come")
        self._ring(src)
        return False

    def receive(self, src: int, tag: Tag, where: Where = NOWHERE) -> torch.Tensor:
        entry = self._inbox.get((src, tag))
        if entry is None:
            self._check_open()
            self._ring(src)
            self.wait_until(lambda: (src, tag) in self._inbox, peer=src, where=where, doing=f"to send {tag}")
            entry = self._inbox[src, tag]
        return self._memory.incoming(src).narrow(0, *entry)

    def release(self, src: int, tag: Tag) -> None:
        with self._lock:
            entry = self._inbox.pop((src, tag), None)
            if entry is None:
                raise ValueError(f"release: no message {tag} of rank {src} is here (released twice, or not yet received)")
            self._channel.post(src, msg.pack(msg.CREDIT, x=entry[0]))

    # ---- progress and end --------------------------------------------------------------------------------------------
    def progress(self, timeout_s: float = 0.0) -> None:
        self._check_open()
        if self._failure is None:
            self._channel.poll(timeout_s)
        if self._failure is not None:
            raise self._error()

    def wait_until(self, ready: Callable[[], bool], *, peer: int, where: Where, doing: str) -> None:
        def ready_or_gone() -> bool:
            if ready():
                return True
            if peer in self._departed and not ready():  # asked twice: an I/O thread may have come in between
                raise self._gone(peer, f"it was waited for {doing} ({where})", where)
            return False

        try:
            super().wait_until(ready_or_gone, peer=peer, where=where, doing=doing)
        except PeerLostError as error:
            if error.where is None:
                who = f"rank {peer}" if peer >= 0 else "its peers"
                text = f"{error} Rank {self.rank} was waiting for {who}: {doing} ({where})."
                raise PeerLostError(text, rank=self.rank, peer=error.peer, where=where) from None
            raise

    def abort(self, reason: str) -> None:
        """Tell all peers that this rank has failed: their waits end at once with a PeerLostError that gives `reason`."""
        if not self._closed:
            self._post_all(msg.pack_abort(self.rank, reason))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._post_all(msg.pack(msg.GOODBYE))
            self._channel.flush(min(CLOSE_FLUSH_S, self.deadline_s))
        finally:
            self._channel.close()
            self._memory.close()

    # ---- receiver ----------------------------------------------------------------------------------------------------
    def handle(self, src: int, message: bytes) -> None:
        kind, a, b, c, d, x, y = msg.HEADER.unpack_from(message)
        with self._lock:
            if kind < len(self._handlers):
                self._handlers[kind](src, a, b, c, d, x, y)
            elif kind == msg.GOODBYE:
                self._departed.add(src)
            elif kind == msg.ABORT:
                reason = bytes(message[msg.HEADER_BYTES :]).decode(errors="replace")
                culprit = a if a != self.rank else src
                self._fail(culprit, reason if a == src else f"rank {src} reports: {reason}")
            else:
                self._fail(-1, f"rank {src} sent a message of unknown kind {kind}: do all ranks run the same version?")
            self.changed.notify_all()

    def landing(self, src: int, header: bytes) -> torch.Tensor | None:
        kind, _, _, request, _, x, y = msg.HEADER.unpack_from(header)
        if kind == msg.DEPOSIT:
            return self._memory.incoming(src).narrow(0, x, y)
        with self._lock:
            fetch = self._fetches.get(request)
        return None if fetch is None else fetch.out

    def lost(self, src: int, reason: str) -> None:
        with self._lock:
            if src in self._departed or self._closed:
                return
            if self._failure is None:
                notice = msg.pack_abort(src, reason)
                for peer in self._peers:
                    if peer != src:
                        self._channel.post(peer, notice)
            self._fail(src, reason)
            self.changed.notify_all()

    def _on_publish(self, src: int, key: int, epoch: int, *_: int) -> None:
        published = self._published[src]
        published[key] = max(epoch, published.get(key, 0))

    def _on_finish(self, src: int, _a: int, epoch: int, *_: int) -> None:
        self._finished[src] = max(epoch, self._finished[src])

    def _on_deposit(self, src: int, channel: int, key: int, seq: int, part: int, offset: int, nbytes: int) -> None:
        name = (src, Tag(channel, key, seq, part))
        if name in self._inbox:
            self._fail(-1, f"rank {src} sent two messages {name[1]}: tags must be unique among messages in flight")
            return
        self._inbox[name] = (offset, nbytes)
        self._count(channel, nbytes, sent=False)

    def _on_credit(self, src: int, _a: int, _b: int, _c: int, _d: int, offset: int, _y: int) -> None:
        try:
            self._outbox[src].free(offset)
        except KeyError:
            self._fail(-1, f"rank {src} gave back offset {offset} of its inbox, where no message of rank {self.rank} is")

    def _on_pull(self, src: int, key: int, epoch: int, request: int, _d: int, start: int, nbytes: int) -> None:
        published = self._published[self.rank].get(key, 0)
        if published == epoch:
            self._answer(src, key, request, start, nbytes)
        elif published < epoch:
            self._pulls_waiting.setdefault((key, epoch), []).append((src, request, start, nbytes))
        else:
            self._fail(-1, f"rank {src} pulled epoch {epoch} of key {key} after it was replaced by epoch {published}")

    def _on_data(self, _src: int, _a: int, _b: int, request: int, *_: int) -> None:
        fetch = self._fetches.pop(request, None)
        if fetch is not None:
            fetch.complete = True
            self.probe.counters.param_bytes_received += fetch.out.numel()

    def _answer(self, src: int, key: int, request: int, start: int, nbytes: int) -> None:
        payload = self._memory.segment(self.rank, key).narrow(0, start, nbytes)
        self.probe.counters.param_bytes_sent += nbytes
        self._channel.post(src, msg.pack(msg.DATA, c=request, y=nbytes), payload)

    # ---- helpers -----------------------------------------------------------------------------------------------------
    def _post_all(self, message: bytes) -> None:
        """To every peer, beginning after this rank, so that not all ranks turn to rank 0 first."""
        with self._lock:
            for step in range(1, self.world_size):
                peer = (self.rank + step) % self.world_size
                if peer not in self._departed:
                    self._channel.post(peer, message)

    def _count(self, channel: int, nbytes: int, *, sent: bool) -> None:
        """Bytes of messages count as gradients except on the parameter channel."""
        counters = self.probe.counters
        if channel == CHANNEL_PARAM:
            if sent:
                counters.param_bytes_sent += nbytes
            else:
                counters.param_bytes_received += nbytes
        elif sent:
            counters.grad_bytes_sent += nbytes
        else:
            counters.grad_bytes_received += nbytes

    def _size(self, owner: int, key: int) -> int:
        if self._sizes is None:
            raise TransportError("no windows: call expose(sizes) on all ranks first")
        if not (0 <= key < len(self._sizes) and 0 <= owner < self.world_size):
            raise ValueError(
                f"no window (rank {owner}, key {key}): ranks 0 .. {self.world_size - 1}, keys 0 .. {len(self._sizes) - 1}"
            )
        return self._sizes[key][owner]

    def _ring(self, peer: int) -> Ring:
        ring = self._outbox.get(peer)
        if ring is None:
            raise ValueError(
                f"rank {peer} is no peer of rank {self.rank} in a group of {self.world_size}: peers are {self._peers}"
            )
        return ring

    def _fail(self, culprit: int, reason: str) -> None:
        if self._failure is None:
            self._failure = (culprit, reason)

    def _error(self) -> TransportError:
        assert self._failure is not None
        culprit, reason = self._failure
        if culprit < 0:
            return TransportError(f"rank {self.rank}, transport {self.name}: {reason}")
        who = self._channel.describe(culprit)
        return PeerLostError(f"rank {self.rank} lost {who} (transport {self.name}): {reason}.", rank=self.rank, peer=culprit)

    def _gone(self, peer: int, what: str, where: Where | None = None) -> PeerLostError:
        return PeerLostError(
            f"rank {self.rank}: {self._channel.describe(peer)} has closed its transport {self.name}; {what}. "
            "It ended early: look at its log first.",
            rank=self.rank,
            peer=peer,
            where=where,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"transport {self.name} of rank {self.rank} is closed")


class _Pull(Transfer):
    """What the three kinds of pull share."""

    __slots__ = ("_counted", "_epoch", "_key", "_owner", "_transport")

    def __init__(self, transport: OneSidedTransport, owner: int, key: int, epoch: int) -> None:
        self._transport = transport
        self._owner = owner
        self._key = key
        self._epoch = epoch
        self._counted = False

    @abstractmethod
    def _ready(self) -> bool: ...

    @abstractmethod
    def _bytes(self) -> torch.Tensor: ...

    def _published(self) -> bool:
        epoch = self._transport._published[self._owner].get(self._key, 0)
        if epoch > self._epoch:
            raise TransportError(
                f"pull of key {self._key} of rank {self._owner}, epoch {self._epoch}: it was replaced by epoch {epoch} "
                "meanwhile; a rank must wait for its pulls before it calls finish(epoch)"
            )
        return epoch == self._epoch

    def done(self) -> bool:
        if self._ready():
            return True
        self._transport.progress()
        if self._ready():
            return True
        if self._owner in self._transport._departed and not self._ready():
            raise self._transport._gone(self._owner, f"it has not published key {self._key} for epoch {self._epoch}")
        return False

    def wait(self, where: Where = NOWHERE) -> torch.Tensor:
        if not self._ready():
            doing = f"to publish key {self._key} for epoch {self._epoch}"
            self._transport.wait_until(self._ready, peer=self._owner, where=where, doing=doing)
        return self._bytes()


class _View(_Pull):
    """Read in place, where the owner published."""

    __slots__ = ("_nbytes", "_start")

    def __init__(self, transport: OneSidedTransport, owner: int, key: int, epoch: int, start: int, nbytes: int) -> None:
        super().__init__(transport, owner, key, epoch)
        self._start = start
        self._nbytes = nbytes

    def _ready(self) -> bool:
        return self._published()

    def _bytes(self) -> torch.Tensor:
        transport = self._transport
        if not self._counted and self._owner != transport.rank:
            self._counted = True
            transport.probe.counters.param_bytes_received += self._nbytes
        whole = transport._memory.segment(self._owner, self._key)
        return whole if self._nbytes == whole.numel() else whole.narrow(0, self._start, self._nbytes)


class _OwnCopy(_View):
    """This rank's own bytes, copied once into `out` (memory that is not read in place)."""

    __slots__ = ("_copied", "_out")

    def __init__(
        self, transport: OneSidedTransport, owner: int, key: int, epoch: int, start: int, nbytes: int, out: torch.Tensor
    ) -> None:
        super().__init__(transport, owner, key, epoch, start, nbytes)
        self._out = out
        self._copied = False

    def _bytes(self) -> torch.Tensor:
        if not self._copied:
            self._out.copy_(super()._bytes())
            self._copied = True
        return self._out


class _Fetch(_Pull):
    """Bytes of a peer that come over the wire into `out`; `complete` is set by the receiver."""

    __slots__ = ("complete", "out")

    def __init__(self, transport: OneSidedTransport, owner: int, key: int, epoch: int, out: torch.Tensor) -> None:
        super().__init__(transport, owner, key, epoch)
        self.out = out
        self.complete = False

    def _ready(self) -> bool:
        return self.complete

    def _bytes(self) -> torch.Tensor:
        return self.out


def check_same_sizes(sizes: Sequence[Sequence[int]], everyone: Sequence[Sequence[Sequence[int]]]) -> None:
    """Raise MismatchError if some rank exposes other windows than this one. For `Memory.expose`."""
    mine = [tuple(row) for row in sizes]
    for rank, theirs in enumerate(everyone):
        other = [tuple(row) for row in theirs]
        if other != mine:
            keys = [k for k in range(max(len(mine), len(other))) if mine[k : k + 1] != other[k : k + 1]]
            k = keys[0]
            raise MismatchError(
                f"ranks expose different windows: key {k} has sizes {mine[k : k + 1]} here and {other[k : k + 1]} on rank "
                f"{rank} ({len(mine)} and {len(other)} keys). All ranks must wrap the same model with the same configuration."
            )
