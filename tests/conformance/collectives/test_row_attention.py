"""Query-split attention over thread ranks, against the unsharded model in float64: values, gradients, bytes, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_dp.errors import MismatchError
from commfuse_dp.ops import row_parallel_attention
from commfuse_dp.program.layout import chunk_bounds
from commfuse_dp.program.operations import Problem
from commfuse_dp.program.verify import minimum_rows
from commfuse_dp.transport.base import Sending
from tests.conformance.collectives.worlds import in_world
from tests.support.inproc import Faults, InprocWorld
from tests.support.threads import run_ranks

BATCH, WIDTH, FEATURES = 2, 4, 6


class Model:
    """Heads of all ranks together, a projection, and a gradient of the output; `part` gives a rank's share."""

    def __init__(self, n: int, length: int, heads: int, groups: int, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.n, self.heads, self.groups = n, heads, groups
        self.q = draw(BATCH, n * heads, length, WIDTH)
        self.k, self.v = draw(BATCH, n * groups, length, WIDTH), draw(BATCH, n * groups, length, WIDTH)
        self.weight = draw(FEATURES, n * heads * WIDTH)
        self.grad = draw(BATCH, length, FEATURES)

    def part(self, rank: int) -> list[torch.Tensor]:
        q, k, v = (t.chunk(self.n, 1)[rank].clone() for t in (self.q, self.k, self.v))
        return [t.requires_grad_() for t in (q, k, v, self.weight.chunk(self.n, 1)[rank].clone())]

    def exact(self, causal: bool) -> list[torch.Tensor]:
        """y, dq, dk, dv, dW."""
        q, k, v, weight = (t.double().clone().requires_grad_() for t in (self.q, self.k, self.v, self.weight))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        y = F.linear(o.transpose(1, 2).flatten(2), weight)
        y.backward(self.grad.double())
        return [y.detach(), *(t.grad for t in (q, k, v, weight))]  # type: ignore[list-item]


def assert_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape
    # A query that sees one key has a gradient of 0, as the difference of terms of size 1: their rounding is left of it.
    assert (found.double() - wanted).norm() <= tolerance * wanted.norm().clamp(min=1.0)


def together(model: Model, results: list[list[torch.Tensor]], dim: int = 1) -> list[torch.Tensor]:
    y = torch.cat([result[0] for result in results], dim)
    return [y if dim == 1 else y.transpose(0, 1), *(torch.cat([result[i] for result in results], 1) for i in range(1, 5))]


def run(model: Model, sizes: list[int], **how: Any) -> tuple[list[Any], list[Any]]:
    dim, over = how.get("dim", 1), how.pop("over", in_world)
    world = {key: how.pop(key) for key in ("faults", "inbox_bytes") if key in how}

    def body(rank: int, transport: Any) -> list[torch.Tensor]:
        inputs = model.part(rank)
        y = row_parallel_attention(*inputs, sizes=sizes, transport=transport, **how)
        grad = model.grad.split(sizes, 1)[rank]
        y.backward(grad if dim == 1 else grad.transpose(0, 1))
        return [y.detach(), *(t.grad for t in inputs)]  # type: ignore[list-item]

    return over(model.n, body, **world)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n).filter(any))
    return {
        "sizes": sizes,
        "heads": draw(st.sampled_from([(2, 2), (2, 1), (1, 1)])),
        "causal": draw(st.booleans()),
        "m": draw(st.one_of(st.none(), st.integers(1, 3))),
        "order": draw(st.sampled_from(["pairwise", "ring"])),
        "dim": draw(st.integers(0, 1)),
        "dtype": draw(st.sampled_from([torch.float64, torch.float32])),
        "seed": draw(st.integers(0, 999)),
    }


@settings(max_examples=25)
@given(cases())
def test_against_the_unsharded_model(case: dict[str, Any]) -> None:
    sizes = case["sizes"]
    model = Model(len(sizes), sum(sizes), *case["heads"], case["dtype"], case["seed"])
    results, _ = run(
        model,
        sizes,
        causal=case["causal"],
        slices_per_rank=case["m"],
        order=case["order"],
        dim=case["dim"],
        faults=Faults(seed=case["seed"], max_delay=3),
        inbox_bytes=1 << 11,
    )
    tolerance = 1e-12 if case["dtype"] == torch.float64 else 1e-6
    for found, wanted in zip(together(model, results, case["dim"]), model.exact(case["causal"]), strict=True):
        assert_close(found, wanted, tolerance)


@pytest.mark.parametrize(("n", "m"), [(2, 1), (3, 2), (4, 1)])
def test_bytes_are_the_minimum_and_bits_repeat(n: int, m: int) -> None:
    """The ranks' descriptions travel in the first call only."""
    length = 4 * n + 1
    sizes = [stop - start for start, stop in chunk_bounds(length, n)]
    model = Model(n, length, 2, 1, torch.float32)
    grads = model.grad.split(sizes, 1)

    def body(rank: int, transport: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
        def step() -> list[torch.Tensor]:
            inputs = model.part(rank)
            y = row_parallel_attention(*inputs, causal=True, slices_per_rank=m, transport=transport)
            y.backward(grads[rank])
            return [y.detach(), *(t.grad for t in inputs)]  # type: ignore[list-item]

        first = step()
        before, hand_over = 0, transport.send

        def send(sendings: Sequence[Sending]) -> None:
            nonlocal before
            before += sum(sending.buffer.numel() for sending in sendings)
            hand_over(sendings)

        transport.send = send
        return first, step(), before

    results, _ = in_world(n, body)
    least = minimum_rows(Problem("reduce_scatter", tuple(sizes))) + minimum_rows(Problem("all_gather", tuple(sizes)))
    assert sum(moved for _, _, moved in results) == least * BATCH * FEATURES * 4
    for first, second, _ in results:
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_token_counts_that_change_and_fewer_positions_than_ranks() -> None:
    models = [Model(3, length, 2, 2, torch.float64, seed=length) for length in (7, 1, 12, 2, 7)]

    def body(rank: int, transport: Any) -> list[torch.Tensor]:
        found = []
        for model in models:
            with torch.no_grad():  # generation
                found.append(row_parallel_attention(*model.part(rank), causal=True, transport=transport))
        return found

    results, _ = in_world(3, body)
    for number, model in enumerate(models):
        assert_close(torch.cat([result[number] for result in results], 1), model.exact(True)[0], 1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    model, sizes = Model(2, 6, 2, 2, torch.float64), [3, 3]

    def body(rank: int, transport: Any) -> list[torch.Tensor]:
        inputs = model.part(rank)
        y = checkpoint(
            lambda *t: row_parallel_attention(*t, causal=True, sizes=sizes, transport=transport),
            *inputs,
            use_reentrant=reentrant,
        )
        y.backward(model.grad.split(sizes, 1)[rank])
        return [y.detach(), *(t.grad for t in inputs)]  # type: ignore[list-item]

    results, _ = in_world(2, body)
    for found, wanted in zip(together(model, results), model.exact(True), strict=True):
        assert_close(found, wanted, 1e-12)


def test_low_precision_and_autocast() -> None:
    """Within twice the error that rounding the partials once to bfloat16 and summing them makes; autocast casts alike."""
    model, sizes = Model(2, 8, 2, 1, torch.float32), [4, 4]
    wanted = model.exact(True)[0]

    def body(rank: int, transport: Any) -> tuple[torch.Tensor, ...]:
        parts, how = model.part(rank), {"causal": True, "sizes": sizes, "transport": transport}
        plain = row_parallel_attention(*(t.bfloat16() for t in parts), **how)
        with torch.autocast("cpu", torch.bfloat16):
            cast = row_parallel_attention(*parts, **how)
        wide = row_parallel_attention(*(t.bfloat16() for t in parts), reduce_dtype=torch.float32, **how)
        cast.sum().backward()
        assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in parts)
        return plain.detach(), cast.detach(), wide.detach()

    results, _ = in_world(2, body)
    q, k, v, weight = (t.bfloat16() for t in (model.q, model.k, model.v, model.weight))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    stock = sum(F.linear(a, b) for a, b in zip(o.chunk(2, 2), weight.chunk(2, 1), strict=True))
    plain, cast, wide = (torch.cat([result[i] for result in results], 1) for i in range(3))
    assert plain.dtype == torch.bfloat16 and torch.equal(plain, cast)
    error = (stock.double() - wanted).norm()  # type: ignore[union-attr]
    assert (plain.double() - wanted).norm() <= 2 * error and (wide.double() - wanted).norm() <= 2 * error


def test_frozen_inputs() -> None:
    model, sizes = Model(2, 6, 1, 1, torch.float64), [3, 3]
    wanted = model.exact(False)

    def body(rank: int, transport: Any) -> list[Any]:
        inputs = [t.requires_grad_(i == 0) for i, t in enumerate(model.part(rank))]
        y = row_parallel_attention(*inputs, causal=False, sizes=sizes, transport=transport)
        y.backward(model.grad.split(sizes, 1)[rank])
        return [t.grad for t in inputs]

    results, _ = in_world(2, body)
    assert all(result[1:] == [None, None, None] for result in results)
    assert_close(torch.cat([result[0] for result in results], 1), wanted[1], 1e-12)


# ---- bad input -------------------------------------------------------------------------------------------------------
def arguments(**changed: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
    inputs = {"q": torch.zeros(1, 2, 4, 4), "k": torch.zeros(1, 1, 4, 4), "v": torch.zeros(1, 1, 4, 4)}
    inputs["weight"] = torch.zeros(6, 8)
    tensors = [changed.pop(name, tensor) for name, tensor in inputs.items()]
    return tensors, {"causal": True, **changed}


@pytest.mark.parametrize(
    ("changed", "error", "told"),
    [
        ({"k": torch.zeros(1, 3, 4, 4), "v": torch.zeros(1, 3, 4, 4)}, ValueError, "multiple of the number of key heads"),
        ({"k": torch.zeros(1, 1, 5, 4)}, ValueError, "same shape"),
        ({"q": torch.zeros(2, 4, 4)}, ValueError, "4 dimensions"),
        ({"q": torch.zeros(1, 2, 4, 4).double()}, ValueError, "one floating-point dtype"),
        ({"weight": torch.zeros(6, 9)}, ValueError, r"\[D, 8\] is needed"),
        ({"weight": torch.zeros(6, 8).half()}, ValueError, "must be equal"),
        ({"sizes": [3]}, ValueError, "add up to 3"),
        ({"sizes": [2, 2]}, ValueError, "one size >= 0 for each of 1"),
        ({"dim": 2}, ValueError, "dim=2"),
        ({"order": "around"}, ValueError, "order='around'"),
        ({"slices_per_rank": 0}, ValueError, "slices_per_rank=0"),
        ({"reduce_dtype": torch.int32}, ValueError, "reduce_dtype"),
        ({"dropout_p": 0.1}, ValueError, "dropout inside attention"),
        ({"attn_mask": torch.ones(4, 4)}, ValueError, "masks given as tensors"),
        ({"sliding_window": 128}, ValueError, "sliding windows"),
        ({"is_causal": True}, TypeError, "is_causal"),
    ],
)
def test_arguments_that_cannot_be(changed: dict[str, Any], error: type[Exception], told: str) -> None:
    tensors, how = arguments(**changed)
    with pytest.raises(error, match=told):
        row_parallel_attention(*tensors, **how)


def test_values_that_ask_for_nothing_are_taken() -> None:
    tensors, how = arguments(dropout_p=0.0, attn_mask=None)
    assert row_parallel_attention(*tensors, **how).shape == (1, 4, 6)


@pytest.mark.parametrize("seen_before", [False, True])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"length": 6}, "positions=6"),
        ({"dtype": torch.float64}, "float64"),
        ({"causal": False}, "causal=False"),
        ({"grad": False}, "gradients=False"),
    ],
)
def test_ranks_that_do_not_fit_are_told_so(change: dict[str, Any], told: str, seen_before: bool) -> None:
    """Also where rank 1 goes on with what all have agreed on before, while it is new to rank 0."""

    world = InprocWorld(2)

    def body(rank: int, exchange: Any) -> str:
        transport = world.transport(rank)

        def call(length: int = 8, dtype: torch.dtype = torch.float32, causal: bool = True, grad: bool = True) -> None:
            q = torch.zeros(1, 2, length, 4, dtype=dtype, requires_grad=grad)
            with torch.set_grad_enabled(grad):
                weight = torch.zeros(6, 8, dtype=dtype)
                row_parallel_attention(q, q, q, weight, causal=causal, slices_per_rank=1, transport=transport)

        if seen_before:
            call()
        with pytest.raises(Exception) as caught:
            call(**change if rank == 0 else {})
        return f"{type(caught.value).__name__}: {caught.value}"

    results = run_ranks(2, body)
    assert told in results[0] and results[0].startswith(MismatchError.__name__)
    assert seen_before or told in results[1]
    assert MismatchError.__name__ in results[1]
