"""The stream of parameter slices: what is fetched ahead of compute, what is kept, what is given back.

The order in which slices are used is recorded in the first step. From then on the window walks ahead of the compute along
that recording and pulls slices as long as they fit in `prefetch_bytes`:

    recorded   ... L6 L7 L8 | L8 L7 L6 ...            forward | backward
    compute         ^cursor
    window          [L6 L7 L8  L8 L7]                  L8 and L7 are wanted twice: fetched once, kept over the turn
                                     ^ahead

A slice already in the window that the walk meets again costs nothing more, so slices near the turn from forward to backward
are not fetched a second time; that saves up to one window of bytes a step against the textbook minimum of two all-gathers.

What is pinned (parameters that the user keeps gathered after forward, a recomputation's) is held beside the budget: it would
otherwise fill the window, and everything after it would be fetched only when it is needed.

[Note: Slices that come together]
On a device, what moves in a pull of its own costs host time and calls of the driver. There slices of one unit that are small
come together (`group`): one entry here, one buffer, one batch of copies, one word of arrival, however many ranks there are.

[Note: Same walk on all ranks]
The walk moves only at `take` and `done`, by rules that depend on nothing but the sequence of layers and the sizes. Ranks
that run the same program therefore pull in the same order, which two-sided transports rely on. Arrival times play no part.

On a lockstep transport a pull is half of a step that all ranks take together, so they must also take equally many. Uneven
shards would make them differ: what fits into the budget here need not fit there. So there every rank accounts a slice with the
largest size that it has on any owner (`Mirror.weight`), and walks also over slices that an owner does not have: then keys
(unit, owner, slice) differ from rank to rank only by a shift of the owner, and all else that the walk depends on is equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from commfuse_dp.device.base import Event
from commfuse_dp.engine.memory.arena import Arena
from commfuse_dp.engine.memory.buffers import BufferPool
from commfuse_dp.errors import Where
from commfuse_dp.probe import Probe
from commfuse_dp.transport.base import Part, PullRequest, Transfer, Transport

Key = tuple[int, int, int]  # unit, owner, index of the slice, or of the first that come together


GROUP_BYTES = 4 << 20  # slices come together up to so many bytes: below, time is in calls, not in bytes
MOST_GROUPS = 4  # of a unit, as far as a third of the window holds one: larger units come in more


class Mirror(NamedTuple):
    """What a lockstep transport's pull of a slice also is."""

    weight: int  # bytes that all ranks account for it
    give: tuple[int, int]  # start and bytes of the slice of the own segment that a peer gets meanwhile


class Located(NamedTuple):
    """What comes under a key: a slice of its owner, and perhaps those of others with it."""

    offset: int  # in the owner's segment
    nbytes: int  # of the slice
    total: int  # of the buffer
    others: tuple[Part, ...] = ()


def group(sizes: Sequence[int], budget: int) -> list[int]:
    """How many slices, of these bytes in their order of use, come together each time. budget: of the window."""
    total = sum(sizes)
    limit = min(max(GROUP_BYTES, -(-total // MOST_GROUPS)), budget // 3)
    found: list[int] = []
    room = 0
    for size in sizes:
        if found and size <= room:
            found[-1] += 1
            room -= size
        else:
            found.append(1)
            room = limit - size
    return found


class Held:
    """A slice in the window, or on its way there."""

    __slots__ = ("buffer", "nbytes", "pins", "refs", "taken", "transfer")

    def __init__(self, buffer: torch.Tensor, nbytes: int) -> None:
        self.nbytes = nbytes  # as accounted
        self.transfer: Transfer  # missing until the pull, between which and here only an exception can come
        self.buffer: torch.Tensor | None = buffer
        self.refs = 1
        self.pins = 0  # refs that hold it for a backward, beyond the budget
        self.taken = False  # somebody has waited for it: its buffer is not written to any more


class Window:
    """Remote parameter slices of one epoch, by key. All methods are called by the compute thread."""

    def __init__(
        self,
        transport: Transport,
        pool: BufferPool | Arena,
        budget: int,
        probe: Probe,
        locate: Callable[[Key], Located],
        mirror: Callable[[Key], Mirror] | None = None,
    ) -> None:
        self._transport = transport
        self._pool = pool
        self._budget = budget
        self._probe = probe
        self._locate = locate
        self._located: dict[Key, Located] = {}  # asked for once
        self._mirror = mirror  # on a lockstep transport
        self._entries: dict[Key, Held] = {}
        self._pins: dict[int, list[Key]] = defaultdict(list)  # unit -> slices held for its backward
        self._sequence: list[Key] = []
        self._positions: dict[Key, list[int]] = {}
        self._cursor = 0  # next position of the recording to be used
        self._ahead = 0  # next position to be fetched
        self._record: list[Key] = []
        self._epoch = 0
        self.used = 0
        self._pinned = 0  # bytes of `used` that are held because the caller asked for it: they leave the budget free

    # ---- epochs ------------------------------------------------------------------------------------------------------
    def start(self, epoch: int, sequence: list[Key]) -> None:
        """Begin to fetch for `epoch` along a recording (empty: unknown order)."""
        self._epoch = epoch
        self._sequence = sequence
        self._cursor = self._ahead = 0
        self._record = []
        positions: dict[Key, list[int]] = defaultdict(list)
        for position in range(len(sequence) - 1, -1, -1):
            positions[sequence[position]].append(position)  # descending: the next use is at the end
        self._positions = positions
        self._fill()

    def stop(self, where: Where) -> list[Key]:
        """Let everything go (transfers under way are waited for: they write into the buffers). Returns the recording."""
        for entry in self._entries.values():
            transfer = getattr(entry, "transfer", None)
            if transfer is not None:  # else an exception has come before it was pulled
                transfer.wait(where)
            self._free(entry)
        self._entries.clear()
        self._pins.clear()
        self._pinned = 0
        return self._record

    # ---- use ---------------------------------------------------------------------------------------------------------
    def announce(self, keys: list[Key]) -> None:
        """The caller is about to take these keys: fetch what the recording did not foresee, as far as there is room."""
        pulls: list[tuple[Key, Held, PullRequest]] = []
        for key in keys:
            if key not in self._entries and not self._foreseen(key):
                if self.used > self._pinned and not self._fits(key):
                    break
                self._plan(key, pulls).refs = 0  # held for the `take` that follows
        self._pull(pulls)

    def take(self, key: Key) -> Transfer:
        """The transfer of a slice, perhaps still under way: to be waited for. Each `take` is followed by one `done`."""
        return self.take_held(key).transfer

    def take_held(self, key: Key) -> Held:
        """`take`, with the buffer that the slice comes to."""
        self._record.append(key)
        entry = self._entries.get(key)
        if self._foreseen(key):
            position = self._positions[key].pop()
            self._skip_to(position)
            self._cursor = position + 1
            if position >= self._ahead:  # not fetched yet: the window is full, or the order jumped ahead
                self._ahead = position + 1
                if entry is None:
                    entry = self._pull_one(key)
                else:
                    entry.refs += 1
            else:
                entry = self._entries[key]
        else:
            if self._sequence:
                self._probe.counters.order_misses += 1
            if entry is None:
                entry = self._pull_one(key)
            else:
                entry.refs += 1
        entry.taken = True
        return entry

    def done(self, key: Key, *, pin: bool = False) -> None:
        """Compute has read the slice. `pin`: keep it for the unit's backward, whatever the window says."""
        self.done_all((key,), pin=pin)

    def done_all(self, keys: Sequence[Key], *, pin: bool = False) -> None:
        """`done` for slices that were read together."""
        if pin:
            for key in keys:
                self._pins[key[0]].append(key)
                entry = self._entries[key]
                if not entry.pins:
                    self._pinned += entry.nbytes
                entry.pins += 1
        else:
            mark = self._pool.mark()
            for key in keys:
                self._drop(key, mark)
        self._fill()

    def unpin(self, unit: int) -> None:
        """The unit's backward is over (or will not come)."""
        pins = self._pins.pop(unit, ())
        mark = self._pool.mark() if pins else None
        for key in pins:
            entry = self._entries[key]
            entry.pins -= 1
            if not entry.pins:
                self._pinned -= entry.nbytes
            self._drop(key, mark)

    def holds(self, keys: list[Key]) -> bool:
        """All of them are here, or on their way."""
        for key in keys:  # noqa: SIM110  (the generator would be a frame for each)
            if key not in self._entries:
                return False
        return True

    # ---- inside ------------------------------------------------------------------------------------------------------
    def _foreseen(self, key: Key) -> bool:
        uses = self._positions.get(key)
        while uses and uses[-1] < self._cursor:
            uses.pop()
        return bool(uses)

    def _skip_to(self, position: int) -> None:
        """Uses between the cursor and `position` did not come this time: give up what was fetched for them."""
        if position == self._cursor:
            return
        self._probe.counters.order_misses += 1
        for skipped in range(self._cursor, min(position, self._ahead)):
            self._drop(self._sequence[skipped])

    def _drop(self, key: Key, mark: Event | None = None) -> None:
        """mark: behind the last that reads the slice; None: behind what the current stream has been given so far."""
        entry = self._entries[key]
        entry.refs -= 1
        if entry.refs <= 0:
            if not entry.taken:  # it was skipped, but is still being written
                entry.transfer.wait(Where(f"unit {key[0]}", self._epoch, f"{key[1]}.{key[2]}"))
                mark = None
            del self._entries[key]
            self._free(entry, mark)

    def _free(self, entry: Held, mark: Event | None = None) -> None:
        if entry.buffer is not None:
            self.used -= entry.nbytes
            self._probe.counters.window_bytes = self.used
            self._pool.give(entry.buffer, mark)
            entry.buffer = None

    def _fits(self, key: Key) -> bool:
        located = self._located.get(key)
        if located is None:
            located = self._located[key] = self._locate(key)
        nbytes = self._mirror(key).weight if self._mirror is not None else located.total
        return self.used - self._pinned + nbytes <= self._budget and self._pool.fits(nbytes, self._pinned)

    def _fill(self) -> None:
        sequence, entries = self._sequence, self._entries
        pulls: list[tuple[Key, Held, PullRequest]] = []
        while self._ahead < len(sequence):
            key = sequence[self._ahead]
            entry = entries.get(key)
            if entry is not None:
                entry.refs += 1
            elif self._fits(key):
                self._plan(key, pulls)
            else:
                break
            self._ahead += 1
        self._pull(pulls)

    def _plan(self, key: Key, pulls: list[tuple[Key, Held, PullRequest]]) -> Held:
        """Make room for a slice that is going to be pulled, by `_pull`, before anything else is done here."""
        unit, owner, _ = key
        located = self._located.get(key)
        if located is None:
            located = self._located[key] = self._locate(key)
        offset, nbytes, total, others = located
        buffer, free = self._pool.take_later(total)
        weight, give = self._mirror(key) if self._mirror is not None else (total, (0, 0))
        entry = self._entries[key] = Held(buffer, weight)
        pulls.append((key, entry, PullRequest(owner, unit, offset, nbytes, buffer, free, give, others)))
        self.used += weight
        return entry

    def _pull(self, pulls: list[tuple[Key, Held, PullRequest]]) -> None:
        if not pulls:
            return
        try:
            transfers = self._transport.pull(self._epoch, [request for _, _, request in pulls])
        except BaseException:
            for key, entry, _ in pulls:  # a broken transport: nothing of it is to be waited for
                del self._entries[key]
                self.used -= entry.nbytes
            raise
        for (_, entry, _), transfer in zip(pulls, transfers, strict=True):
            entry.transfer = transfer
        counters = self._probe.counters
        counters.window_bytes = self.used
        if self._pool.held > counters.window_bytes_peak:
            counters.window_bytes_peak = self._pool.held

    def _pull_one(self, key: Key) -> Held:
        pulls: list[tuple[Key, Held, PullRequest]] = []
        entry = self._plan(key, pulls)
        self._pull(pulls)
        return entry
