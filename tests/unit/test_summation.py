"""Rank-order sums, bit for bit, against a plain left fold; and near a float64 oracle."""

from __future__ import annotations

import itertools

import pytest
import torch

from commfuse_dp.collectives import summation
from commfuse_dp.collectives.summation import sum_in_rank_order, wide_dtype

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def fold(partials: list[torch.Tensor], out_dtype: torch.dtype, divisor: float | None) -> torch.Tensor:
    """The definition, without blocks, aliases or out= arguments."""
    wide = wide_dtype(out_dtype, *(p.dtype for p in partials))
    total = partials[0].to(wide)
    for partial in partials[1:]:
        total = total + partial.to(wide)
    if divisor is not None:
        total = total / divisor
    return total.to(out_dtype)


@pytest.fixture(params=[7, 1 << 18], ids=["block7", "one_block"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(summation, "BLOCK_ELEMENTS", request.param)
    return request.param


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32, FP64])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
def test_bitwise_equal_to_left_fold(n: int, dtype: torch.dtype, out_dtype: torch.dtype, block: int) -> None:
    generator = torch.Generator().manual_seed(n)
    partials = [torch.randn(4, 5, generator=generator, dtype=FP64).to(dtype) for _ in range(n)]
    for divisor in (None, 3.0):
        want = fold(partials, out_dtype, divisor)
        kept = [p.clone() for p in partials]
        for own in range(n):
            out = torch.full((4, 5), float("nan"), dtype=out_dtype)
            assert sum_in_rank_order(out, partials, own_rank=own, scale_divisor=divisor) is out
            assert torch.equal(out, want)
            if dtype == out_dtype:
                mine = partials[own].clone()
                given = [mine if r == own else p for r, p in enumerate(partials)]
                sum_in_rank_order(mine, given, own_rank=own, scale_divisor=divisor, scratch=torch.empty(20, dtype=FP32))
                assert torch.equal(mine, want)
        assert all(torch.equal(a, b) for a, b in zip(kept, partials, strict=True))
        oracle = sum(p.to(FP64) for p in partials) / (divisor or 1)
        assert torch.allclose(out.to(FP64), oracle, rtol=2 * torch.finfo(out_dtype).eps, atol=n * 4 * torch.finfo(FP16).eps)


def test_mixed_dtypes(block: int) -> None:
    base = torch.linspace(-3, 3, 30, dtype=FP64)
    for dtypes in itertools.product([BF16, FP16, FP32, FP64], repeat=3):
        partials = [(base * (k + 1.1)).to(d) for k, d in enumerate(dtypes)]
        for out_dtype in (BF16, FP32):
            for own in range(3):
                out = partials[own].clone() if dtypes[own] == out_dtype else torch.empty(30, dtype=out_dtype)
                given = [out if r == own and dtypes[own] == out_dtype else p for r, p in enumerate(partials)]
                sum_in_rank_order(out, given, own_rank=own, scale_divisor=7.0)
                assert torch.equal(out, fold(partials, out_dtype, 7.0)), (dtypes, out_dtype, own)


def test_order_is_rank_order_not_another() -> None:
    """1e8 + 1 - 1e8 depends on the order; the fold's answer is the one of rank order, wherever the own partial is."""
    values = [1e8, 1.0, -1e8, 1.0]
    for own in range(4):
        partials = [torch.full((3,), v) for v in values]
        assert sum_in_rank_order(partials[own], partials, own_rank=own).tolist() == [1.0] * 3
    assert sum_in_rank_order(torch.empty(3), [torch.full((3,), v) for v in sorted(values)], own_rank=0).tolist() == [0.0] * 3


def test_wide_sum_of_half_types_keeps_small_terms() -> None:
    partials = [torch.full((2,), 256.0, dtype=BF16)] + [torch.full((2,), 0.5, dtype=BF16)] * 4
    out = torch.empty(2, dtype=BF16)
    assert sum_in_rank_order(out, partials, own_rank=0).tolist() == [258.0, 258.0]  # 256 + 0.5 would stay 256 in bfloat16


def test_division_is_no_multiplication_by_the_reciprocal() -> None:
    x = torch.arange(1, 1000, dtype=FP32)
    out = sum_in_rank_order(torch.empty_like(x), [x, torch.zeros_like(x)], own_rank=0, scale_divisor=3.0)
    assert torch.equal(out, x / 3.0) and not torch.equal(out, x * (1.0 / 3.0))


def test_empty_and_errors() -> None:
    empty = torch.empty(0, 4)
    assert sum_in_rank_order(empty, [empty, torch.empty(0)], own_rank=1) is empty
    a, b = torch.zeros(4), torch.zeros(4)
    with pytest.raises(ValueError, match="own_rank=2"):
        sum_in_rank_order(a, [a, b], own_rank=2)
    with pytest.raises(ValueError, match="rank 1 has 3 elements, out has 4"):
        sum_in_rank_order(a, [a, b[:3]], own_rank=0)
    with pytest.raises(ValueError, match="rank 0 lies in out's memory"):
        sum_in_rank_order(a, [a, b], own_rank=1)
    with pytest.raises(ValueError, match="rank 1 is not contiguous"):
        sum_in_rank_order(a, [b, torch.zeros(8)[::2]], own_rank=0)
