"""What a rank does with each slice of a gradient that does not go straight to its owner: the sums of a program, bound.

    through all ranks (way `ring`)   owner+1  ->  owner+2  ->  ...  ->  owner       each adds its own partial to what it got
    through hosts (way `hosts`)      partial of rank 5's rows   -> rank 1, the gateway: adds up those of its host, in rank order
                                     the host's sum             -> rank 5, the owner: adds up one sum per host, in their order

Where every rank owns a part of each layer (FSDP2, ZeRO-3), partials go straight to their owners and every link carries the
same. Under ZeRO-1/2 a rank owns whole layers: sent straight, the partials of N - 1 ranks would meet at one owner's link, layer
after layer, and take N - 1 times as long as they need. In a chain every link carries each layer once: the bytes of a
reduce-scatter, (N-1)/N of the gradient per rank. Through hosts what is owed to another host crosses once, not once per rank.

Both are made of one kind of step: wait for the terms, add them up, hand the sum on. How steps are run: route.py on a host,
stream.py in streams.

[Note: Order of a chain]
A slice of owner o starts at rank o+1 (hop 0) and ends at o (hop N-1): rank r has it at hop (r - o - 1) mod N. Steps go slice
by slice, and for each slice index i through the hops from 0 on; a hop whose owner has no slice i is left out. Hop h of rank r
takes what hop h-1 of rank r-1 has sent, so both ends of a link agree on the order of its messages.

    compute  | partials of layer k, each in a buffer of its own | dgrad, layer k-1 ...                 (|: the stream waits)
    reduce       |compute   (i,0): copy    (i,1): |arrival, |slot free, add    (i,2): ...    (i,N-1): |arrival, add
    scatter                           |credit, copy to r+1                |credit, copy to r+1

Call p = (layer, i, h), compared from left to right: the same sequence on all ranks. `reduce` at p waits for compute, which has
the layer's partials without waiting for anything but sums of earlier layers; for the message that rank r-1 sent at the step
before p; and for a slot in the staging, from which a message of an earlier step must have left. A message of p leaves when its
receiver has released an earlier one, say of q < p: it does so at the step after q, which is p at the latest. So `reduce` at p
depends on steps before p alone, `scatter` at p on `reduce` up to p, and nothing waits in a circle, whatever fits into an inbox:
one slice is enough. (Hops first and slices second would need room for all slices of a hop.)

A message is tagged by its step (i, h), not by its owner: on a lockstep transport, where a rank takes in what its predecessor
sends in the step in which it sends itself, both have the same tag; and a rank that has nothing to send takes the step all the
same. There, `scatter` at p waits for both neighbours to have come to p, and p is before what `reduce` at p's successor needs.
"""

from __future__ import annotations

from typing import NamedTuple

from commfuse_dp.engine.plan import Geometry, UnitSlice, absent_slice
from commfuse_dp.program.operations import COMPUTE, Piece, Program, Reduce, Send, partial_sum
from commfuse_dp.program.scatter import HOST_SUMS

Key = tuple[int, ...]


class Step(NamedTuple):
    """One sum: what `sources` send and this rank's own term, in the order of `ranks`; or the own term alone, handed on."""

    item: UnitSlice
    key: Key  # of its own term: (owner, index), with a 1 behind it if that is a host's sum
    ranks: tuple[int, ...]  # this one among them
    sources: tuple[int, ...]  # the others
    to: int | None  # who gets the sum; None: it stays here
    came: int  # `part` of the tags of what sources send
    goes: int  # of the sum's
    over_hosts: bool = False
    then: Key | None = None  # the sum is the own term of this one
    doing: str = ""  # what a source is waited for to send


class Way(NamedTuple):
    """The steps of one unit on one rank, in an order in which streams can run them one after the other."""

    chained: bool  # a chain: sums are rounded to the dtype that travels at every hop, and do not wait for each other on a host
    steps: dict[Key, Step]  # one for each slice, by (owner, index); absent slices: steps of a lockstep transport alone
    totals: tuple[Step, ...]  # through hosts: of the own slices, over the hosts
    sums: tuple[Step, ...]  # those of both in which something comes from others
    queues: tuple[tuple[Step, ...], ...]  # the same as a host runs them: each in its order
    items: dict[Key, UnitSlice]  # what this rank computes


def way_of(program: Program, geometry: Geometry, *, lockstep: bool) -> Way | None:
    """program: with one problem, a reduce-scatter over the slices of `geometry`. None: all partials go straight."""
    problem, rank = program.problem, program.rank
    if problem.way == "direct":
        return None
    to = {op.piece: op.to for op in program.operations if isinstance(op, Send)}
    chained = problem.way == "ring"
    items: dict[Key, UnitSlice] = {(item.owner, item.index): item for own in geometry.slices for item in own}
    numbers = {key: number for number, key in enumerate(items)}
    hops = {owner: hop for hop, owner in enumerate(problem.scatter_owners(rank))}
    steps: list[Step] = []
    totals: list[Step] = []
    for op in program.operations:
        if isinstance(op, Reduce) and op.lane != COMPUTE:
            ranks, piece = tuple(map(_holder, op.inputs)), Piece(op.output, op.slice)
        elif isinstance(op, Send) and op.piece.origin == rank:  # to a gateway, which adds up
            ranks, piece = (rank,), op.piece
        else:
            continue
        owner, index = piece.slice.owner, piece.slice.index
        goes = index * len(hops) + hops[owner] if chained else numbers[owner, index]
        total = isinstance(op, Reduce) and op.lane == HOST_SUMS
        step = Step(
            items[owner, index],
            (owner, index, 1) if total else (owner, index),
            ranks,
            tuple(source for source in ranks if source != rank),
            to.get(piece),
            goes - 1 if chained else goes,
            goes,
            total,
            (owner, index, 1) if not (chained or total) and owner == rank else None,
            "its sum of the partial gradients"
            if chained
            else "its host's sum of partial gradients"
            if total
            else "its partial gradient",
        )
        (totals if total else steps).append(step)
    if chained:
        if lockstep:
            most, last = max(map(len, geometry.slices)), hops[rank]
            steps += [
                Step(absent_slice(owner, index), (owner, index), (), (), (rank + 1) % len(hops), -1, index * len(hops) + hop)
                for owner, hop in hops.items()
                for index in range(len(geometry.slices[owner]), most)
                if hop < last
            ]
        steps.sort(key=lambda step: step.goes)
    sums = tuple(step for step in steps if step.sources)
    queues = [(step,) for step in sums] if chained else [queue for queue in (sums, tuple(totals)) if queue]
    return Way(chained, {step.key: step for step in steps}, tuple(totals), (*sums, *totals), tuple(queues), items)


def _holder(origin: int) -> int:
    """The rank that has a term: its own partial, or a sum that it has made."""
    return origin if origin >= 0 else partial_sum(origin)
