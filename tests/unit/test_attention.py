"""Attention by blocks, joined by log-sum-exp: against torch's attention over everything, in float64."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.attention import by_blocks
from commfuse_dp.ops import compat
from commfuse_dp.ops.attention import block
from commfuse_dp.ops.attention.block import Attended, parts


@pytest.fixture(params=["library", "plain"])
def backend(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(block, "flash_attention", lambda q: None)
    monkeypatch.setattr(block, "LEAST_KEYS", 0)
    return request.param


def exact(q, k, v, causal, scale, grad):
    """(o, dq, dk, dv) of unsharded attention in float64."""
    inputs = [t.double().requires_grad_() for t in (q, k, v)]
    o = F.scaled_dot_product_attention(*inputs, is_causal=causal, scale=scale, enable_gqa=True)
    o.backward(grad.double())
    return [o.detach(), *(t.grad for t in inputs)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("cuts", [((0, 9), (0, 9)), ((0, 2, 5, 9), (0, 3, 4, 9)), ((0, 4, 9), (0, 1, 7, 9))])
def test_blocks_join_to_the_whole(backend, causal, heads, cuts):
    generator = torch.Generator().manual_seed(3)
    h, g = heads
    q, grad = (torch.randn(2, h, 9, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 9, g, 8, generator=generator, dtype=torch.float64).transpose(1, 2) for _ in range(2))
    found = by_blocks(q, k, v, causal, 0.4, grad, *cuts)
    for ours, wanted in zip(found, exact(q, k, v, causal, 0.4, grad), strict=True):
        assert (ours - wanted).norm() <= 1e-14 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(backend, dtype):
    """Each block is rounded to the dtype, then joined in float32: within twice the error of the unsharded kernel."""
    generator = torch.Generator().manual_seed(4)
    q, k, v, grad = (torch.randn(1, 2, 12, 8, generator=generator).to(dtype) for _ in range(4))
    wanted = exact(q, k, v, True, 0.3, grad)
    whole = by_blocks(q, k, v, True, 0.3, grad, (0, 12), (0, 12))
    found = by_blocks(q, k, v, True, 0.3, grad, (0, 5, 12), (0, 7, 12))
    for ours, unsharded, right in zip(found, whole, wanted, strict=True):
        error, base = (ours.double() - right).norm(), (unsharded.double() - right).norm()
        assert error <= 2 * base + 1e-7 * right.norm()


@pytest.mark.parametrize("q_range", [(0, 4), (3, 8), (2, 2), (7, 9)])
@pytest.mark.parametrize("k_range", [(0, 3), (0, 9), (4, 6), (5, 5), (8, 9)])
def test_parts_cover_what_the_mask_shows(q_range, k_range):
    (q0, q1), (k0, k1) = q_range, k_range
    seen = torch.zeros(q1 - q0, k1 - k0, dtype=torch.int)
    for (low, high), (first, last), corner in parts(q0, q1 - q0, k0, k1 - k0, True):
        assert high > low and last > first and (not corner or high - low == last - first)
        shown = torch.ones(high - low, last - first, dtype=torch.int)
        seen[low:high, first:last] += shown.tril() if corner else shown
    mask = torch.arange(q0, q1)[:, None] >= torch.arange(k0, k1)[None, :]
    assert torch.equal(seen, mask.int())


def test_queries_without_keys_are_zero(backend):
    attended = Attended(torch.randn(1, 1, 3, 4), q_start=0, causal=True, scale=1.0)
    attended.take(torch.randn(1, 1, 2, 4), torch.randn(1, 1, 2, 4), 5)
    o, lse = attended.result()
    assert not o.any() and torch.isneginf(lse).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1, 7, 15, 16, 17, 40])
def test_what_is_no_number_stays_none(dtype, causal, size):
    """Blocks of any size: a NaN is not lost. One of a value spreads within its block, as hidden keys have the weight 0."""
    generator = torch.Generator().manual_seed(8)
    cuts = (0, size, 2 * size)
    for which, position in itertools.product(range(3), {0, size // 2, size - 1, size, 2 * size - 1}):
        q, k, v = (torch.randn(1, 1, 2 * size, 4, generator=generator).to(dtype) for _ in range(3))
        (q, k, v)[which][0, 0, position, 1] = math.nan
        found = by_blocks(q, k, v, causal, 0.4, torch.ones_like(q), cuts, cuts)[0].isnan().any(-1)[0, 0]
        sees = torch.ones(2 * size, 2 * size, dtype=torch.bool)
        sees = sees.tril() if causal else sees
        wanted = torch.arange(2 * size) == position if which == 0 else sees[:, position]
        assert torch.equal(found if which < 2 else found & wanted, wanted), (which, position)


def test_any_strides(backend):
    """torch's kernel takes the last dimension for dense: transposed inputs and expanded gradients gave other numbers."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 2, 4, 6, generator=generator, dtype=torch.float64).transpose(2, 3) for _ in range(3))
    grad = torch.ones((), dtype=torch.float64).expand(q.shape)
    for ours, wanted in zip(by_blocks(q, k, v, True, 0.4, grad, (0, 6), (0, 6)), exact(q, k, v, True, 0.4, grad), strict=True):
        assert (ours - wanted).norm() <= 1e-14 * wanted.norm()


def test_blocks_on_gpus_go_to_flash_attention(monkeypatch):
    """Without a GPU: torch's own checks of the arguments, and of shapes and dtypes, on tensors without memory."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    compat._flash_on_gpus.cache_clear()

    class Ops(TorchDispatchMode):
        called: ClassVar[Counter[str]] = Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.called[func._schema.name.removeprefix("aten::")] += 1
            if "flash" in func._schema.name:
                tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dtype == torch.bfloat16]
                assert len({tensor.dtype for tensor in tensors}) == 1 and all(tensor.stride(-1) == 1 for tensor in tensors)
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(block, "flash_attention", lambda q: compat._flash_on_gpus(q.device))  # of any number of keys
    cuts = (0, 5, 12), (0, 7, 12)
    with torch.device("meta"), Ops() as ops:
        q, grad = (torch.empty(2, 4, 12, 8, dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.empty(2, 2, 12, 8, dtype=torch.bfloat16) for _ in range(2))
        found = by_blocks(q, k, v, True, 0.4, grad, *cuts)
    assert [tuple(t.shape) for t in found] == [tuple(t.shape) for t in (q, q, k, v)]
    blocks = [(*rows, *columns) for rows in itertools.pairwise(cuts[0]) for columns in itertools.pairwise(cuts[1])]
    pieces = sum(len(parts(low, high - low, first, last - first, True)) for low, high, first, last in blocks)
    assert pieces == ops.called["_scaled_dot_product_flash_attention"]
    assert pieces == ops.called["_scaled_dot_product_flash_attention_backward"]
    assert not ops.called["bmm"]
    with FakeTensorMode():
        on_gpu = torch.empty(2, 4, 12, 8, dtype=torch.bfloat16, device="cuda")
        assert not compat.holds_scores(on_gpu) and compat.holds_scores(on_gpu.float())
    compat._flash_on_gpus.cache_clear()
