"""The programs of a sharded layer, and of a step made of them.

    forward     | parameters: own first      |                           consume | r | r+1 | r+2 | r+3
    backward    | gradients:  own last       | interleaved, so that every        | produce r+1 | consume r+1 | ... | r | r
                | parameters: own last       | slice's transfer has compute beside it
    through     | rows:       half of the own first  | consume r | consume r+1 | ... | consume r
                | results:    own last               |           | produce r+1 | ... | produce r
    step        | forward of layer 0, 1, ..., backward of layer ..., 1, 0

In a backward a partial gradient is produced, and leaves, before parameters of the same owner are consumed: that is the first
use of the link's time. With several slices per rank the owner's slices of both kinds alternate.

Through a function of rows (a mixture's experts) what is produced for an owner is made of what that owner's rows hold, so they
are consumed before it. Half of the own slices cover the way of what comes, the other half that of what was sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from commfuse_dp.program.gather import arrivals
from commfuse_dp.program.operations import Consume, Operation, Problem, Produce, Program
from commfuse_dp.program.scatter import productions


def forward(parameters: Problem, rank: int) -> Program:
    """Consume all slices of a layer's parameters, own first."""
    return Program((parameters,), rank, tuple(itertools.chain.from_iterable(arrivals(parameters, rank))))


def backward(parameters: Problem | None, gradients: Problem | None, rank: int) -> Program:
    """Produce the partial gradients of all slices, own last, and consume the parameters beside it. None: not needed.

    Without gradients (a frozen layer) parameters are consumed as in a forward: the own slice, first, covers the others' way."""
    if parameters is not None and gradients is None:
        return forward(parameters, rank)
    problems = tuple(problem for problem in (parameters, gradients) if problem is not None)
    order = problems[0].scatter_owners(rank) if problems else ()
    head, consumed, produced, tail = _by_owner(parameters, gradients, rank)
    pairs = [pair for owner in order for pair in itertools.zip_longest(produced.get(owner, []), consumed.get(owner, []))]
    steps = [head, *(step for pair in pairs for step in pair if step is not None), *tail]
    return Program(problems, rank, tuple(itertools.chain.from_iterable(steps)))


def through(rows: Problem, results: Problem, rank: int) -> Program:
    """Consume all slices of the rows, and produce the partial results of each behind it. Both are cut alike."""
    head, consumed, produced, tail = _by_owner(rows, results, rank)
    own = consumed[rank]
    early = (len(own) + 1) // 2
    first = [step[-1:] for step in own[:early]]
    consumed[rank] = [step[:-1] for step in own[:early]] + own[early:]  # what a step sends stays in its place
    pairs = [pair for owner in rows.scatter_owners(rank) for pair in zip(consumed[owner], produced[owner], strict=True)]
    steps = [head, *first, *itertools.chain.from_iterable(pairs), *tail]
    return Program((rows, results), rank, tuple(itertools.chain.from_iterable(steps)))


Steps = dict[int, list[list[Operation]]]  # by owner: of every slice, in order


def _by_owner(
    gathered: Problem | None, summed: Problem | None, rank: int
) -> tuple[list[Operation], Steps, Steps, list[list[Operation]]]:
    """(what leaves at once, steps that consume, steps that produce, sums that remain)"""
    coming = list(arrivals(gathered, rank, own_last=True)) if gathered is not None else [[]]
    made = list(productions(summed, rank, beside=True)) if summed is not None else []
    owners = range((gathered or summed).world_size) if gathered or summed else ()  # type: ignore[union-attr]
    consumed: Steps = {owner: [] for owner in owners}
    produced: Steps = {owner: [] for owner in owners}
    for step in coming[1:]:
        compute = step[-1]
        assert isinstance(compute, Consume)
        consumed[compute.piece.slice.owner].append(step)
    for step in made:
        if isinstance(step[0], Produce):
            produced[step[0].slice.owner].append(step)
    return coming[0], consumed, produced, [step for step in made if not isinstance(step[0], Produce)]


def step(programs: Iterable[Program]) -> Program:
    """One rank's programs one after the other, without a barrier between them. Each of their tensors has a name of its own."""
    programs = list(programs)
    problems = tuple(problem for program in programs for problem in program.problems)
    operations: Sequence[Operation] = [op for program in programs for op in program.operations]
    return Program(problems, programs[0].rank, tuple(operations))
