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

[Note: Entries come again]
A key has one `Held` for good: where its slice lies, what is accounted and what is given for it cannot change. Only what is in
`_entries` is here. Between two visits it keeps neither buffer nor transfer (which knows the buffer): the pool may have let go
of that memory, and who held it would keep it beyond the budget. So whoever takes a `Held` is done with it at `done`.

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
    """A slice in the window, or on its way there. See [Note: Entries come again]."""

    __slots__ = ("buffer", "key", "located", "mirror", "nbytes", "pins", "refs", "taken", "transfer")

    def __init__(self, key: Key, located: Located, mirror: Mirror) -> None:
        self.key, self.located, self.mirror = key, located, mirror
        self.nbytes = mirror.weight  # as accounted
        self.transfer: Transfer  # missing until the pull, between which and here only an exception can come
        self.buffer: torch.Tensor | None = None
        self.refs = 0
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
        self._fits = pool.fits if isinstance(pool, Arena) else None  # in a pool of buffers anything does
        self._budget = budget
        self._probe = probe
        self._locate = locate
        self._mirror = mirror  # on a lockstep transport
        self._known: dict[Key, Held] = {}
        self._entries: dict[Key, Held] = {}  # those that are here, or on their way
        self.pins: dict[int, list[Key]] = defaultdict(list)  # unit -> slices held for its backward
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
            entry.taken, entry.refs = True, 1
        self._drop(list(self._entries))
        self.pins.clear()
        self._pinned = 0
        return self._record

    # ---- use ---------------------------------------------------------------------------------------------------------
    def announce(self, keys: list[Key]) -> None:
        """The caller is about to take these keys: fetch what the recording did not foresee, as far as there is room."""
        pulls: list[tuple[Held, PullRequest]] = []
        for key in keys:
            if key not in self._entries and not self._foreseen(key):
                entry = self._plan(key, pulls, within=self.used > self._pinned)
                if entry is None:
                    break
                entry.refs = 0  # held for the `take` that follows
        if pulls:
            self._pull(pulls)

    def take(self, key: Key) -> Transfer:
        """The transfer of a slice, perhaps still under way: to be waited for. Each `take` is followed by one `done`."""
        return self._take(key).transfer

    def take_all(self, keys: list[Key]) -> list[Held] | None:
        """`take` for several, with the buffers that the slices come to. None, and nothing is taken: they do not fit into the
        window together."""
        entries, found = self._entries, []
        for key in keys:
            if key not in entries:
                self.announce(keys)
                if any(key not in entries for key in keys):
                    return None
                break
        for key in keys:
            cursor = self._cursor
            if cursor < self._ahead and self._sequence[cursor] == key:  # as recorded: what `_take` comes to, without its search
                self._record.append(key)
                self._cursor = cursor + 1
                entry = entries[key]
                entry.taken = True
            else:
                entry = self._take(key)
            found.append(entry)
        return found

    def _take(self, key: Key) -> Held:
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
                self.pins[key[0]].append(key)
                entry = self._entries[key]
                if not entry.pins:
                    self._pinned += entry.nbytes
                entry.pins += 1
        else:
            self._drop(keys, self._pool.mark())
        self._fill()

    def unpin(self, unit: int) -> None:
        """The unit's backward is over (or will not come)."""
        pins = self.pins.pop(unit, None)
        if not pins:
            return
        for key in pins:
            entry = self._entries[key]
            entry.pins -= 1
            if not entry.pins:
                self._pinned -= entry.nbytes
        self._drop(pins, self._pool.mark())

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
        self._drop(self._sequence[self._cursor : min(position, self._ahead)])

    def _drop(self, keys: Sequence[Key], mark: Event | None = None) -> None:
        """mark: behind the last that reads these slices; None: behind what the current stream has been given so far."""
        for key in keys:
            entry = self._entries[key]
            entry.refs -= 1
            if entry.refs > 0:
                continue
            behind = mark
            if not entry.taken:  # it was skipped, but is still being written
                entry.transfer.wait(Where(f"unit {key[0]}", self._epoch, f"{key[1]}.{key[2]}"))
                behind = None
            del self._entries[key]
            buffer, entry.buffer = entry.buffer, None
            if hasattr(entry, "transfer"):
                del entry.transfer  # it knows the buffer, which the pool may let go
            self.used -= entry.nbytes
            self._probe.counters.window_bytes = self.used
            assert buffer is not None
            self._pool.give(buffer, behind)

    def _fill(self) -> None:
        sequence, entries = self._sequence, self._entries
        pulls: list[tuple[Held, PullRequest]] = []
        while self._ahead < len(sequence):
            key = sequence[self._ahead]
            entry = entries.get(key)
            if entry is not None:
                entry.refs += 1
            elif self._plan(key, pulls, within=True) is None:
                break
            self._ahead += 1
        if pulls:
            self._pull(pulls)

    def _plan(self, key: Key, pulls: list[tuple[Held, PullRequest]], *, within: bool) -> Held | None:
        """Make room for a slice that is going to be pulled, by `_pull`, before anything else is done here. within: None, and
        nothing is done, if it would not stay inside the budget."""
        entry = self._known.get(key)
        if entry is None:
            located = self._locate(key)
            mirror = self._mirror(key) if self._mirror is not None else Mirror(located.total, (0, 0))
            entry = self._known[key] = Held(key, located, mirror)
        weight = entry.nbytes
        if within and self.used - self._pinned + weight > self._budget:
            return None
        if within and self._fits is not None and not self._fits(weight, self._pinned):
            return None
        offset, nbytes, total, others = entry.located
        buffer, free = self._pool.take_later(total)
        entry.buffer, entry.refs, entry.pins, entry.taken = buffer, 1, 0, False
        request = key[1], key[0], offset, nbytes, buffer, free, entry.mirror.give, others
        pulls.append((entry, tuple.__new__(PullRequest, request)))  # without a frame for each
        self.used += weight  # first: what an exception leaves here is freed by `stop`, which takes it off
        self._entries[key] = entry
        return entry

    def _pull(self, pulls: list[tuple[Held, PullRequest]]) -> None:
        requests = []
        for _, request in pulls:
            requests.append(request)
        try:
            transfers = self._transport.pull(self._epoch, requests)
        except BaseException:
            for entry, _ in pulls:  # a broken transport: nothing of it is to be waited for
                del self._entries[entry.key]
                self.used -= entry.nbytes
            raise
        for (entry, _), transfer in zip(pulls, transfers, strict=True):
            entry.transfer = transfer
        counters = self._probe.counters
        counters.window_bytes = self.used
        if self._pool.held > counters.window_bytes_peak:
            counters.window_bytes_peak = self._pool.held

    def _pull_one(self, key: Key) -> Held:
        pulls: list[tuple[Held, PullRequest]] = []
        entry = self._plan(key, pulls, within=False)
        assert entry is not None
        self._pull(pulls)
        return entry
