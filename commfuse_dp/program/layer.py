"""The programs of a sharded layer, and of a step made of them.

    forward     | parameters: own first      |                           consume | r | r+1 | r+2 | r+3
    backward    | gradients:  own last       | interleaved, so that every        | produce r+1 | consume r+1 | ... | r | r
                | parameters: own last       | slice's transfer has compute beside it
    step        | forward of layer 0, 1, ..., backward of layer ..., 1, 0

In a backward a partial gradient is produced, and leaves, before parameters of the same owner are consumed: that is the first
use of the link's time. With several slices per rank the owner's slices of both kinds alternate.
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
    consumed = list(arrivals(parameters, rank, own_last=True)) if parameters is not None else []
    produced = list(productions(gradients, rank, beside=True)) if gradients is not None else []
    order = problems[0].scatter_owners(rank) if problems else ()
    head = consumed[:1]
    tail = [step for step in produced if not isinstance(step[0], Produce)]
    by_owner: dict[int, tuple[list[list[Operation]], list[list[Operation]]]] = {owner: ([], []) for owner in order}
    for step in produced:
        if isinstance(step[0], Produce):
            by_owner[step[0].slice.owner][0].append(step)
    for step in consumed[1:]:
        compute = step[-1]
        assert isinstance(compute, Consume)
        by_owner[compute.piece.slice.owner][1].append(step)
    steps = list(head)
    for owner in order:
        for pair in itertools.zip_longest(*by_owner[owner]):
            steps += [step for step in pair if step is not None]
    return Program(problems, rank, tuple(itertools.chain.from_iterable(steps + tail)))


def step(programs: Iterable[Program]) -> Program:
    """One rank's programs one after the other, without a barrier between them. Each of their tensors has a name of its own."""
    programs = list(programs)
    problems = tuple(problem for program in programs for problem in program.problems)
    operations: Sequence[Operation] = [op for program in programs for op in program.operations]
    return Program(problems, programs[0].rank, tuple(operations))
