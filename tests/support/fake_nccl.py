"""The lockstep transport over simulated exchanges, with ranks as threads."""

from __future__ import annotations

from collections.abc import Callable

from commfuse_dp.transport.closing import forget
from commfuse_dp.transport.grouped.transport import NcclTransport
from commfuse_dp.transport.grouped.watch import Ballot
from tests.support.fake_grouped import FakeBoard, FakeGroupedExchange
from tests.support.threads import ExchangeFn


class FakeBallot(Ballot):
    """`box`: one for all ranks, the rows of each turn."""

    def __init__(self, box: dict[int, dict[int, list[int]]], rank: int, world_size: int) -> None:
        self.box, self.rank, self.world_size = box, rank, world_size
        self.turn = 0

    def cast(self, row: list[int]) -> Callable[[], list[list[int]] | None]:
        rows = self.box.setdefault(self.turn, {})
        self.turn += 1
        rows[self.rank] = row

        def poll() -> list[list[int]] | None:
            return [rows[rank] for rank in range(self.world_size)] if len(rows) == self.world_size else None

        return poll


def die(transport: NcclTransport) -> None:
    """End a rank without a word: its thread goes, its streams stop. Also for ranks whose test has failed on purpose."""
    transport._core.closed = True
    transport._core.watch._stopping.set()
    forget(transport)


def open_fake_nccl(
    board: FakeBoard,
    rank: int,
    exchange: ExchangeFn,
    *,
    inbox_bytes: int,
    deadline_s: float = 20.0,
    compare: bool = True,
    kind: type[NcclTransport] = NcclTransport,
) -> NcclTransport:
    """Collective: one rank's transport."""
    box, grouped = exchange({})[0], FakeGroupedExchange(board, rank)
    grouped.ballot = FakeBallot(box, rank, len(board.members)) if compare else None
    return kind(grouped, exchange, device=grouped.device, inbox_bytes=inbox_bytes, deadline_s=deadline_s)
