"""Which messages of a bound program leave by one call, and which are received by one: those of one number.

Where every piece goes straight to its owner in one message (bound.py), the messages of one number are one for each peer: a
piece that all of them get, or a partial for each.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, NamedTuple

from commfuse_dp.transport.one_sided.ring import align

if TYPE_CHECKING:
    from commfuse_dp.collectives.bound import BoundProgram


class Arriving(NamedTuple):
    """summed: only sums use the pieces. told: what they are, and `nbytes` of one, for errors."""

    sources: tuple[int, ...]
    number: int
    pieces: tuple[int, ...]
    summed: bool
    told: str
    nbytes: int


class Leaving(NamedTuple):
    dsts: tuple[int, ...]
    number: int
    pieces: tuple[int, ...]
    sizes: tuple[int, ...]  # bytes


class Groups(NamedTuple):
    """Of one rank. words: of pieces that are made where they leave from: place -> piece."""

    arriving: tuple[Arriving, ...]
    leaving: tuple[Leaving, ...]
    arrives_in: dict[int, int]  # piece -> its group
    leaves_in: dict[int, int]  # of those that may be made where they leave from
    words: dict[int, int]  # and which word says that one is made


def groups_of(bound: BoundProgram, summed: Set[int]) -> Groups | None:
    """None where a group is not complete before this rank waits for what is made of others' groups, or finds no room.

    summed: pieces that only sums use."""
    lanes = {(lane.peer, passage.number): passage.piece for lane in bound.incoming for passage in lane.passages}
    arriving = []
    for sources, number, _, nbytes in bound.expected:
        pieces = tuple(lanes[src, number] for src in sources)
        part = bound.pieces[pieces[0]].slice
        told = f"{part.index} of {part.tensor.name}" if part.tensor.name else str(part.index)
        arriving.append(Arriving(sources, number, pieces, summed >= set(pieces), told, nbytes))
    by_number: dict[int, list[tuple[int, int]]] = {}
    for exchange, piece in zip(bound.exchanges, bound.leaving, strict=True):
        if piece >= 0:
            by_number.setdefault(exchange.number, []).append((exchange.dst, piece))
    leaving = []
    for number, messages in by_number.items():
        dsts, pieces = zip(*messages, strict=True)
        leaving.append(Leaving(dsts, number, pieces, tuple(bound.nbytes[piece] for piece in pieces)))
    if sum(align(max(group.sizes)) for group in leaving) > bound.room:  # each place has the room of the largest
        return None
    open_groups: set[int] = set()
    left = {group.number: set(group.pieces) for group in leaving}
    for step in bound.compute:
        if not step.consumes and step.owner is None and open_groups:
            return None
        for number, missing in left.items():
            if step.piece in missing and not step.consumes:
                missing.discard(step.piece)
                (open_groups.add if missing else open_groups.discard)(number)
    return Groups(
        tuple(arriving),
        tuple(leaving),
        {piece: at for at, group in enumerate(arriving) for piece in group.pieces},
        {piece: at for at, group in enumerate(leaving) for piece in group.pieces if piece in bound.only_to},
        {piece: place for place, piece in enumerate(bound.only_to)},
    )
