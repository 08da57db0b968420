"""The GEMMs by slices: how sums over slices are rounded, what they cost in operations, weights [in, out]."""

from __future__ import annotations

import itertools
import random as rand
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from commfuse_dp.kernels import by_slices
from commfuse_dp.kernels.table import SliceEntry, SliceTable
from commfuse_dp.ops import linear as fused
from commfuse_dp.ops.gathered import gather_parameters
from commfuse_dp.ops.joined import JoinedPartials, JoinedRows, joining
from tests.unit.local_operand import LocalOperand

TOKENS, ROWS, COLUMNS = 16, 192, 48
LAYOUTS = ("rows", "flat", "transposed", "transposed-flat")


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def operand_of(layout: str, dtype: torch.dtype, world_size: int, *, bias: bool = False, rows: int = ROWS) -> LocalOperand:
    """The weight is [rows, COLUMNS] in all layouts; of flat ones nearly every range begins in the middle of a row."""
    transposed = "transposed" in layout
    params = [random(rows, COLUMNS, dtype=dtype)]
    if bias:
        params.append(random(COLUMNS if transposed else rows, dtype=dtype))
    bounds = None
    if "flat" in layout:
        ends = [owner * (rows * COLUMNS // world_size - 7) for owner in range(world_size)]
        bounds = list(itertools.pairwise([*ends, rows * COLUMNS]))
    return LocalOperand(params, 1, world_size, 1, transposed=transposed, flat_bounds=bounds)


def unfused(x: torch.Tensor, operand: LocalOperand, dtype: torch.dtype | None = None) -> torch.Tensor:
    weight, *bias = (param.to(dtype or param.dtype) for param in operand.params)
    return F.linear(x, weight.t() if operand.transposed else weight, *bias)


def error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return ((value.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("slices", [2, 8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_narrow_type_is_rounded_once(layout, dtype, slices):
    """Forward and dgrad against float64: at most 1.1 x the error of one GEMM. (Added up slice by slice: 5.7 x at 64 slices.)"""
    operand = operand_of(layout, dtype, slices, bias="flat" not in layout)
    x = random(TOKENS, operand.in_features, dtype=dtype, seed=1).requires_grad_()
    grad = random(TOKENS, operand.out_features, dtype=dtype, seed=2)
    stock, exact = (x.detach().to(kind).requires_grad_() for kind in (dtype, torch.float64))
    y = fused.fused_linear(x, operand, 0)
    y.backward(grad)
    wanted, stock_y = unfused(exact, operand, torch.float64), unfused(stock, operand)
    wanted.backward(grad.double())
    stock_y.backward(grad)
    assert y.dtype == x.grad.dtype == dtype
    assert error(y, wanted) <= 1.1 * error(stock_y, wanted)
    assert error(x.grad, exact.grad) <= 1.1 * error(stock.grad, exact.grad)


@pytest.mark.parametrize("slices", [2, 8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gap", [0, 3], ids=["dense", "gaps"])
def test_dgrad_by_blas_on_a_device_is_rounded_once(gap, dtype, slices):
    """As above for the products behind words; the table's order is not the rows', and may leave rows out."""
    size = ROWS // slices
    weight, dy = random(slices * (size + gap), COLUMNS, dtype=dtype), random(TOKENS, slices * (size + gap), dtype=dtype)
    starts = [place * (size + gap) for place in range(slices)]
    table = SliceTable([SliceEntry(weight[at : at + size].clone(), at) for at in starts[1:] + starts[:1]])
    chosen = torch.cat([torch.arange(at, at + size) for at in starts])
    exact = dy[:, chosen].double() @ weight[chosen].double()
    dx = torch.full((TOKENS, COLUMNS), torch.nan, dtype=dtype)
    by_slices.gemm_dgrad(dy, table, dx)
    assert error(dx, exact) <= 1.1 * error(dy[:, chosen] @ weight[chosen], exact)


class Operations(TorchDispatchMode):
    """Counts what computes or moves elements."""

    sees_inside_commfuse = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.rstrip("_")
        if name in ("mm", "addmm", "copy", "zero", "cat", "add", "sum", "clone", "_to_copy", "index"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def operations(operand: LocalOperand, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, int]]:
    """Of (forward, dgrad alone)."""
    operand.trainable = (False,) * len(operand.params)
    operand.gather_copies = False
    x = random(TOKENS, operand.in_features, dtype=dtype).requires_grad_()
    with Operations() as forward:
        y = fused.fused_linear(x, operand, 0)
    grad = random(TOKENS, operand.out_features, dtype=dtype)
    with Operations() as backward:
        fused.linear_backward(grad, x.detach(), operand, True)
    assert y.shape == grad.shape
    return dict(forward.counts), dict(backward.counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_wide_type_costs_one_gemm_a_slice_and_nothing_else(dtype):
    for layout in ("rows", "transposed"):
        forward, backward = operations(operand_of(layout, dtype, 8, rows=8 * 64), dtype)
        columns, total = {"mm": 8}, {"mm": 1, "addmm": 7}
        assert (forward, backward) == ((total, columns) if layout == "transposed" else (columns, total))


@pytest.mark.parametrize("layout", ["rows", "transposed"])
def test_slices_of_few_rows_share_a_gemm_for_a_copy_each(layout):
    """32 slices of 24 rows, 8 to a block; rank 1's own come first, so that the rows of rank 0 are a block of their own."""
    forward, backward = operations(operand_of(layout, torch.float32, 32, rows=768), torch.float32)
    columns, total = {"mm": 5, "copy": 32}, {"mm": 1, "addmm": 4, "copy": 32}
    assert (forward, backward) == ((total, columns) if layout == "transposed" else (columns, total))


def test_more_tokens_join_more_rows():
    """By shapes alone: results do not depend on time."""
    assert joining(768, 512) == (64, 192) and joining(768, 1024) == (128, 384)
    assert joining(100, 1024) == (26, 100)  # of two or three slices there is little to join


@pytest.mark.parametrize("tokens", [512, 1024])
def test_joined_products_are_those_of_whole_weights(tokens):
    """8 slices of 96 rows: apart with few tokens, four to a block with many."""
    operand = operand_of("rows", torch.float64, 8, rows=768)
    x, grad = random(tokens, COLUMNS).requires_grad_(), random(tokens, 768)
    with Operations() as counted:
        fused.fused_linear(x, operand, 0).backward(grad)
    assert ("copy" in counted.counts) == (tokens == 1024)
    weight = operand.params[0]
    assert torch.allclose(x.grad, grad @ weight, rtol=1e-12, atol=1e-10)
    assert torch.allclose(operand.partials[0], grad.t() @ x.detach(), rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("step", [1, -1], ids=["upwards", "downwards"])
def test_rows_are_joined_in_both_directions(step):
    weight, blocks = random(768, 3), []
    joined = JoinedRows(192, 3, torch.float64, weight.device)
    for owner in [(3 + step * place) % 32 for place in range(32)]:
        block = joined.put(24 * owner, weight[24 * owner : 24 * owner + 24])
        blocks += [(block[0], block[1].clone())] if block is not None else []
    blocks.append(joined.take())
    assert len({row for row, _ in blocks}) == len(blocks) == 5
    assert all(torch.equal(rows, weight[row : row + len(rows)]) for row, rows in blocks)
    assert sum(len(rows) for _, rows in blocks) == 768


@pytest.mark.parametrize("order", [[*range(24, 768, 24), 0], [*range(720, -24, -24), 744]], ids=["upwards", "downwards"])
def test_partials_of_few_rows_are_computed_together_and_once(order):
    """The first alone, for it does not show which way the order goes; a block never reaches into what was computed."""
    left, right = random(TOKENS, 768), random(TOKENS, COLUMNS)
    partials = JoinedPartials(left, right, 192)
    wanted = left.t() @ right
    with Operations() as counted:
        for row in order:
            out = torch.empty(24, COLUMNS)
            partials.fill(row, out)
            assert torch.allclose(out.double(), wanted[row : row + 24], rtol=1e-5, atol=1e-5)
    assert counted.counts["mm"] == 1 + 4 + 1


@pytest.mark.parametrize("seed", range(20))
def test_partials_of_any_cut_and_order(seed):
    rng = rand.Random(seed)
    rows = rng.randrange(1, 700)
    cuts = sorted({0, rows, *(rng.randrange(rows) for _ in range(rng.randrange(40)))})
    spans = list(itertools.pairwise(cuts))
    first = rng.randrange(len(spans))
    spans = spans[first:] + spans[:first]
    if rng.random() < 0.5:
        rng.shuffle(spans)
    left, right = random(3, rows, seed=seed), random(3, 2)
    partials, wanted = JoinedPartials(left, right, min(192, rows)), left.t() @ right
    for low, high in spans:
        out = torch.full((high - low, 2), torch.nan, dtype=torch.float64)
        partials.fill(low, out)
        assert torch.allclose(out, wanted[low:high], rtol=1e-13, atol=1e-13)


def test_rows_in_pieces_cost_one_gemm_each_or_one_together():
    """8 ranges that begin mid-row: 7 rows in 2 pieces. Before: 7 zeroings and 14 products more in forward, 14 in dgrad."""
    forward, backward = operations(operand_of("flat", torch.float32, 8, rows=9 * 64), torch.float32)
    assert forward == {"mm": 8 + 7, "copy": 14 + 7}
    assert backward == {"mm": 1, "addmm": 8, "copy": 14, "cat": 1}


def test_a_narrow_type_costs_one_gemm_and_a_copy_of_the_weight():
    _, backward = operations(operand_of("rows", torch.bfloat16, 8), torch.bfloat16)
    assert backward == {"mm": 1, "copy": 8}
    _, backward = operations(operand_of("rows", torch.bfloat16, 1), torch.bfloat16)
    assert backward == {"mm": 1}  # one slice needs no copy


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (3, 0)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_empty_weights(rows, columns, transposed, dtype):
    bias = torch.ones(columns if transposed else rows, dtype=dtype)
    operand = LocalOperand([torch.ones(rows, columns, dtype=dtype), bias], 0, 2, 1, transposed=transposed)
    x = torch.ones(2, operand.in_features, dtype=dtype, requires_grad=True)
    y = fused.fused_linear(x, operand, 0)
    assert torch.equal(y, bias.expand(2, -1))
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_order_of_a_weight_in_out_is_own_first_then_own_last():
    """in = 12 and out = 5 on 4 ranks: the bias is cut 2, 2, 1, 0, independently of the weight's rows."""
    operand = LocalOperand([torch.randn(12, 5), torch.randn(5)], 2, 4, 1, transposed=True)
    x = torch.randn(3, 12, requires_grad=True)
    fused.fused_linear(x, operand, 0).sum().backward()
    assert operand.visits[:4] == [("gather", 2), ("gather", 3), ("gather", 0), ("gather", 1)]
    assert operand.visits[4:] == [(what, owner) for owner in (3, 0, 1, 2) for what in ("produce", "consume")]


@pytest.mark.parametrize("transposed", [False, True])
def test_a_replicated_weight(transposed):
    """ZeRO-1/2: only the gradient is sharded."""
    operand = LocalOperand([random(7, 5)], 1, 3, 2, transposed=transposed)
    x, weight = random(2, 3, operand.in_features).requires_grad_(), operand.params[0].clone().requires_grad_()
    stock = x.detach().clone().requires_grad_()
    grad = random(2, 3, operand.out_features)
    y, wanted = (
        fused.replicated_linear(x, weight, operand),
        F.linear(stock, weight.t() if transposed else weight),
    )
    torch.testing.assert_close(y, wanted)
    wanted.backward(grad)
    y.backward(grad)
    torch.testing.assert_close(x.grad, stock.grad)
    torch.testing.assert_close(operand.partials[0], weight.grad)


@pytest.mark.parametrize("kind", ["linear", "transposed", "replicated"])
def test_a_bias_that_is_here_is_rounded_with_the_product(kind):
    """As in torch's own linear: added behind it, the result would be rounded twice."""
    operand = LocalOperand([random(64, 64).bfloat16()], 1, 3, 2, transposed=kind == "transposed")
    weight = operand.params[0].t() if kind == "transposed" else operand.params[0]
    x, grad = random(2, 150, 64, seed=1).bfloat16(), random(2, 150, 64, seed=2).bfloat16()
    biases = [(8 * random(64, seed=3)).bfloat16().requires_grad_() for _ in range(2)]
    if kind == "replicated":
        y = fused.replicated_linear(x, operand.params[0], operand, biases[0])
    else:
        y = fused.fused_linear(x, operand, 0, biases[0])
    stock = F.linear(x, weight, biases[1])
    exact = F.linear(x.double(), weight.double(), biases[1].detach().double())
    error, wanted = ((found.detach().double() - exact).square().mean().sqrt() for found in (y, stock))
    assert error <= 1.02 * wanted, error / wanted
    y.backward(grad)
    stock.backward(grad)
    torch.testing.assert_close(biases[0].grad, biases[1].grad, rtol=2**-7, atol=0)


@pytest.mark.parametrize("replicated", [False, True])
def test_a_bias_that_is_here_for_an_input_without_a_batch(replicated):
    operand = LocalOperand([random(6, 4)], 1, 3, 2)
    x, bias = random(4, seed=1), random(6, seed=3).requires_grad_()
    y = fused.replicated_linear(x, operand.params[0], operand, bias) if replicated else fused.fused_linear(x, operand, 0, bias)
    torch.testing.assert_close(y, F.linear(x, operand.params[0], bias))
    grad = random(6, seed=4)
    y.backward(grad)
    torch.testing.assert_close(bias.grad, grad)


def differentiated(run: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """A function by forward mode in two ways, by the transforms of torch.func, and by reverse over forward mode."""
    tangent = random(*x.shape, seed=5)
    with forward_ad.dual_level():
        found = [*forward_ad.unpack_dual(run(forward_ad.make_dual(x, tangent)))]
    y, change = torch.func.jvp(run, (x,), (tangent,))
    (y.sin().sum() + change.square().sum()).backward()
    found += [y, change, torch.func.grad(lambda given: run(given).sin().sum())(x), torch.func.vmap(run)(x)]
    return [part.detach() for part in (*found, torch.func.jacrev(run)(x), torch.func.jacfwd(run)(x))]


@pytest.mark.parametrize("kind", ["linear", "transposed", "replicated", "norm"])
def test_forward_mode_and_transforms(kind):
    """A plain layer over the whole parameters; the gradient of a backward through it reaches the owners."""
    shapes = [(5,), (5,)] if kind == "norm" else [(5, 7)] if kind == "transposed" else [(7, 5)]
    operand = LocalOperand([random(*shape, seed=9) for shape in shapes], 1, 3, 2, transposed=kind == "transposed")
    params = [param.clone().requires_grad_() for param in operand.params]

    def run(x: torch.Tensor) -> torch.Tensor:
        if kind == "norm":
            return F.layer_norm(x, (5,), *gather_parameters(operand, 0))
        if kind == "replicated":
            return fused.replicated_linear(x, operand.params[0], operand)
        return fused.fused_linear(x, operand, 0)

    def plain(x: torch.Tensor) -> torch.Tensor:
        if kind == "norm":
            return F.layer_norm(x, (5,), *params)
        return F.linear(x, params[0].t() if kind == "transposed" else params[0])

    x = random(2, 3, 5)
    for found, wanted in zip(differentiated(run, x), differentiated(plain, x), strict=True):
        torch.testing.assert_close(found, wanted)
    for partial, param in zip(operand.partials, params, strict=True):
        torch.testing.assert_close(partial, param.grad)


def test_autocast_leaves_float64_as_torch_does():
    operand = LocalOperand([random(7, 5)], 1, 3, 1)
    x = random(2, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fused.fused_linear(x, operand, 0).dtype == F.linear(x, operand.params[0]).dtype == torch.float64
        narrow = LocalOperand([random(7, 5, dtype=torch.float32)], 1, 3, 1)
        for call in (lambda: F.linear(x, narrow.params[0]), lambda: fused.fused_linear(x, narrow, 0)):
            with pytest.raises(RuntimeError, match="dtype"):
                call()
