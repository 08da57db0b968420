"""What every transport offers: published windows that peers pull from, and credit-bounded messages.

Two families stand behind one interface, so that engine and collectives are written once:

* one-sided (`inproc`, `shm`, `tcp`): *publish once, pull at will*. A rank publishes its shards under an epoch; peers pull
  slices whenever they need them, in any order, without the owner's compute taking part.
* two-sided (`p2p` over torch.distributed, `mpi`): sends and receives, made to look one-sided by channels that have every pull
  answered by a send of its owner.

`p2p` on GPUs is neither: there a pull is half of an exchange ([Note: Lockstep transports]).

Life of one transport, on every rank alike:

    transport = open_transport(...)                 collective
    transport.expose(sizes)                         collective, once: who publishes how many bytes under which key
    each epoch (one epoch = one version of the parameters):
        transport.wait_finished(epoch - 1)          all peers have stopped reading the previous version
        pack transport.segments[key] ...; transport.publish(keys, epoch)
        ... pull(epoch, requests) ... reserve / send / receive / release ...
        transport.finish(epoch)                     this rank will read no more of `epoch`
    transport.close()

[Note: Batches]
Windows and messages are moved in batches only: one call takes all keys, slices or peers that are ready together, whatever it
costs a transport to find out what they have in common. Who has one message gives a batch of one.

[Note: Who may block]
Only `wait_finished`, `receive`, `Transfer.wait` and waiting.py block, each with a deadline, and call `progress` meanwhile.
`reserve` never blocks: a caller that finds no credit must first consume what others sent to it (else two ranks can wait for
each other for ever).

[Note: Buffers]
A tensor returned by `pull(...).wait()` or `receive` may alias a peer's memory (shm, inproc). It is valid until
`finish(epoch)` for a pull into no buffer (or for as long as the caller keeps its own `out`), and until `release` for a
message. It must never be written to. What is read in place lies in the same place in every epoch.

[Note: Stream-ordered transports]
A transport that has a `device` never blocks the CPU: wherever this contract says that a method waits, the *current stream*
waits on an event, and what is said above about time holds for the order of work in streams:
* `Transfer.done` is True at once, `reserve` always finds room, and every wait returns at once. Whatever is enqueued in the
  current stream afterwards runs when the wait is over; another stream must be ordered behind it.
* `publish`, `send` and `release` speak for the work that is in the current stream when they are called.
* Every message is announced by `expect`; messages of one pair and channel are sent in the order of their announcements.
* A deadline or a lost peer is found by a thread of the transport. It releases the streams, whose data is then worthless,
  and every call from then on raises.

[Note: Broken steps]
An exception may leave a step anywhere: messages sent that nobody takes in, places reserved and never sent, peers that wait for
what will not come. Where there is a `recovery` the ranks find out and begin the next step clean:
* a rank that an exception broke off says so at once (`tell_broken`), and with `finish`, how many messages it has sent. A peer
  that has taken in all of these and still misses one knows that it will never come, and raises BrokenStepError. Nobody raises
  for what may still come: ranks that all fail at the same place each meet their own exception.
* every rank learns the outcome of a step on all ranks with `wait_finished`, and so all decide alike whether to `recover`.
* a rank that is interrupted before it has begun a step says that, too (`absent`): who waits there for what it would publish
  raises, and the rank begins that step later, only to break it off. So ranks never are in different steps.

[Note: Lockstep transports]
Where `lockstep` is True nothing is asked for: whatever a rank does with the peer t places further on, in the order of the ring,
its peer t places back does with it at the same moment. Both directions of such a step are one grouped exchange (`grouped`).
So all ranks must take the same steps, also where shards are uneven and a step has nothing to bring or to give:
* Each request of a `pull` brings a slice of its owner, and gives one of the own segment (`give`) to the peer that mirrors the
  owner. The own window must have been published.
* `send` also takes in the message of the same tag that was announced (`expect`) from the peer that mirrors its destination. A
  rank that has nothing to send in a step sends an empty tensor. A message is here when the step has been taken.
* `finish` and `wait_finished` are local: nobody reads the own segments but in steps of our own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from commfuse_dp.device.base import Device, Event, Word, WordLike
from commfuse_dp.errors import Where
from commfuse_dp.probe import Probe
from commfuse_dp.program.hosts import Hosts
from commfuse_dp.transport.budget import Footprint
from commfuse_dp.transport.membership import Membership
from commfuse_dp.transport.views import shaped

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
    """A message, see `Transport.send`.

    buffer: from `reserve`; it must not be touched afterwards.
    when: stream-ordered transports: it leaves as soon as these words are reached, not behind the current stream; empty: behind
        what is in that.
    room: stream-ordered transports: bytes that both ends set aside for it, at least its own; 0: its own. Messages of one tag
    that have equal room are worked out together, however many peers they go to."""

    dst: int
    tag: Tag
    buffer: torch.Tensor
    when: Sequence[WordLike] = ()
    room: int = 0


class Part(NamedTuple):
    """A further slice of a pull, see `PullRequest`."""

    owner: int
    key: int
    start: int
    nbytes: int
    at: int  # byte of `out` where it begins


class PullRequest(NamedTuple):
    """A pull, see `Transport.pull`: bytes [start, start + nbytes) of what `owner` publishes under `key`.

    out: uint8 buffer of nbytes that receives them; must be None if `in_place`, must be given otherwise.
    after: stream-ordered transports write to `out` only behind this event (its last reader's); others ignore it.
    give: lockstep transports: start and bytes of what a peer gets of the own segment meanwhile.
    others: behind the first slice, which begins at byte 0 of `out`; one object for equal pulls. Stream-ordered transports that
        are not in lockstep fetch slices of several owners by one batch of copies, with one word of arrival for all."""

    owner: int
    key: int
    start: int
    nbytes: int
    out: torch.Tensor | None = None
    after: Event | None = None
    give: tuple[int, int] = (0, 0)
    others: tuple[Part, ...] = ()


class Outcome(NamedTuple):
    """How a rank has left a step, as it tells its peers with `finish`. See [Note: Broken steps]."""

    broken: bool = False  # an exception came out of something that sends to peers, or takes in
    scatters: int = 0  # reduce-scatters begun in the step
    calls: int = 0  # plain collectives begun so far; -1: one of them was broken off between two messages
    mixed: bool = False  # its backward added to gradients of earlier ones, and they are still there
    through: bool = False  # a backward of it came to its end

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
    absent: bool = False  # it has not even begun the step, and published nothing of it


class Transfer(ABC):
    """A pull under way."""

    data: torch.Tensor | None = None  # the bytes, of a pull in place that had not to be waited for

    arrival: Word | None = None  # stream-ordered transports: reached when the bytes are there, for kernels that wait themselves

    landed: Event | None = None  # stream-ordered transports: behind the copy; timed while somebody watches (probe.timing)

    @abstractmethod
    def done(self) -> bool:
        """True once `wait` would not block. Never blocks. Raises if the peer is lost."""

    @abstractmethod
    def wait(self, where: Where = NOWHERE) -> torch.Tensor:
        """The bytes (uint8, 1-D, contiguous), readable. Raises DeadlineError or PeerLostError."""


class Recovery(ABC):
    """What the ranks tell each other of steps that they left, and how they drop what such a step has left behind: see
    [Note: Broken steps]."""

    @abstractmethod
    def tell_broken(self, epoch: int, reason: str, *, final: bool = False, absent: bool = False) -> None:
        """An exception has broken this rank's step `epoch` off, or it is over here (reason ''): none of its messages follows.
        final: nothing ever follows. absent: the step is the next one, which has not begun here.

        Never blocks."""

    @abstractmethod
    def left(self, peer: int) -> Left | None:
        """What `peer` has told last about a step that it has left; None: it has told nothing."""

    @abstractmethod
    def check(self, peer: int, ready: Callable[[], bool], where: Where, doing: str) -> None:
        """Raise PeerLostError if what is not `ready` will not come: `peer` has said goodbye, or that it cannot go on."""

    @abstractmethod
    def discard(self, channel: int) -> None:
        """Drop the messages of a channel that are here, or come, and give their room back, until `recover`."""

    @abstractmethod
    def outcome_of(self, peer: int, epoch: int) -> Outcome | None:
        """How `peer` has ended step `epoch`, after `wait_finished(epoch)` until the next `finish`; None: it said goodbye."""

    @abstractmethod
    def all_sent(self, peer: int) -> bool:
        """All that `peer` had sent to this rank when it left its step is here."""

    @abstractmethod
    def recover(self, epoch: int, where: Where = NOWHERE) -> None:
        """Drop every message of all steps up to `epoch`, at both ends. Blocks until all ranks have. All have finished `epoch`.

        All places in all inboxes are free afterwards, whatever an exception has left in them."""

    @property
    @abstractmethod
    def held(self) -> int:
        """Messages of which a place is reserved, that are on their way, or not released, in the peers' inboxes and here."""


class Transport(ABC):
    """One rank's end. Not thread-safe towards its user: one thread calls it (I/O threads of its own are its own affair).

    Attributes:
        segments: this rank's published bytes by key, once exposed: uint8, 1-D, 64-byte aligned, writable until `publish`.
        message_limit: largest message in bytes.
        recovery: None: it cannot recover from broken steps.
        device: whose streams wait, see [Note: Stream-ordered transports]; None: it blocks the CPU.
    """

    name: ClassVar[str]
    in_place: ClassVar[bool] = False  # pulled slices are read where the owner published them: no window buffers are needed
    lockstep: ClassVar[bool] = False  # see [Note: Lockstep transports]
    device: Device | None = None
    recovery: Recovery | None = None
    hosts: Hosts | None = None  # the hierarchical order, where one transport serves a host and another one what is between
    footprint: Footprint | None = None  # what it takes, if `open_transport` has opened it

    def __init__(
        self, rank: int, world_size: int, *, message_limit: int, deadline_s: float, probe: Probe | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.message_limit = message_limit
        self.deadline_s = deadline_s
        self.probe = probe if probe is not None else Probe()
        self.sizes: Sequence[Sequence[int]] | None = None  # as exposed
        self.segments: Sequence[torch.Tensor] = ()
        self.membership = Membership(world_size)
        self.activity = 0  # messages taken in so far
        # What `reserve` or `receive` has given, as numbers: (message, dtype, shape) -> tensor.
        self.shaped: Callable[[torch.Tensor, torch.dtype, tuple[int, ...]], torch.Tensor] = shaped
        self.sleep_s = 1.0  # longest sleep of a wait: peers end it earlier
        self.layers: Sequence[str] = ()  # what the keys of gradients stand for, in errors
        # describe(owner, key, epoch, start, nbytes): what pulled bytes are, for errors of waits that block nobody.
        self.describe: Callable[[int, int, int, int, int], Where] = _where

    # ---- windows: published parameters -------------------------------------------------------------------------------
    @abstractmethod
    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        """Collective, once. `sizes[key][rank]` = bytes that `rank` publishes under `key` (0 is allowed: a short shard).

        Raises TransportError when the memory cannot be had (how much was asked for, how much there is, the fix).
        """

    @abstractmethod
    def publish(self, keys: Sequence[int], epoch: int, *, last: bool = False) -> None:
        """Make the segments' bytes readable to all peers as version `epoch` (> 0, rising by one).

        last: of all that this rank publishes in `epoch`; all ranks say so, or none. Waits may then be for all keys of an owner
        at once."""

    @abstractmethod
    def pull(self, epoch: int, requests: Sequence[PullRequest]) -> Sequence[Transfer]:
        """Start to fetch slices of `epoch`, in the order of the requests; never blocks.

        May be called before an owner has published `epoch`: the transfer then completes after it has.
        """

    @abstractmethod
    def finish(self, epoch: int, outcome: Outcome = WHOLE) -> None:
        """Tell all peers that this rank reads nothing of `epoch` any more (call once, all pulls waited for). Never blocks.

        outcome: how the step ended here; transports without `recovery` keep it to themselves.
        """

    @abstractmethod
    def wait_finished(self, epoch: int, where: Where = NOWHERE, *, meanwhile: Callable[[], object] | None = None) -> None:
        """Block until every peer has finished `epoch`: own segments may be rewritten. At once for epoch <= 0.

        meanwhile: called again and again while it blocks; streams do not need it."""

    # ---- messages: gradients and collectives -------------------------------------------------------------------------
    @abstractmethod
    def reserve(self, dsts: Sequence[int], sizes: Sequence[int], room: int = 0) -> list[torch.Tensor]:
        """Writable uint8 buffers (64-byte aligned), one for a message of so many bytes to each of `dsts`; fewer, in their
        order, if there is no credit just now for the next. Never blocks.

        For shm they lie in the owners' inboxes, so that what is computed into them needs no further copy.
        room: as in `Sending`, for each of them; 0: the largest. Raises ValueError for more than message_limit.
        """

    @abstractmethod
    def send(self, sendings: Sequence[Sending], *, more: bool = False) -> None:
        """Hand over buffers got from `reserve`, in this order. Never blocks.

        more: other notices to the same peers follow, or a `progress`; this one may travel with them."""

    def expect(self, srcs: Sequence[int], tag: Tag, nbytes: int, room: int = 0) -> None:  # noqa: B027
        """Announce a message of nbytes from each of `srcs`: stream-ordered transports find it by that, others need no notice.

        room: as in `Sending`."""

    @abstractmethod
    def receive(self, srcs: Sequence[int], tag: Tag, where: Where = NOWHERE, *, wait: bool = True) -> list[torch.Tensor]:
        """The bytes (uint8, read only, until `release`) of the messages of one tag from several ranks.

        wait False: [] unless all of them are here; never blocks. Raises PeerLostError for one that will not come."""

    @abstractmethod
    def release(self, srcs: Sequence[int], tag: Tag, *, more: bool = False) -> None:
        """Give the slots of messages back to their senders (credit). more: as in `send`."""

    # ---- progress and end --------------------------------------------------------------------------------------------
    @abstractmethod
    def progress(self, timeout_s: float = 0.0) -> None:
        """Send what was held back for company (`more`), and take in what peers have sent; block at most timeout_s, less when
        something happens. Raises PeerLostError."""

    @abstractmethod
    def close(self, reason: str = "") -> None:
        """Say goodbye to the peers and free everything. Safe to call twice, and after an error.

        reason: this rank has failed; the peers' waits then end at once, with a PeerLostError that says why."""


def _where(owner: int, key: int, epoch: int, start: int, nbytes: int) -> Where:
    return Where(f"(window {key})", epoch, f"bytes {start} to {start + nbytes}", nbytes)


PARAM_LANE, GRAD_LANE, CONTROL_LANE = 0, 1, 2  # communicators of their own; control: small CPU tensors only
