"""The memory of a window on a host: one block that is never larger than the budget, cut as slices come.

Buffers kept by exact size would add up to the budget once for every size that a model has. Slices come and go nearly in the
order of their use, so first fit in one block wastes little, and nothing is allocated after the first steps.

What is held beside the budget (parameters that the user keeps gathered after forward) gets a second block from the next step
on, as large as that was in the last one.
"""

from __future__ import annotations

from bisect import bisect_left

import torch

from commfuse_dp.device.base import Event
from commfuse_dp.transport.one_sided.ring import align
from commfuse_dp.transport.views import Views


class _Block:
    """Memory with free stretches, first fit."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.data = _allocate(nbytes)
        self.touched = 0  # end of what was ever handed out
        self.free = [(0, nbytes)] if nbytes else []  # (start, end), ascending, never touching each other

    def find(self, nbytes: int) -> int:
        """Index of the first free stretch that is large enough, or -1."""
        return next((index for index, (start, end) in enumerate(self.free) if end - start >= nbytes), -1)

    def cut(self, index: int, nbytes: int) -> tuple[int, int]:
        start, end = self.free[index]
        stop = min(start + align(nbytes), end)
        if stop == end:
            del self.free[index]
        else:
            self.free[index] = (stop, end)
        self.touched = max(self.touched, stop)
        return start, stop

    def give(self, start: int, end: int) -> None:
        free = self.free
        index = bisect_left(free, (start, end))
        if index < len(free) and free[index][0] == end:
            end = free.pop(index)[1]
        if index and free[index - 1][1] == start:
            index -= 1
            start = free.pop(index)[0]
        free.insert(index, (start, end))

    def clear(self) -> None:
        self.free = [(0, self.nbytes)] if self.nbytes else []


class Arena:
    """uint8 buffers out of `budget` bytes. Not thread-safe.

    Attributes:
        held: bytes of memory that have been handed out and were not given back to the allocator since.
        allocations: made so far.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.allocations = 0
        self._size = budget
        self._blocks = blocks = list[_Block]()
        self._views = Views(lambda number, *span: blocks[number].data.narrow(0, *span))
        self._taken: dict[int, tuple[_Block | None, int, int]] = {}  # address -> block, start, end; None: alone, for bytes
        self._alone = self._most_alone = 0  # bytes in use that fitted into no block; their peak in this step
        self._most_beside = 0  # most that was asked for beside the budget in this step

    @property
    def held(self) -> int:
        return sum(block.touched for block in self._blocks) + self._alone

    def reserve(self, nbytes: int) -> None:
        """No more than so many bytes will ever be in use: a small model needs less than the budget. Before the first `take`."""
        self._size = min(self.budget, nbytes)

    def fits(self, nbytes: int, beside: int) -> bool:
        """Whether `take_later` would stay inside the budget, of which `beside` bytes in use are not counted."""
        self._most_beside = max(self._most_beside, beside)
        return any(block.find(nbytes) >= 0 for block in self._all()) or self._outside() + nbytes <= beside

    def take_later(self, nbytes: int) -> tuple[torch.Tensor, Event | None]:
        """As BufferPool.take_later; on a host there is nothing to wait for."""
        for number, block in enumerate(self._all() if nbytes else ()):
            index = block.find(nbytes)
            if index >= 0:
                start, end = block.cut(index, nbytes)
                buffer = self._views[number, start, nbytes]
                self._taken[buffer.data_ptr()] = (block, start, end)
                return buffer, None
        buffer = _allocate(nbytes)
        if nbytes:
            self.allocations += 1
            self._taken[buffer.data_ptr()] = (None, 0, nbytes)
            self._alone += nbytes
            self._most_alone = max(self._most_alone, self._alone)
        return buffer, None

    def give(self, buffer: torch.Tensor, mark: Event | None = None) -> None:
        """A buffer from `take_later` that nobody reads or writes any more."""
        block, start, end = self._taken.pop(buffer.data_ptr(), (None, 0, 0))
        if block is not None:
            block.give(start, end)
        else:
            self._alone -= end - start

    def mark(self) -> Event | None:
        return None

    def settle(self) -> None:
        """At the start of a step, with nothing in use: the second block gets the size that the last step needed."""
        size = self._blocks[1].nbytes if len(self._blocks) > 1 else 0
        wanted = min(self._most_beside, size + self._most_alone)
        if wanted != size and not self._taken:
            self._views.clear()
            del self._blocks[1:]
            if wanted:
                self._blocks.append(_Block(wanted))
                self.allocations += 1
        self._most_beside = self._most_alone = 0

    def forget_taken(self) -> None:
        """Nothing that was taken is in use: an exception may have lost some of it."""
        self._taken.clear()
        self._alone = 0
        for block in self._blocks:
            block.clear()

    def clear(self) -> None:
        """Let go of all memory."""
        self.forget_taken()
        self._blocks.clear()
        self._views.clear()

    # ---- inside ------------------------------------------------------------------------------------------------------
    def _all(self) -> list[_Block]:
        if not self._blocks:
            self._blocks.append(_Block(self._size))
            self.allocations += 1
        return self._blocks

    def _outside(self) -> int:
        """Bytes of memory besides the first block."""
        return sum(block.nbytes for block in self._blocks[1:]) + self._alone


def _allocate(nbytes: int) -> torch.Tensor:
    with torch.inference_mode(False):  # else memory from an evaluation could not be written to in training
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
