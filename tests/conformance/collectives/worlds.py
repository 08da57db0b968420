"""Worlds of thread ranks for the collectives, with everything that moves counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commfuse_dp.transport.base import Sending
from tests.support.inproc import Faults, InprocWorld
from tests.support.threads import run_ranks


@dataclass
class Moved:
    """Messages and bytes that one rank has sent on the collectives' channel."""

    messages: int = 0
    bytes: int = 0


def in_world(
    n: int,
    body: Callable[[int, Any], Any],
    *,
    inbox_bytes: int = 1 << 16,
    faults: Faults | None = None,
    deadline_s: float = 20.0,
) -> tuple[list[Any], list[Moved]]:
    """body(rank, transport) in a thread per rank: (results, what was sent), both in rank order."""
    world = InprocWorld(n, inbox_bytes=inbox_bytes, deadline_s=deadline_s, faults=faults)
    moved = [Moved() for _ in range(n)]

    def main(rank: int, exchange: Callable[[Any], list[Any]]) -> Any:
        transport = world.transport(rank)
        hand_over = transport.send

        def send(sendings: Sequence[Sending]) -> None:
            moved[rank].messages += len(sendings)
            moved[rank].bytes += sum(sending.buffer.numel() for sending in sendings)
            hand_over(sendings)

        transport.send = send  # type: ignore[method-assign]
        try:
            result = body(rank, transport)
            exchange(None)  # nobody leaves before all are done: an early goodbye is another test
            assert not transport._inbox, "messages were left in the inbox"
            return result
        finally:
            transport.close()

    return run_ranks(n, main, timeout_s=60.0), moved


def left_fold(partials: list[torch.Tensor], wide: torch.dtype, divisor: float | None, out: torch.dtype) -> torch.Tensor:
    """The definition of a sum in the given order."""
    total = partials[0].to(wide)
    for partial in partials[1:]:
        total = total + partial.to(wide)
    return (total if divisor is None else total / divisor).to(out)


def rows(count: int, *shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Seeded normal numbers of very different sizes, so that another order of summation shows in the bits."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    scale = 10.0 ** torch.randint(-3, 4, (count, *shape), generator=generator).double()
    return (values * scale).to(dtype)
