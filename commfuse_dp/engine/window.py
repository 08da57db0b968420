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

[Note: Same walk on all ranks]
The walk moves only at `take` and `done`, by rules that depend on nothing but the sequence of layers and the sizes. Ranks
that run the same program therefore pull in the same order, which two-sided transports rely on. Arrival times play no part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch

from commfuse_dp.engine.buffers import BufferPool
from commfuse_dp.errors import Where
from commfuse_dp.probe import Probe
from commfuse_dp.transport.base import Transfer, Transport

Key = tuple[int, int, int]  # unit, owner, index of the slice


class _Entry:
    __slots__ = ("buffer", "nbytes", "pins", "refs", "transfer")

    def __init__(self, transfer: Transfer, buffer: torch.Tensor | None) -> None:
        self.nbytes = buffer.numel() if buffer is not None else 0
        self.transfer = transfer
        self.buffer = buffer
        self.refs = 1
        self.pins = 0  # refs that hold it for a backward, beyond the budget


class Window:
    """Remote parameter slices of one epoch, by key. All methods are called by the compute thread."""

    def __init__(
        self, transport: Transport, pool: BufferPool, budget: int, probe: Probe, locate: Callable[[Key], tuple[int, int]]
    ) -> None:
        self._transport = transport
        self._pool = pool
        self._budget = budget
        self._probe = probe
        self._locate = locate  # key -> (offset in the owner's segment, bytes)
        self._entries: dict[Key, _Entry] = {}
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
            entry.transfer.wait(where)
            self._free(entry)
        self._entries.clear()
        self._pins.clear()
        self._pinned = 0
        return self._record

    # ---- use ---------------------------------------------------------------------------------------------------------
    def announce(self, keys: list[Key]) -> None:
        """The caller is about to take these keys: fetch what the recording did not foresee, as far as there is room."""
        for key in keys:
            if key not in self._entries and not self._foreseen(key):
                if self.used > self._pinned and not self._fits(key):
                    return
                self._pull(key).refs = 0  # held for the `take` that follows

    def take(self, key: Key) -> Transfer:
        """The transfer of a slice, perhaps still under way. Each `take` is followed by one `done`."""
        self._record.append(key)
        entry = self._entries.get(key)
        if self._foreseen(key):
            position = self._positions[key].pop()
            self._skip_to(position)
            self._cursor = position + 1
            if position >= self._ahead:  # not fetched yet: the window is full, or the order jumped ahead
                self._ahead = position + 1
                if entry is None:
                    entry = self._pull(key)
                else:
                    entry.refs += 1
            else:
                entry = self._entries[key]
        else:
            if self._sequence:
                self._probe.counters.order_misses += 1
            if entry is None:
                entry = self._pull(key)
            else:
                entry.refs += 1
        return entry.transfer

    def done(self, key: Key, *, pin: bool = False) -> None:
        """Compute has read the slice. `pin`: keep it for the unit's backward, whatever the window says."""
        if pin:
            self._pins[key[0]].append(key)
            entry = self._entries[key]
            if not entry.pins:
                self._pinned += entry.nbytes
            entry.pins += 1
        else:
            self._drop(key)
        self._fill()

    def unpin(self, unit: int) -> None:
        """The unit's backward is over (or will not come)."""
        for key in self._pins.pop(unit, ()):
            entry = self._entries[key]
            entry.pins -= 1
            if not entry.pins:
                self._pinned -= entry.nbytes
            self._drop(key)

    def holds(self, keys: list[Key]) -> bool:
        """All of them are here, or on their way."""
        return all(key in self._entries for key in keys)

    def buffer(self, key: Key) -> torch.Tensor:
        """Where the slice arrives."""
        buffer = self._entries[key].buffer
        assert buffer is not None
        return buffer

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

    def _drop(self, key: Key) -> None:
        entry = self._entries[key]
        entry.refs -= 1
        if entry.refs <= 0:
            entry.transfer.wait(Where(f"unit {key[0]}", self._epoch, f"{key[1]}.{key[2]}"))  # no-op unless it was skipped
            del self._entries[key]
            self._free(entry)

    def _free(self, entry: _Entry) -> None:
        if entry.buffer is not None:
            self.used -= entry.buffer.numel()
            self._probe.counters.window_bytes = self.used
            self._pool.give(entry.buffer)
            entry.buffer = None

    def _fits(self, key: Key) -> bool:
        return self.used - self._pinned + self._locate(key)[1] <= self._budget

    def _fill(self) -> None:
        sequence = self._sequence
        while self._ahead < len(sequence):
            key = sequence[self._ahead]
            entry = self._entries.get(key)
            if entry is not None:
                entry.refs += 1
            elif self._fits(key):
                self._pull(key)
            else:
                return
            self._ahead += 1

    def _pull(self, key: Key) -> _Entry:
        unit, owner, _ = key
        offset, nbytes = self._locate(key)
        buffer, free = self._pool.take_later(nbytes)
        transfer = self._transport.pull(owner, unit, self._epoch, start=offset, nbytes=nbytes, out=buffer, after=free)
        entry = self._entries[key] = _Entry(transfer, buffer)
        self.used += nbytes
        counters = self._probe.counters
        counters.window_bytes = self.used
        if self.used > counters.window_bytes_peak:
            counters.window_bytes_peak = self.used
        return entry
