"""Ulysses over thread ranks, against unsharded attention in float64: values, gradients, bytes, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_dp.errors import MismatchError
from commfuse_dp.ops import ulysses_attention
from commfuse_dp.ops.attention.ulysses import LAYOUTS, laid_out
from commfuse_dp.transport.base import Sending
from tests.conformance.collectives.worlds import Moved, in_world
from tests.support.inproc import Faults, InprocWorld
from tests.support.threads import run_ranks

BATCH, WIDTH = 2, 4


def whole(length: int, heads: int, groups: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v and the gradient of o: [S, B, heads, d]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(length, BATCH, count, WIDTH) for count in (heads, groups, groups, heads)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def exact(tensors: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    """o, dq, dk, dv: [S, B, heads, d]."""
    q, k, v = (t.double().clone().requires_grad_() for t in tensors[:3])
    o = F.scaled_dot_product_attention(*(t.permute(1, 2, 0, 3) for t in (q, k, v)), is_causal=causal, enable_gqa=True)
    o = o.permute(2, 0, 1, 3)
    o.backward(tensors[3].double())
    return [o.detach(), *(t.grad for t in (q, k, v))]  # type: ignore[list-item]


def parts(tensors: list[torch.Tensor], sizes: list[int], rank: int, layout: str) -> list[torch.Tensor]:
    return [laid_out(t.split(sizes)[rank], layout).clone() for t in tensors]


def run(tensors: list[torch.Tensor], sizes: list[int], layout: str = "bshd", **how: Any) -> tuple[list[Any], list[Moved]]:
    world = {key: how.pop(key) for key in ("faults", "inbox_bytes") if key in how}
    function, over = how.pop("function", ulysses_attention), how.pop("over", in_world)

    def body(rank: int, transport: Any) -> list[torch.Tensor]:
        *inputs, grad = parts(tensors, sizes, rank, layout)
        inputs = [t.requires_grad_() for t in inputs]
        o = function(*inputs, sizes=sizes, layout=layout, transport=transport, **how)
        o.backward(grad)
        return [o.detach(), *(t.grad for t in inputs)]  # type: ignore[list-item]

    return over(len(sizes), body, **world)


def together(results: list[list[torch.Tensor]], layout: str = "bshd") -> list[torch.Tensor]:
    return [torch.cat([result[i].permute(LAYOUTS[layout]) for result in results]) for i in range(4)]


def assert_exact(results: list[list[torch.Tensor]], wanted: list[torch.Tensor], layout: str = "bshd") -> None:
    for found, right in zip(together(results, layout), wanted, strict=True):
        assert found.shape == right.shape
        # A query that sees one key has a gradient of 0, as the difference of terms of size 1: their rounding is left of it.
        size = right.norm().clamp(min=1.0)
        assert (found.double() - right).norm() <= (1e-12 if found.dtype == torch.float64 else 1e-6) * size


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(1, 4))
    return {
        "sizes": draw(st.lists(st.integers(0, 5), min_size=n, max_size=n).filter(any)),
        "heads": draw(st.sampled_from([(4, 4), (4, 1), (8, 4)] if n == 4 else [(2 * n, n), (2 * n, 2 * n), (2 * n, 1)])),
        "causal": draw(st.booleans()),
        "m": draw(st.one_of(st.none(), st.integers(1, 3))),
        "order": draw(st.sampled_from(["pairwise", "ring"])),
        "layout": draw(st.sampled_from(list(LAYOUTS))),
        "dtype": draw(st.sampled_from([torch.float64, torch.float32])),
        "seed": draw(st.integers(0, 999)),
    }


@settings(max_examples=30)
@given(cases())
def test_against_unsharded_attention(case: dict[str, Any]) -> None:
    tensors = whole(sum(case["sizes"]), *case["heads"], case["dtype"], case["seed"])
    results, _ = run(
        tensors,
        case["sizes"],
        case["layout"],
        causal=case["causal"],
        slices_per_rank=case["m"],
        order=case["order"],
        faults=Faults(seed=case["seed"], max_delay=3),
        inbox_bytes=1 << 11,
    )
    assert_exact(results, exact(tensors, case["causal"]), case["layout"])


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 3])
def test_bytes_and_messages_are_the_minimum_and_bits_repeat(groups: int, m: int) -> None:
    """q, k and v in one message per pair and slice. A key head that two ranks need must go to both."""
    n, sizes, heads = 4, [4, 5, 3, 4], 4
    tensors = whole(sum(sizes), heads, groups, torch.float32)

    def body(rank: int, transport: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], Moved]:
        def step() -> list[torch.Tensor]:
            *inputs, grad = parts(tensors, sizes, rank, "bshd")
            inputs = [t.requires_grad_() for t in inputs]
            o = ulysses_attention(*inputs, causal=True, sizes=sizes, slices_per_rank=m, transport=transport)
            o.backward(grad)
            return [o.detach(), *(t.grad for t in inputs)]  # type: ignore[list-item]

        first, moved, hand_over = step(), Moved(), transport.send

        def send(sendings: Sequence[Sending]) -> None:
            moved.messages += len(sendings)
            moved.bytes += sum(sending.buffer.numel() for sending in sendings)
            hand_over(sendings)

        transport.send = send
        return first, step(), moved

    results, _ = in_world(n, body)
    row = BATCH * WIDTH * 4
    key_heads = 2 * max(groups // n, 1)
    for rank, (first, second, moved) in enumerate(results):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        sent, got = (n - 1) * sizes[rank], sum(sizes) - sizes[rank]
        # forward: q, k, v of the own positions, then o of the others'; backward: dO of the own, then dq, dk, dv of the others'
        assert moved.bytes == row * ((1 + key_heads) * sent + got + sent + (1 + key_heads) * got)
        assert moved.messages == 4 * (n - 1) * m


def test_token_counts_that_change_and_no_grad() -> None:
    """Also fewer positions than ranks: generation."""
    lengths = [(2, 2, 2), (1, 0, 0), (3, 4, 5), (0, 1, 1), (2, 2, 2)]
    models = [whole(sum(sizes), 3, 3, torch.float64, seed) for seed, sizes in enumerate(lengths)]

    def body(rank: int, transport: Any) -> list[torch.Tensor]:
        found = []
        for sizes, tensors in zip(lengths, models, strict=True):
            with torch.no_grad():
                q, k, v, _ = parts(tensors, list(sizes), rank, "sbhd")
                o = ulysses_attention(q, k, v, causal=True, layout="sbhd", sizes=sizes, transport=transport)
                assert not o.requires_grad
                found.append(o)
        return found

    results, _ = in_world(3, body)
    for number, tensors in enumerate(models):
        o = torch.cat([result[number] for result in results])
        assert (o - exact(tensors, True)[0]).norm() <= 1e-12 * o.norm()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    tensors, sizes = whole(6, 2, 2, torch.float64), [3, 3]

    def function(*inputs: torch.Tensor, **how: Any) -> Any:
        return checkpoint(lambda *t: ulysses_attention(*t, **how), *inputs, use_reentrant=reentrant)

    results, _ = run(tensors, sizes, causal=True, function=function)
    assert_exact(results, exact(tensors, True))


def test_low_precision_and_autocast() -> None:
    """Blocks are rounded to bfloat16 and joined in float32: within twice the error of the unsharded kernel."""
    tensors, sizes = whole(12, 4, 2, torch.float32), [6, 6]
    wanted = exact(tensors, True)

    def cast(*inputs: torch.Tensor, **how: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            o = ulysses_attention(*inputs, **how)
        assert o.dtype == torch.bfloat16
        return o.float()

    results, _ = run(tensors, sizes, causal=True, function=cast)
    q, k, v = (t.bfloat16().permute(1, 2, 0, 3).requires_grad_() for t in tensors[:3])
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    o.backward(tensors[3].bfloat16().permute(1, 2, 0, 3))
    stock = [t.permute(2, 0, 1, 3) for t in (o, q.grad, k.grad, v.grad)]  # type: ignore[union-attr]
    for found, unsharded, right in zip(together(results), stock, wanted, strict=True):
        assert found.dtype == torch.float32
        assert (found.double() - right).norm() <= 2 * (unsharded.double() - right).norm()


# ---- bad input -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"heads": 3}, "3 query heads cannot be divided among 2 ranks"),
        ({"heads": 6, "groups": 3}, "3 key heads on 2 ranks"),
        ({"layout": "shbd"}, "layout='shbd'"),
        ({"sizes": (4, 5)}, r"sizes\[1\]=5, but q of rank 1 has 4"),
        ({"sizes": (4,)}, "one size >= 0 for each of 2"),
        ({"dropout_p": 0.5}, "dropout inside attention"),
        ({"order": "hierarchical"}, "order='hierarchical'"),
    ],
)
def test_arguments_that_cannot_be(changed: dict[str, Any], told: str) -> None:
    heads = changed.pop("heads", 4)
    groups = changed.pop("groups", heads)
    transport = InprocWorld(2).transport(1)
    q, k = torch.zeros(1, 4, heads, 4), torch.zeros(1, 4, groups, 4)
    with pytest.raises(ValueError, match=told):
        ulysses_attention(q, k, k, causal=True, transport=transport, **changed)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"length": 5}, r"sizes=\(5, 5\)"),
        ({"batch": 3}, "batch=3"),
        ({"groups": 2}, "key heads=2"),
        ({"scale": 2.0}, "scale=2.0"),
    ],
)
def test_ranks_that_do_not_fit_are_told_so(change: dict[str, Any], told: str) -> None:
    world = InprocWorld(2)

    def body(rank: int, exchange: Any) -> None:
        transport = world.transport(rank)

        def call(length: int = 4, batch: int = 1, groups: int = 4, scale: float | None = None) -> None:
            q, k = torch.zeros(batch, length, 4, 4), torch.zeros(batch, length, groups, 4)
            ulysses_attention(q, k, k, causal=True, scale=scale, transport=transport)

        with pytest.raises(MismatchError, match=told):
            call(**change if rank == 0 else {})

    run_ranks(2, body)
