"""`fused_linear` as a function: against its unfused reference (processes) and against float64 (ranks as threads)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_dp.collectives import close_transports
from commfuse_dp.ops import fused_linear, fused_linear_reference
from commfuse_dp.program.layout import chunk_bounds
from tests.support.inproc import Faults, InprocWorld
from tests.support.threads import run_ranks


def shards(whole: torch.Tensor, sizes: list[int], rank: int) -> torch.Tensor:
    return whole.split(sizes)[rank].clone().requires_grad_()


def even(rows: int, world_size: int) -> list[int]:
    return [stop - start for start, stop in chunk_bounds(rows, world_size)]


@st.composite
def cases(draw):
    world_size = draw(st.integers(1, 4))
    sizes = draw(st.one_of(st.none(), st.lists(st.integers(0, 6), min_size=world_size, max_size=world_size)))
    if sizes is not None and sum(sizes) == 0:
        sizes[0] = 3
    return {
        "world_size": world_size,
        "sizes": sizes,
        "out_features": sum(sizes) if sizes is not None else draw(st.integers(1, 17)),
        "width": draw(st.integers(1, 9)),
        "lead": draw(st.sampled_from([(5,), (2, 3), (1,), (0,)])),
        "bias": draw(st.booleans()),
        "wanted": draw(st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any)),
        "order": draw(st.sampled_from(["pairwise", "ring"])),
        "slices_per_rank": draw(st.integers(1, 3)),
        "op": draw(st.sampled_from(["sum", "mean"])),
        "seed": draw(st.integers(0, 2**31 - 1)),
    }


@settings(max_examples=60)
@given(cases())
def test_against_the_whole_linear_in_float64(case: dict[str, Any]):
    """The gradient of a shard is the sum (or mean) over the ranks; x differs from rank to rank."""
    n, out, width = case["world_size"], case["out_features"], case["width"]
    generator = torch.Generator().manual_seed(case["seed"])
    weight = torch.randn(out, width, generator=generator, dtype=torch.float64)
    bias = torch.randn(out, generator=generator, dtype=torch.float64) if case["bias"] else None
    xs = [torch.randn(*case["lead"], width, generator=generator, dtype=torch.float64) for _ in range(n)]
    grads = [torch.randn(*case["lead"], out, generator=generator, dtype=torch.float64) for _ in range(n)]
    sizes = case["sizes"] or even(out, n)
    grad_x, grad_w, grad_b = case["wanted"]

    whole = [t.clone().requires_grad_() for t in ([weight] if bias is None else [weight, bias])]
    exact_xs = [x.clone().requires_grad_() for x in xs]
    for x, grad in zip(exact_xs, grads, strict=True):
        F.linear(x, *whole).backward(grad)
    divisor = n if case["op"] == "mean" else 1

    world = InprocWorld(n, faults=Faults(seed=case["seed"], max_delay=3))

    def body(rank: int, exchange) -> None:
        transport = world.transport(rank)
        x = xs[rank].clone().requires_grad_(grad_x)
        w = shards(weight, sizes, rank).requires_grad_(grad_w)
        b = shards(bias, sizes, rank).requires_grad_(grad_b) if bias is not None else None
        y = fused_linear(
            x,
            w,
            b,
            out_features=out,
            op=case["op"],
            sizes=case["sizes"],
            order=case["order"],
            slices_per_rank=case["slices_per_rank"],
            transport=transport,
        )
        assert torch.allclose(y, F.linear(xs[rank], weight, bias), rtol=1e-12, atol=1e-12)
        assert y.requires_grad == (grad_x or grad_w or (grad_b and bias is not None))
        if y.requires_grad:
            y.backward(grads[rank])
        found = [(x, exact_xs[rank].grad if grad_x else None), (w, whole[0].grad.split(sizes)[rank] / divisor)]
        if b is not None:
            found.append((b, whole[1].grad.split(sizes)[rank] / divisor))
        for tensor, wanted in found:
            if tensor.requires_grad:
                assert tensor.grad.is_contiguous()
                assert torch.allclose(tensor.grad, wanted, rtol=1e-11, atol=1e-11)
            else:
                assert tensor.grad is None
        transport.close()

    run_ranks(n, body)


# ---- processes ---------------------------------------------------------------------------------------------------------
def against_reference(rank: int, world_size: int, dtype: torch.dtype, autocast: bool, kw: dict[str, Any]) -> dict[str, float]:
    """Two layers in a row; errors of both relative to float64, by tensor: {name: (fused, reference)}."""
    out, hidden, width = 37, 21, 16
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(10, width, generator=generator)
    generator.manual_seed(77)
    whole = [torch.randn(*shape, generator=generator) / 4 for shape in ((hidden, width), (hidden,), (out, hidden))]
    rows = [even(hidden, world_size), even(hidden, world_size), even(out, world_size)]

    def run(linear, dtype: torch.dtype, autocast: bool, **kw) -> list[torch.Tensor]:
        data = x.to(dtype).requires_grad_()
        mine = [shards(w.to(dtype), sizes, rank) for w, sizes in zip(whole, rows, strict=True)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            middle = linear(data, mine[0], mine[1], out_features=hidden, **kw)
            y = linear(F.gelu(middle), mine[2], out_features=out, **kw)
            loss = y.float().square().sum() if dtype != torch.float64 else y.square().sum()
        loss.backward()
        return [y.detach(), data.grad, *[shard.grad for shard in mine]]

    exact = run(fused_linear_reference, torch.float64, False)
    found = [run(linear, dtype, autocast, **kw) for linear in (fused_linear, fused_linear_reference)]
    again = run(fused_linear, dtype, autocast, **kw)
    errors = {}
    for name, ours, theirs, wanted, repeated in zip(("y", "x", "w1", "b1", "w2"), *found, exact, again, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert torch.equal(ours, repeated)  # bitwise the same from call to call
        scale = wanted.abs().max().item() if wanted.numel() else 1.0
        errors[name] = tuple((t.double() - wanted).abs().max().item() / scale if t.numel() else 0.0 for t in (ours, theirs))
    close_transports()
    dist.barrier()
    return errors


@pytest.mark.parametrize(
    ("dtype", "autocast", "kw"),
    [
        (torch.float32, False, {"slices_per_rank": 3}),
        (torch.float64, False, {"order": "ring", "op": "sum"}),
        (torch.bfloat16, False, {}),
        (torch.bfloat16, False, {"reduce_dtype": torch.float32}),
        (torch.float32, True, {}),
    ],
    ids=["fp32", "fp64-ring", "bf16", "bf16-reduced-in-fp32", "autocast"],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_no_worse_than_the_reference(workers, world_size, dtype, autocast, kw):
    """Twice the unfused error against float64, and a few units in the last place: GEMMs are tiled otherwise."""
    unit = torch.finfo(torch.bfloat16 if autocast else dtype).eps
    for errors in workers(world_size).run(against_reference, dtype, autocast, kw, timeout=60):
        for name, (ours, theirs) in errors.items():
            assert ours <= 2 * theirs + 4 * unit, (name, ours, theirs)


def test_without_torch_distributed_there_is_one_rank():
    weight = torch.randn(5, 3, requires_grad=True)
    bias = torch.randn(5, requires_grad=True)
    x = torch.randn(2, 3, requires_grad=True)
    for linear in (fused_linear, fused_linear_reference):
        found = torch.autograd.grad(linear(x, weight, bias, out_features=5).square().sum(), (x, weight, bias))
        wanted = torch.autograd.grad(F.linear(x, weight, bias).square().sum(), (x, weight, bias))
        assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("linear", [fused_linear, fused_linear_reference])
@pytest.mark.parametrize(
    ("shape", "bias", "kw", "wanted"),
    [
        ((4, 3), None, {"out_features": 5}, r"weight_shard of rank 0.*\[5, in_features\] is needed"),
        ((5,), None, {"out_features": 5}, r"weight_shard"),
        ((5, 3), (4,), {"out_features": 5}, r"bias_shard of rank 0.*\(5,\) is needed"),
        ((5, 3), None, {"out_features": 5, "sizes": [4]}, r"add up to 4, but out_features=5"),
        ((5, 3), None, {"out_features": 5, "sizes": [4, 1]}, r"for each of 1 ranks"),
        ((5, 3), None, {"out_features": 5, "op": "max"}, r"'sum' or 'mean'"),
        ((5, 3), None, {"out_features": 5, "order": "spiral"}, r"spiral"),
    ],
)
def test_shards_that_do_not_fit(linear, shape, bias, kw, wanted):
    with pytest.raises(ValueError, match=wanted):
        linear(torch.zeros(2, 3), torch.zeros(shape), None if bias is None else torch.zeros(bias), **kw)


def test_an_input_that_does_not_fit():
    with pytest.raises(RuntimeError, match="3 input features"):
        fused_linear(torch.zeros(2, 4), torch.zeros(5, 3), out_features=5)
    with pytest.raises(RuntimeError, match=r"float32.*float64"):
        fused_linear(torch.zeros(2, 3).double(), torch.zeros(5, 3), out_features=5)
