"""A call of a sequence op that was checked and agreed on is found again by all that this depends on, and by nothing less."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from commfuse_dp.collectives.agreement import calls_of
from commfuse_dp.collectives.steps import when_recovered
from commfuse_dp.errors import CommFuseError
from commfuse_dp.ops import column_parallel, row_parallel
from tests.conformance.collectives.worlds import in_world
from tests.support.inproc import InprocWorld
from tests.support.threads import run_ranks

SIZES = (2, 3)
D, F = 4, 6


def operands(rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    column, row = (torch.randn(F, D, generator=generator).requires_grad_() for _ in range(2))
    x = torch.randn(2, sum(SIZES), D, generator=generator).split(SIZES, 1)[rank].clone().requires_grad_()
    return {
        "x": x,
        "column": column,
        "row": row.detach().t().clone().requires_grad_(),
        "bias": torch.ones(F, requires_grad=True),
    }


def both(given: dict[str, Any], transport: Any, **how: Any) -> torch.Tensor:
    how = {"sizes": SIZES, "transport": transport, **how}
    (y,) = column_parallel(given["x"], [given["column"]], [given["bias"]], **how)
    return row_parallel(y, given["row"], **how)


def test_a_call_that_comes_again_is_found() -> None:
    def body(rank: int, transport: Any) -> list[int]:
        counts = []
        for _ in range(3):
            both(operands(rank), transport).sum().backward()
            counts.append(len(calls_of(transport)))
        return counts

    results, _ = in_world(2, body)
    assert results == [[2, 2, 2]] * 2  # the two layers


DIFFERENCES = {
    "shape": lambda given: given.update(x=given["x"].detach()[:1].requires_grad_()),
    "dtype": lambda given: given.update({name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}),
    "input that needs no gradient": lambda given: given.update(x=given["x"].detach()),
    "weight that needs no gradient": lambda given: given.update(column=given["column"].detach()),
    "bias that needs no gradient": lambda given: given.update(bias=given["bias"].detach()),
}


@pytest.mark.parametrize("changed_last", [True, False])
@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_call_that_differs_is_prepared_anew(what: str, changed_last: bool) -> None:
    """Its results and gradients are those of ranks that have made no other call."""

    def one(rank: int, transport: Any, *, changed: bool) -> list[torch.Tensor | None]:
        given = operands(rank)
        if changed:
            DIFFERENCES[what](given)
        y = both(given, transport)
        y.sum().backward()
        return [y.detach(), *(tensor.grad for tensor in given.values())]

    def after_another(rank: int, transport: Any) -> list[torch.Tensor | None]:
        one(rank, transport, changed=not changed_last)
        return one(rank, transport, changed=changed_last)

    results, _ = in_world(2, after_another)
    fresh, _ = in_world(2, lambda rank, transport: one(rank, transport, changed=changed_last))
    for mine, wanted in zip(results, fresh, strict=True):
        for a, b in zip(mine, wanted, strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


def test_what_does_not_fit_is_refused_after_calls_that_did() -> None:
    wrong = [
        lambda given: given.update(column=given["column"].detach().double()),
        lambda given: given.update(column=given["column"].detach()[:, :-1]),
        lambda given: given.update(bias=given["bias"].detach()[:-1]),
        lambda given: given.update(row=given["row"].detach()[:, :-1]),
    ]

    def body(rank: int, transport: Any) -> int:
        both(operands(rank), transport)
        refused = 0
        for change in wrong:
            given = operands(rank)
            change(given)
            with pytest.raises(ValueError, match=r"weight|bias"):
                both(given, transport)
            refused += 1
        with pytest.raises(ValueError, match="sizes"):
            both(operands(rank), transport, sizes=(3, 2))
        return refused

    results, _ = in_world(2, body)
    assert results == [len(wrong)] * 2


def test_grad_mode_and_autocast_are_part_of_it() -> None:
    def body(rank: int, transport: Any) -> tuple[Any, ...]:
        with torch.inference_mode():  # what is kept of it must not be inference tensors
            both(operands(rank), transport)
        recorded = both(operands(rank), transport)
        with torch.no_grad():
            bare = both(operands(rank), transport)
        with torch.autocast("cpu", torch.bfloat16):
            low = both(operands(rank), transport)
        again = both(operands(rank), transport)
        again.sum().backward()
        return recorded.requires_grad, bare.requires_grad, low.dtype, torch.equal(recorded, again), torch.equal(recorded, bare)

    results, _ = in_world(2, body)
    assert results == [(True, False, torch.bfloat16, True, True)] * 2


def test_ranks_that_differ_after_calls_in_common_raise() -> None:
    """One rank's call is known, the other's is new: no data is taken for something else."""
    world = InprocWorld(2, inbox_bytes=1 << 16, deadline_s=20.0)

    def main(rank: int, exchange: Any) -> str:
        transport = world.transport(rank)
        try:
            both(operands(rank), transport)
            given = operands(rank)
            if rank == 1:
                given["column"] = given["column"].detach()
            with pytest.raises(CommFuseError) as caught:
                both(given, transport)
            exchange(None)
            return f"{type(caught.value).__name__}: {caught.value}"
        finally:
            transport.close()

    for text in run_ranks(2, main, timeout_s=60.0):
        assert "MismatchError" in text, text  # found here, or by the peer that says so


def test_calls_are_forgotten_with_the_agreement() -> None:
    def body(rank: int, transport: Any, *, forgets: bool) -> int:
        both(operands(rank), transport)
        for forget in when_recovered if forgets else ():
            forget(transport)
        left = len(calls_of(transport))
        both(operands(rank), transport)
        return left

    kept, known = in_world(2, lambda rank, transport: body(rank, transport, forgets=False))
    results, asked = in_world(2, lambda rank, transport: body(rank, transport, forgets=True))
    assert kept == [2, 2] and results == [0, 0]
    assert [more.messages - less.messages for more, less in zip(asked, known, strict=True)] == [2, 2]  # once for each layer
