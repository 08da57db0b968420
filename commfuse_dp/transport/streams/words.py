"""Transports whose messages are told by words, which who uses them may wait for, or write, in its own time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from commfuse_dp.device.base import WordLike
from commfuse_dp.errors import Where
from commfuse_dp.transport.base import NOWHERE, Tag, Transport


class WordTransport(Transport):
    """A stream-ordered transport, not in lockstep.

    Attributes:
        kernels_may_wait: for words, inside themselves; False: the stream waits before the kernel."""

    kernels_may_wait: bool

    @abstractmethod
    def arriving(self, srcs: Sequence[int], tag: Tag, where: Where = NOWHERE) -> tuple[list[torch.Tensor], list[WordLike]]:
        """As `receive`, but the current stream does not wait: what is enqueued in it reads a message behind its word, which
        must then *equal* the value. One word for each of `srcs`.

        They are released by one call with the same `srcs`, from the same stream. Until then the watchdog counts the time of a
        wait there."""

    @abstractmethod
    def own_words(self, count: int) -> torch.Tensor:
        """int32 words of this rank's memory, for `Sending.when`; always the same for one count and current stream, as work of
        another stream must not speak for this one's. Zero at first."""
