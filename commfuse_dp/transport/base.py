"""What every transport offers: published windows that peers pull from, and credit-bounded messages.

Two families stand behind one interface, so that engine and collectives are written once:

* one-sided (`inproc`, `shm`, `tcp`): *publish once, pull at will*. A rank publishes its shards under an epoch; peers pull
  slices whenever they need them, in any order, without the owner's compute taking part.
* two-sided (`p2p` over torch.distributed, `mpi`): `TwoSidedTransport` below, made to look one-sided by
  `paired.PairedTransport`, which has every pull answered by a send of its owner.

`p2p` on GPUs is neither: there a pull is half of an exchange ([Note: Lockstep transports]).

Life of one transport, on every rank alike:

    transport = open_transport(...)                 collective
    transport.expose(sizes)                         collective, once: who publishes how many bytes under which key
    each epoch (one epoch = one version of the parameters):
        transport.wait_finished(epoch - 1)          all peers have stopped reading the previous version
        for key: pack transport.segment(key); transport.publish(key, epoch)
        ... pull(owner, key, epoch) ... reserve / send / receive / release ...
        transport.finish(epoch)                     this rank will read no more of `epoch`
    transport.close()

[Note: Who may block]
Only the wait functions block, each with a deadline, and each calls `progress` while it waits. `try_reserve` never blocks:
a caller that finds no credit must first consume what others sent to it (else two ranks can wait for each other for ever).

[Note: Buffers]
A tensor returned by `pull(...).wait()` or `receive` may alias a peer's memory (shm, inproc). It is valid until
`finish(epoch)` for a pull into no buffer (or for as long as the caller keeps its own `out`), and until `release` for a
message. It must never be written to.

[Note: Stream-ordered transports]
A transport whose `stream_ordered` is True never blocks the CPU: wherever this contract says that a method waits, the *current
stream* waits on an event, and what is said above about time holds for the order of work in streams:
* `Transfer.done` and `arrived` are True at once, `try_reserve` never returns None, and every wait returns at once. Whatever
  is enqueued in the current stream afterwards runs when the wait is over; another stream must be ordered behind it.
* `publish`, `send` and `release` speak for the work that is in the current stream when they are called.
* Every message is announced by `expect`; messages of one pair and channel are sent in the order of their announcements.
* A deadline or a lost peer is found by a thread of the transport. It releases the streams, whose data is then worthless,
  and every call from then on raises.

[Note: Broken steps]
An exception may leave a step anywhere: messages sent that nobody takes in, places reserved and never sent, peers that wait for
what will not come. Where `recovers` is True the ranks find out and begin the next step clean:
* a rank that an exception broke off says so at once (`tell_broken`), and with `finish`, how many messages it has sent. A peer
  that has taken in all of these and still misses one knows that it will never come, and raises BrokenStepError. Nobody raises
  for what may still come: ranks that all fail at the same place each meet their own exception.
* every rank learns the outcome of a step on all ranks with `wait_finished`, and so all decide alike whether to `recover`.

[Note: Lockstep transports]
Where `lockstep` is True nothing is asked for: whatever a rank does with the peer t places further on, in the order of the ring,
its peer t places back does with it at the same moment. Both directions of such a step are one grouped exchange (`grouped`).
So all ranks must take the same steps, also where shards are uneven and a step has nothing to bring or to give:
* `pull_all` takes the place of `pull`. Each request brings a slice of its owner, and gives one of the own segment (`give`) to
  the peer that mirrors the owner. The own window must have been published.
* `send(dst, tag, ...)` also takes in the message of the same tag that was announced (`expect`) from the peer that mirrors dst.
  A rank that has nothing to send in a step sends an empty tensor. `arrived`: the step has been taken.
* `finish` and `wait_finished` are local: nobody reads the own segments but in steps of our own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from commfuse_dp.device.base import Device, Event, Word
from commfuse_dp.errors import DeadlineError, Where
from commfuse_dp.probe import Probe
from commfuse_dp.program.hosts import Hosts
from commfuse_dp.transport.budget import Share

# Collective object exchange used only while a transport is set up: every rank gives one picklable object and gets all of
# them in rank order (for example a wrapper of torch.distributed.all_gather_object).
ExchangeFn = Callable[[Any], "list[Any]"]

NOWHERE = Where()


class Tag(NamedTuple):
    """Identity of a message between a pair of ranks: four integers in 0 .. 2**31-1; unique among messages in flight."""

    channel: int  # who uses it: see the constants below
    key: int = 0  # unit (layer) or call number
    seq: int = 0  # epoch, round or step
    part: int = 0  # slice


CHANNEL_PARAM, CHANNEL_GRAD, CHANNEL_COLLECTIVE, CHANNEL_REPLICA = 1, 2, 3, 4


class Sending(NamedTuple):
    """A message as one of several, see `Transport.send_all`.

    room: stream-ordered transports: bytes that both ends set aside for it, at least its own; 0: its own. Messages of one tag
    that have equal room are worked out together, however many peers they go to."""

    dst: int
    tag: Tag
    buffer: torch.Tensor
    when: Word | None = None
    room: int = 0


class Part(NamedTuple):
    """A further slice of a pull."""

    owner: int
    key: int
    start: int
    nbytes: int
    at: int  # byte of `out` where it begins


class PullRequest(NamedTuple):
    """A pull as one of several, see `Transport.pull_all`. With `others`, stream-ordered transports that are not in lockstep
    fetch slices of several owners by one batch of copies, with one word of arrival for all: they come as one."""

    owner: int
    key: int
    start: int
    nbytes: int
    out: torch.Tensor
    after: Event | None = None
    give: tuple[int, int] = (0, 0)  # lockstep transports: start and bytes of what a peer gets of the own segment meanwhile
    others: tuple[Part, ...] = ()  # behind the first slice, which begins at byte 0 of `out`; one object for equal pulls


class Outcome(NamedTuple):
    """How a rank has left a step, as it tells its peers with `finish`. See [Note: Broken steps]."""

    broken: bool = False  # an exception came out of something that sends to peers, or takes in
    scatters: int = 0  # reduce-scatters begun in the step
    calls: int = 0  # plain collectives begun so far; -1: one of them was broken off between two messages
    mixed: bool = False  # its backward added to gradients of earlier ones, and they are still there

    def alike(self, other: Outcome) -> bool:
        """Both ranks have done the same."""
        return (self.broken, self.scatters, self.calls) == (other.broken, other.scatters, other.calls)


WHOLE = Outcome()


class Left(NamedTuple):
    """What a peer has told of a step that it has left, or of why it will never send again (`final`)."""

    epoch: int
    sent: int  # messages that it has sent to this rank, before it left
    reason: str = ""  # of an exception, where one is known
    final: bool = False


class Transfer(ABC):
    """A pull under way."""

    arrival: Word | None = None  # stream-ordered transports: reached when the bytes are there, for kernels that wait themselves

    landed: Event | None = None  # stream-ordered transports: behind the copy; timed while somebody watches (probe.timing)

    def concerns(self, where: Where) -> None:
        """What the bytes are, for errors of a wait that somebody else makes."""
        return

    @abstractmethod
    def done(self) -> bool:
        """True once `wait` would not block. Never blocks. Raises if the peer is lost."""

    @abstractmethod
    def wait(self, where: Where = NOWHERE) -> torch.Tensor:
        """The bytes (uint8, 1-D, contiguous), readable. Raises DeadlineError or PeerLostError."""


class Transport(ABC):
    """One rank's end. Not thread-safe towards its user: one thread calls it (I/O threads of its own are its own affair)."""

    name: ClassVar[str]
    in_place: ClassVar[bool]  # pulled slices are read where the owner published them: no window buffers are needed
    stream_ordered: ClassVar[bool] = False  # see [Note: Stream-ordered transports]
    device: Device | None = None  # whose streams its waits stand in, if stream_ordered
    hosts: Hosts | None = None  # the hierarchical order, where one transport serves a host and another one what is between
    lockstep: ClassVar[bool] = False  # see [Note: Lockstep transports]
    share: Share | None = None  # what it takes for messages, if `open_transport` has opened it
    recovers: ClassVar[bool] = False  # it has `recover` and what belongs to it, see [Note: Broken steps]

    def __init__(self, rank: int, world_size: int, *, deadline_s: float, probe: Probe | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.deadline_s = deadline_s
        self.probe = probe if probe is not None else Probe()
        self.activity = 0  # messages taken in so far
        self.sleep_s = 1.0  # longest sleep of a wait: peers end it earlier
        self.layers: Sequence[str] = ()  # what the keys of gradients stand for, in errors

    # ---- windows: published parameters -------------------------------------------------------------------------------
    @abstractmethod
    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        """Collective, once. `sizes[key][rank]` = bytes that `rank` publishes under `key` (0 is allowed: a short shard).

        Raises TransportError when the memory cannot be had (how much was asked for, how much there is, the fix).
        """

    @abstractmethod
    def segment(self, key: int) -> torch.Tensor:
        """This rank's published bytes under `key`: uint8, 1-D, 64-byte aligned, writable until `publish`."""

    @abstractmethod
    def publish(self, key: int, epoch: int, *, more: bool = False) -> None:
        """Make the segment's bytes readable to all peers as version `epoch` (> 0, rising by one).

        more: other publications follow at once, or `push`; the notices may travel together."""

    def publish_all(self, keys: Sequence[int], epoch: int, *, last: bool) -> None:
        """`publish` of several segments that are ready together. last: of all that this rank publishes in `epoch`; all ranks
        say so, or none. Waits may then be for all keys of an owner at once."""
        for key in keys:
            self.publish(key, epoch, more=True)
        self.push()

    @abstractmethod
    def pull(
        self,
        owner: int,
        key: int,
        epoch: int,
        *,
        start: int = 0,
        nbytes: int | None = None,
        out: torch.Tensor | None = None,
        after: Event | None = None,
    ) -> Transfer:
        """Start to fetch bytes [start, start + nbytes) of `owner`'s segment `key`; never blocks.

        `out`: uint8 buffer of nbytes that receives them; must be None if `in_place`, must be given otherwise.
        `after`: stream-ordered transports write to `out` only behind this event (its last reader's); others ignore it.
        May be called before the owner has published `epoch`: the transfer then completes after it has.
        """

    def pull_all(self, epoch: int, requests: Sequence[PullRequest]) -> Sequence[Transfer]:
        """Several pulls into buffers, in their order; cheaper than one by one where that costs much."""
        return [
            self.pull(owner, key, epoch, start=start, nbytes=nbytes, out=out, after=after)
            for owner, key, start, nbytes, out, after, _, _ in requests
        ]

    def describe_pulls(self, describe: Callable[[int, int, int, int, int], Where]) -> None:
        """describe(owner, key, epoch, start, nbytes): what the bytes are, for errors of waits that nobody stands in."""
        return

    @abstractmethod
    def finish(self, epoch: int, outcome: Outcome = WHOLE) -> None:
        """Tell all peers that this rank reads nothing of `epoch` any more (call once, all pulls waited for). Never blocks.

        outcome: how the step ended here; transports that cannot recover from a broken step (`recovers`) keep it to themselves.
        """

    @abstractmethod
    def wait_finished(self, epoch: int, where: Where = NOWHERE, *, meanwhile: Callable[[], object] | None = None) -> None:
        """Block until every peer has finished `epoch`: own segments may be rewritten. At once for epoch <= 0.

        meanwhile: called again and again while it blocks; streams do not need it."""

    # ---- broken steps ------------------------------------------------------------------------------------------------
    def tell_broken(self, epoch: int, reason: str, *, final: bool = False) -> None:
        """An exception has broken this rank's step `epoch` off: no message of that step follows. final: nothing ever follows.

        Never blocks. Of no effect where `recovers` is False."""
        return

    def left(self, peer: int) -> Left | None:
        """What `peer` has told last about a step that it has left; None: it has told nothing."""
        return None

    def discard(self, channel: int) -> None:
        """Drop the messages of a channel that are here, or come, and give their room back, until `recover`."""
        return

    def outcome_of(self, peer: int, epoch: int) -> Outcome | None:
        """How `peer` has ended step `epoch`, after `wait_finished(epoch)` until the next `finish`; None: it said goodbye."""
        return None

    def all_sent(self, peer: int) -> bool:
        """All that `peer` had sent to this rank when it left its step is here."""
        return False

    def recover(self, epoch: int, where: Where = NOWHERE) -> None:
        """Drop every message of all steps up to `epoch`, at both ends. Blocks until all ranks have. All have finished `epoch`.

        All places in all inboxes are free afterwards, whatever an exception has left in them."""
        raise NotImplementedError(f"transport {self.name} cannot recover from a broken step")

    def read_again(self, owners: Sequence[int], key: int, epoch: int, nbytes: int) -> bool:
        """`in_place` pulls from several ranks, nbytes in all, of which the caller still has the views from an earlier epoch
        (segments stay where they are): True if all may be read now. False says nothing: `pull`. Never blocks, and takes
        nothing in."""
        return False

    # ---- messages: gradients and collectives -------------------------------------------------------------------------
    def box_of(self, owner: int) -> int:
        """Whose inbox gradients for `owner` go to; this rank itself: none."""
        return owner

    @property
    @abstractmethod
    def message_limit(self) -> int:
        """Largest message in bytes."""

    @abstractmethod
    def try_reserve(self, dst: int, nbytes: int) -> torch.Tensor | None:
        """A writable uint8 buffer of nbytes (64-byte aligned) for one message to `dst`, or None: no credit just now.

        For shm it lies in the owner's inbox, so that what is computed into it needs no further copy.
        Raises ValueError if nbytes > message_limit.
        """

    def reserve_all(self, dsts: Sequence[int], sizes: Sequence[int], room: int) -> list[torch.Tensor]:
        """`try_reserve` for one message to each of several ranks, on stream-ordered transports. room: as in `Sending`."""
        found = [self.try_reserve(dst, nbytes) for dst, nbytes in zip(dsts, sizes, strict=True)]
        return [buffer for buffer in found if buffer is not None]

    @abstractmethod
    def send(self, dst: int, tag: Tag, buffer: torch.Tensor, *, when: Word | None = None, more: bool = False) -> None:
        """Hand over a buffer got from `try_reserve(dst, ...)`; it must not be touched afterwards. Never blocks.

        when: stream-ordered transports: it leaves as soon as this word is reached, not behind the current stream.
        more: as in `publish`; others ignore it where the bytes travel themselves."""

    def send_all(self, sendings: Sequence[Sending]) -> None:
        """Several messages, in their order; cheaper than one by one where that costs much."""
        for dst, tag, buffer, when, _ in sendings:
            if when is None:
                self.send(dst, tag, buffer)
            else:
                self.send(dst, tag, buffer, when=when)

    def expect(self, src: int, tag: Tag, nbytes: int) -> None:
        """Announce a message, so that a two-sided transport posts the receive early; the one-sided ones need no notice."""
        return

    def expect_all(self, srcs: Sequence[int], tag: Tag, nbytes: int, room: int) -> None:
        """`expect` of one tag from several ranks. room: as in `Sending`."""
        for src in srcs:
            self.expect(src, tag, nbytes)

    @abstractmethod
    def arrived(self, src: int, tag: Tag) -> bool:
        """True if `receive` would not block. Never blocks. Raises if the peer is lost."""

    @abstractmethod
    def receive(self, src: int, tag: Tag, where: Where = NOWHERE) -> torch.Tensor:
        """The message's bytes (uint8, read only, until `release`)."""

    @abstractmethod
    def release(self, src: int, tag: Tag, *, more: bool = False) -> None:
        """Give the message's slot back to its sender (credit). more: as in `publish`."""

    def receive_all(self, srcs: Sequence[int], tag: Tag, where: Where = NOWHERE) -> list[torch.Tensor]:
        """The messages of one tag from several ranks."""
        return [self.receive(src, tag, where) for src in srcs]

    def release_all(self, srcs: Sequence[int], tag: Tag, *, more: bool = False) -> None:
        """`release` of the messages of one tag from several ranks."""
        for src in srcs:
            self.release(src, tag, more=more)

    def push(self) -> None:
        """Send the notices that were held back for company (`more`). Waits do so by themselves. Never blocks."""
        return

    @property
    def held(self) -> int:
        """Messages of which a place is reserved, that are on their way, or not released, in the peers' inboxes and here."""
        return 0

    # ---- progress and end --------------------------------------------------------------------------------------------
    @abstractmethod
    def progress(self, timeout_s: float = 0.0) -> None:
        """Take in what peers have sent; block at most timeout_s, less when something happens. Raises PeerLostError."""

    def wait_until(self, ready: Callable[[], bool], *, peer: int, where: Where, doing: str) -> None:
        """Block until ready(), with progress and the deadline. `doing` completes "rank 1 waits for ..." in the error."""
        limit = time.monotonic() + self.deadline_s
        while True:
            before = self.activity
            if ready():
                return
            if self.activity != before:  # something was taken in while it looked: it may be ready now, do not sleep
                continue
            left = limit - time.monotonic()
            if left <= 0:
                who = f"rank {peer}" if peer >= 0 else "its peers"
                raise DeadlineError(
                    f"rank {self.rank} waited {self.deadline_s:g} s for {who}: {doing} ({where}; transport {self.name}). "
                    f"Either {who} is stuck or much slower, or it runs another program: look at its log first. "
                    "If the step is really that slow, raise deadline_s.",
                    rank=self.rank,
                    peer=peer,
                    where=where,
                )
            self.progress(min(left, self.sleep_s))

    def abort(self, reason: str) -> None:
        """Tell all peers that this rank has failed, if the transport can: their waits then end at once."""
        return

    @abstractmethod
    def close(self) -> None:
        """Say goodbye to the peers and free everything. Safe to call twice, and after an error."""


class Handle(ABC):
    """A two-sided send or receive under way."""

    @abstractmethod
    def done(self) -> bool: ...

    @abstractmethod
    def wait(self, where: Where = NOWHERE) -> None: ...


PARAM_LANE, GRAD_LANE, CONTROL_LANE = 0, 1, 2


class TwoSidedTransport(ABC):
    """Plain asynchronous sends and receives on lanes (communicators of their own): parameters, gradients, control.

    The control lane carries small CPU tensors only, whatever the device of the others.
    """

    name: ClassVar[str]

    def __init__(self, rank: int, world_size: int, *, deadline_s: float, probe: Probe | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.deadline_s = deadline_s
        self.probe = probe if probe is not None else Probe()

    @abstractmethod
    def isend(self, buffer: torch.Tensor, dst: int, *, lane: int, tag: int) -> Handle: ...

    @abstractmethod
    def irecv(self, buffer: torch.Tensor, src: int, *, lane: int, tag: int) -> Handle: ...

    @abstractmethod
    def close(self) -> None: ...
