"""How a unit's partial gradients reach their owners, where they do not go straight there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from commfuse_dp.device.base import Word
from commfuse_dp.engine.plan import UnitSlice


class Route(ABC):
    """One unit's reduce-scatter, on this rank. Nothing in it blocks; the gradient stream calls `advance` whenever it can."""

    @abstractmethod
    def reserve(self, item: UnitSlice, own: torch.Tensor) -> torch.Tensor:
        """Bytes for the own partial of `item`. own: the bytes for it if this rank is its owner."""

    @abstractmethod
    def produced(self, item: UnitSlice, buffer: torch.Tensor, when: Word | None = None) -> None:
        """The partial of `item` has been computed into the buffer that `reserve` gave; on a device perhaps: will have been,
        once the word `when` is reached."""

    @abstractmethod
    def advance(self) -> bool:
        """Add what has arrived, send what there is room for. Never blocks. True if anything was done."""

    @property
    def holds_up(self) -> bool:
        """Routes of later units must not advance yet."""
        return False

    def flush(self) -> None:
        """Nothing more is coming: what was kept back for the sake of later units may be done."""
        return

    @property
    @abstractmethod
    def done(self) -> bool:
        """Nothing is left for this rank to do."""

    @abstractmethod
    def missing(self) -> tuple[UnitSlice, int, str] | None:
        """What this rank's part waits for, computed as it is: (slice, peer, what the peer is to do)."""

    def late(self) -> list[tuple[UnitSlice, int, str]]:
        """All that could be `missing`."""
        missing = self.missing()
        return [missing] if missing is not None else []

    @abstractmethod
    def uncomputed(self) -> Iterator[UnitSlice]:
        """Slices whose own partial has not been computed."""

    @abstractmethod
    def total(self, own: torch.Tensor) -> torch.Tensor:
        """The sum of what this rank owns, flat; once, when `done`. own: the bytes that `reserve` was given parts of."""
