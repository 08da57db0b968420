"""The one-sided protocol, once for all transports that speak it: `inproc`, `shm` and `tcp`.

What differs between them stands behind two abstractions (parts.py):

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
* Peers: who has said goodbye, who is lost, and what has failed (peers.py).
* Steps that were broken off (recovery.py).

[Note: Threads]
`Receiver` is called by the channel, either from `Channel.poll` in the user's thread (shm, inproc) or from an I/O thread
(tcp). All shared state, counters too, is therefore changed and looked at under one lock, which does not
count on that of the interpreter (free-threaded Python). `Channel.post` is called with the lock held and must not take it.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from commfuse_dp.errors import Where
from commfuse_dp.probe import Probe
from commfuse_dp.transport.base import CHANNEL_PARAM, NOWHERE, WHOLE, ExchangeFn, Outcome, PullRequest, Sending, Tag, Transfer
from commfuse_dp.transport.checks import (
    check_finish,
    check_message,
    check_out,
    check_peer,
    check_publications,
    check_pull,
    check_sizes,
    count_message,
    not_here,
    not_reserved,
)
from commfuse_dp.transport.closing import close_at_exit
from commfuse_dp.transport.membership import numbers_of
from commfuse_dp.transport.one_sided import messages as msg
from commfuse_dp.transport.one_sided.parts import Channel, Closed, Memory
from commfuse_dp.transport.one_sided.peers import Peers
from commfuse_dp.transport.one_sided.pulls import Fetch, Here, View
from commfuse_dp.transport.one_sided.recovery import Rounds
from commfuse_dp.transport.one_sided.ring import ALIGNMENT, Ring
from commfuse_dp.transport.views import Shaped, Views
from commfuse_dp.transport.waiting import wait_until

OWED_PART = 4  # a credit is kept back for company (`more`) only while at most this part of the peer's ring is owed to it
CLOSE_FLUSH_S = 5.0  # longest time that close() serves late readers, and then hands over what is queued

_header = msg.HEADER.pack  # `msg.pack` without its frame, and without its error


class OneSidedTransport(Peers):
    """See the module. Collective constructor. Subclasses only build the channel and the memory (`_connect`).

    Args:
        exchange: the group's collective object exchange, used while the transport is set up and in `expose`.
        inbox_bytes: room for unreleased messages, per pair and direction; as much again for staging where peers cannot write
            into it.
        deadline_s: longest single wait, also of the set-up, in seconds.
        members: the ranks that it connects, if not all: the others take part in its collective calls only, and numbers stay
            theirs.
        how: what only this kind of transport is given.

    Raises TransportError on all ranks, with the reason, if one of them cannot be set up.
    """

    recovery: Rounds

    def __init__(
        self,
        rank: int,
        world_size: int,
        exchange: ExchangeFn,
        *,
        inbox_bytes: int,
        deadline_s: float,
        probe: Probe | None = None,
        members: Sequence[int] | None = None,
        **how: Any,
    ) -> None:
        super().__init__(rank, world_size, message_limit=inbox_bytes, deadline_s=deadline_s, probe=probe)
        self.membership.numbers = numbers_of(exchange)
        members = tuple(range(world_size) if members is None else members)
        channel, memory = self._connect(exchange, members, **how)
        self._meet(channel, members)
        self.recovery = self._rounds = Rounds(self)
        self._memory = memory
        self._published: list[dict[int, int]] = [{} for _ in range(world_size)]  # [owner][key] -> epoch
        self._finished = dict.fromkeys(self._peers, 0)
        self._own_finished = 0
        self._outbox = {dst: Ring(memory.outgoing[dst].numel()) for dst in self._peers}
        self._outgoing_address = {dst: memory.outgoing[dst].data_ptr() for dst in self._peers}
        self._inbox: dict[tuple[int, tuple[int, int, int, int]], tuple[int, int]] = {}
        self._owed = dict.fromkeys(self._peers, 0)  # bytes of a peer's ring whose credits are kept back
        self._most_owed = {src: memory.incoming[src].numel() // OWED_PART for src in self._peers}
        self._pulls_waiting: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}  # (key, epoch) -> requests
        self._fetches: dict[int, Fetch] = {}
        self._last_request = 0
        self._handlers = (
            self._on_finish,
            self._on_deposit,
            self._on_credit,
            self._on_pull,
            self._on_data,
        )
        self._views: dict[tuple[int, int, int, int], Here] = {}  # made once: pulls are the same in every step
        self._slots = Views(lambda peer, *span: memory.outgoing[peer].narrow(0, *span))  # of peers' inboxes
        self._arrivals = Views(lambda peer, *span: memory.incoming[peer].narrow(0, *span))  # of this rank's
        self.shaped = self._numbers = Shaped()
        channel.start(self)
        close_at_exit(self)

    @abstractmethod
    def _connect(self, exchange: ExchangeFn, members: Sequence[int], *args: Any, **how: Any) -> tuple[Channel, Memory]:
        """Collective: to these ranks, this one among them."""

    # ---- windows -----------------------------------------------------------------------------------------------------
    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        self._check_open()
        table = check_sizes(sizes, self.sizes, self.world_size)
        self._memory.expose(table)
        self.sizes = table
        self.segments = self._memory.segments[self.rank]

    def publish(self, keys: Sequence[int], epoch: int, *, last: bool = False) -> None:
        self._check_open()
        if not keys:
            return
        published = self._published[self.rank]
        with self._lock:
            reading = [p for p in self._peers if self._finished[p] < epoch - 1 and p not in self._departed]
            readers = f"ranks {[*map(self._called, reading)]}" if reading else ""
            check_publications(self, keys, epoch, published, readers)
            published.update(dict.fromkeys(keys, epoch))
            for key in keys if self._pulls_waiting else ():
                for src, request, start, nbytes in self._pulls_waiting.pop((key, epoch), ()):
                    self._answer(src, key, request, start, nbytes)
        if self._memory.in_place:  # otherwise peers ask, and are answered when the time has come
            self._post_all(msg.pack_publish(keys, epoch))

    def pull(self, epoch: int, requests: Sequence[PullRequest]) -> Sequence[Transfer]:
        found: list[Transfer] = []
        received = 0
        for owner, key, start, nbytes, out, _, _, _ in requests:
            here = self._views.get((owner, key, start, nbytes)) if out is None and epoch > self._own_finished else None
            if here is not None:
                with self._lock:
                    if self._published[owner].get(key) != epoch:
                        here = None
            if here is None:  # a caller that cannot have all at once may ask again: nothing of this counts as read
                return [self._pull(epoch, request) for request in requests]
            found.append(here)
            received += nbytes if owner != self.rank else 0
        self.counters.param_bytes_received += received
        return found

    def _pull(self, epoch: int, request: PullRequest) -> Transfer:
        self._check_open()
        owner, key, start, nbytes, out, _, _, _ = request
        check_pull(self, request, epoch, self._own_finished)
        if self._memory.in_place:
            if out is not None:
                raise ValueError(f"pull: transport {self.name} reads in place: out must be None")
            return View(self, owner, key, epoch, start, nbytes)
        out = check_out(out, nbytes, self.name)
        if owner == self.rank:
            return View(self, owner, key, epoch, start, nbytes, out)
        return self.fetch(owner, key, epoch, out, start=start)

    def fetch(
        self, owner: int, key: int, epoch: int, out: torch.Tensor, *, start: int = 0, then: Callable[[], None] | None = None
    ) -> Fetch:
        """A `pull` over the wire. then: called when the bytes are in `out`, in the thread that took them in; must not block."""
        fetch = Fetch(self, owner, key, epoch, out, then)
        with self._lock:
            self._last_request = request = (self._last_request + 1) % (1 << 32)
            self._fetches[request] = fetch
            self._channel.post(owner, msg.pack(msg.PULL, key, epoch, request, x=start, y=out.numel()))
        return fetch

    def _view(self, owner: int, key: int, start: int, nbytes: int) -> Here:
        """Of a segment."""
        name = owner, key, start, nbytes
        here = self._views.get(name)
        if here is None:
            here = self._views[name] = Here(self._memory.segments[owner][key].narrow(0, start, nbytes))
        return here

    def finish(self, epoch: int, outcome: Outcome = WHOLE) -> None:
        self._check_open()
        check_finish(epoch, self._own_finished)
        self._own_finished = epoch
        self._post_each(lambda peer: self._rounds.finish(peer, epoch, outcome))

    def wait_finished(self, epoch: int, where: Where = NOWHERE, *, meanwhile: Callable[[], object] | None = None) -> None:
        self._check_open()
        if epoch <= 0:
            return
        for peer in self._peers:
            if not self.has_finished(peer, epoch):

                def finished(peer: int = peer) -> bool:
                    if meanwhile is not None:
                        meanwhile()
                    return self.has_finished(peer, epoch)

                wait_until(self.whole, finished, peer=peer, where=where, doing=f"to finish reading epoch {epoch}")

    def has_finished(self, peer: int, epoch: int) -> bool:
        """The peer reads nothing of `epoch` any more."""
        with self._lock:
            return self._finished[peer] >= epoch or peer in self._departed

    # ---- messages ----------------------------------------------------------------------------------------------------
    def reserve(self, dsts: Sequence[int], sizes: Sequence[int], room: int = 0) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for dst, nbytes in zip(dsts, sizes, strict=True):
            ring = self._outbox.get(dst)
            if self._closed or ring is None or not 0 <= nbytes <= self.message_limit:
                self._check_open()
                ring = self._ring(dst)
                check_message(nbytes, self.message_limit, f"to rank {dst}")
            with self._lock:
                offset = ring.reserve(nbytes)
            if offset is None:
                self._poll()  # a credit may be waiting to be taken in
                with self._lock:
                    offset = ring.reserve(nbytes)
            if dst in self._departed:
                raise self._gone(dst, f"a message of {nbytes} bytes cannot be sent")
            if offset is None:
                break
            found.append(self._slots[dst, offset, nbytes])
        return found

    def send(self, sendings: Sequence[Sending], *, more: bool = False) -> None:
        for dst, tag, buffer, _, _ in sendings:
            ring = self._outbox.get(dst)
            if self._closed or ring is None:
                self._check_open()
                ring = self._ring(dst)
            nbytes = buffer.nbytes
            # An empty tensor has no address.
            address = self._outgoing_address[dst]
            offset = buffer.data_ptr() - address if nbytes else int(buffer.storage_offset()) * buffer.element_size()
            try:  # first: a bad tag leaves the reservation as it is
                header = _header(msg.DEPOSIT, *tag, offset, nbytes)
            except struct.error:
                header = msg.pack(msg.DEPOSIT, *tag, max(offset, 0), nbytes)  # says what is wrong
            with self._lock:
                if not ring.send(offset):
                    raise not_reserved(dst, tag)
                if tag[0] == CHANNEL_PARAM:
                    count_message(self.counters, CHANNEL_PARAM, nbytes, sent=True)
                else:  # without a frame a message
                    self.counters.grad_bytes_sent += nbytes
                # Before it leaves: if an exception comes in between, peers must not go on too early.
                self._rounds.sent[dst] += 1
                payload = None if self._memory.in_place else self._memory.outgoing[dst].narrow(0, offset, nbytes)
                hold = more and payload is None
                if not hold:
                    self._owed[dst] = 0
                self._channel.post(dst, header, payload, hold=hold)

    def receive(self, srcs: Sequence[int], tag: Tag, where: Where = NOWHERE, *, wait: bool = True) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for src in srcs:
            with self._lock:
                entry = self._inbox.get((src, tag))
            if entry is None:
                entry = self._await_message(src, tag, where, wait=wait)
                if entry is None:
                    return []
            found.append(self._arrivals[(src, *entry)])
        return found

    def _await_message(self, src: int, tag: Tag, where: Where, *, wait: bool) -> tuple[int, int] | None:
        """Place and bytes of a message that was not here a moment ago; None: it is not here yet."""
        if self._closed or src not in self._outbox:
            self._check_open()
            self._ring(src)
        if not wait:
            self._poll()
        else:
            wait_until(self.whole, lambda: self.has(src, tag), peer=src, where=where, doing=f"to send {tag}")
        with self._lock:
            entry, departed = self._inbox.get((src, tag)), src in self._departed
        if entry is None and departed:
            raise self._gone(src, f"its message {tag} will not come")
        return entry

    def release(self, srcs: Sequence[int], tag: Tag, *, more: bool = False) -> None:
        for src in srcs:
            with self._lock:
                entry = self._inbox.pop((src, tag), None)
                if entry is None:
                    raise not_here(src, tag)
                owed = self._owed[src] + max(entry[1], ALIGNMENT) if more else 0
                hold = 0 < owed <= self._most_owed[src]
                self._owed[src] = owed if hold else 0
                self._channel.post(src, _header(msg.CREDIT, self._rounds.round, 0, 0, 0, entry[0], 0), hold=hold)

    # ---- progress and end --------------------------------------------------------------------------------------------
    def close(self, reason: str = "") -> None:
        if self._closed:
            return
        if reason:
            self.abort(reason)
        if not self._memory.in_place and os.getpid() == self._pid and sys.exc_info()[0] is None:
            self._serve_readers()
        try:
            self.membership.when_lost.clear()
            if os.getpid() == self._pid:  # a copy made by fork has no right to speak for its parent
                with self._lock:  # at once: a goodbye that comes later is not answered any more
                    self._closed = True
                    self._post_all(msg.pack(msg.GOODBYE))
                self._channel.flush(min(CLOSE_FLUSH_S, self.deadline_s))
        finally:
            self._closed = True
            self._channel.close()
            self._memory.close()
            self.segments = Closed()
            for views in (self._views, self._slots, self._arrivals, self._numbers):
                views.clear()
            with self._lock:
                self._fetches.clear()  # of what a lost peer did not send

    def _serve_readers(self) -> None:
        """Stay until all peers have finished the last epoch published here: their pulls are answered by this rank only."""
        limit = time.monotonic() + min(CLOSE_FLUSH_S, self.deadline_s)
        last = max(self._published[self.rank].values(), default=0)
        while self._failure is None and any(self._finished[p] < last and p not in self._departed for p in self._peers):
            left = limit - time.monotonic()
            if left <= 0:
                return
            self._channel.poll(left)

    # ---- receiver ----------------------------------------------------------------------------------------------------
    def handle(self, src: int, *messages: bytes) -> None:
        with self._lock:
            for message in messages:
                self._take_in(src, message)
        if self.on_news is not None:
            self.on_news()

    def _take_in(self, src: int, message: bytes) -> None:
        kind, a, b, c, d, x, y = msg.HEADER.unpack_from(message)
        self.activity += 1
        if kind == msg.PUBLISH:
            self._published[src].update(dict.fromkeys(msg.published_keys(message), b))
        elif kind <= len(self._handlers):
            self._handlers[kind - msg.FINISH](src, a, b, c, d, x, y)
        elif kind == msg.GOODBYE:
            if self._channel.answers_goodbyes and not self._closed:
                self._channel.post(src, msg.pack(msg.GOODBYE))
            self._departed.add(src)
        elif kind == msg.BROKEN:
            self._rounds.on_broken(src, a, b, x, bytes(message[msg.HEADER_BYTES :]).decode(errors="replace"))
        elif kind == msg.ROUND:
            self._rounds.on_round(src, a, b, x)
        elif kind == msg.ABORT:
            reason = bytes(message[msg.HEADER_BYTES :]).decode(errors="replace")
            culprit = a if a != self.rank else src
            self._fail(culprit, reason if a == src else f"rank {self._called(src)} reports: {reason}")
        else:
            self._fail(
                -1, f"rank {self._called(src)} sent a message of unknown kind {kind}: do all ranks run the same version?"
            )

    def landing(self, src: int, header: bytes) -> torch.Tensor | None:
        kind, _, _, request, _, x, y = msg.HEADER.unpack_from(header)
        if kind == msg.DEPOSIT:
            return self._memory.incoming[src].narrow(0, x, y)
        with self._lock:
            fetch = self._fetches.get(request)
        return None if fetch is None else fetch.out

    def _on_finish(self, src: int, flags: int, epoch: int, scatters: int, calls: int, sent: int, _y: int) -> None:
        self._rounds.on_finish(src, flags, epoch, scatters, calls, sent)
        self._finished[src] = max(epoch, self._finished[src])

    def _on_deposit(self, src: int, channel: int, key: int, seq: int, part: int, offset: int, nbytes: int) -> None:
        name = src, (channel, key, seq, part)  # equal to a Tag, made without a frame
        if name in self._inbox:
            who, tag = self._called(src), Tag(channel, key, seq, part)
            self._fail(-1, f"rank {who} sent two messages {tag}: tags must be unique among messages in flight")
            return
        if channel == self._rounds.discarded:
            self._channel.post(src, msg.pack(msg.CREDIT, self._rounds.round, x=offset))
        else:
            self._inbox[name] = (offset, nbytes)
        self._rounds.taken[src] += 1
        if channel == CHANNEL_PARAM:
            count_message(self.counters, channel, nbytes, sent=False)
        else:
            self.counters.grad_bytes_received += nbytes

    def _on_credit(self, src: int, round_: int, _b: int, _c: int, _d: int, offset: int, _y: int) -> None:
        if round_ != self._rounds.round:
            return  # of before a recovery, which has freed all places
        try:
            self._outbox[src].free(offset)
        except KeyError:
            who, here = self._called(src), self._called(self.rank)
            self._fail(-1, f"rank {who} gave back offset {offset} of its inbox, where no message of rank {here} is")

    def _on_pull(self, src: int, key: int, epoch: int, request: int, _d: int, start: int, nbytes: int) -> None:
        published = self._published[self.rank].get(key, 0)
        if published == epoch:
            self._answer(src, key, request, start, nbytes)
        elif published < epoch:
            self._pulls_waiting.setdefault((key, epoch), []).append((src, request, start, nbytes))
        else:
            who = self._called(src)
            self._fail(-1, f"rank {who} pulled epoch {epoch} of key {key} after it was replaced by epoch {published}")

    def _on_data(self, _src: int, _a: int, _b: int, request: int, *_: int) -> None:
        fetch = self._fetches.pop(request, None)
        if fetch is not None:
            fetch.complete = True
            self.counters.param_bytes_received += fetch.out.numel()
            if fetch.then is not None:
                fetch.then()

    def _answer(self, src: int, key: int, request: int, start: int, nbytes: int) -> None:
        payload = self._memory.segments[self.rank][key].narrow(0, start, nbytes)
        self.counters.param_bytes_sent += nbytes
        self._channel.post(src, msg.pack(msg.DATA, c=request, y=nbytes), payload)

    # ---- helpers -----------------------------------------------------------------------------------------------------
    def has(self, src: int, tag: Tag) -> bool:
        """The message is here."""
        with self._lock:
            return (src, tag) in self._inbox

    def _ring(self, peer: int) -> Ring:
        ring = self._outbox.get(peer)
        if ring is None:
            check_peer(peer, self.rank, self._peers, self.world_size)
            raise AssertionError(peer)
        return ring
