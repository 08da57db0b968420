"""The fused linear against float64, apart from any transport: random shapes, uneven and empty shards, slices, dtypes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_dp.ops import linear as fused
from commfuse_dp.ops.gathered import gather_parameters
from commfuse_dp.ops.operands import operand_of, register_operand
from tests.support import graphs
from tests.support.cells import INDUCTOR
from tests.unit.local_operand import LocalOperand

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def tolerance(dtype: torch.dtype, terms: int) -> float:
    """Relative to the largest magnitude: 4 roundings, and the growth of the error of a sum of `terms`."""
    return 4 * torch.finfo(dtype).eps * max(terms, 1) ** 0.5


def close(actual: torch.Tensor, wanted: torch.Tensor, terms: int, rounded: torch.dtype | None = None) -> None:
    scale = max(wanted.abs().max().item() if wanted.numel() else 0.0, 1.0)
    worst = (actual.double() - wanted).abs().max().item() if wanted.numel() else 0.0
    assert worst <= tolerance(rounded or actual.dtype, terms) * scale, (worst, scale)


@st.composite
def cases(draw):
    world_size = draw(st.integers(1, 5))
    return {
        "world_size": world_size,
        "rank": draw(st.integers(0, world_size - 1)),
        "slices": draw(st.integers(1, 4)),
        "rows": draw(st.integers(1, 23)),
        "width": draw(st.integers(1, 17)),
        "lead": draw(st.sampled_from([(1,), (5,), (2, 3), (), (0,), (3, 1, 2)])),
        "bias": draw(st.booleans()),
        "dtype": draw(st.sampled_from(DTYPES)),
        "seed": draw(st.integers(0, 2**31 - 1)),
        "trainable": draw(st.tuples(st.booleans(), st.booleans())),
        "input_grad": draw(st.booleans()),
        "strided": draw(st.booleans()),
        "transposed": draw(st.booleans()),
        "flat": draw(st.none() | st.lists(st.floats(0, 1), min_size=world_size - 1, max_size=world_size - 1)),
    }


@settings(max_examples=250)
@given(cases())
def test_forward_and_backward_are_the_linear_of_the_whole_weight(case):
    generator = torch.Generator().manual_seed(case["seed"])

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case["dtype"])

    rows, columns = case["rows"], case["width"]  # of the weight
    outputs, inputs = (columns, rows) if case["transposed"] else (rows, columns)
    bounds = None
    if case["flat"] is not None:
        ends = [0, *sorted(int(cut * rows * columns) for cut in case["flat"]), rows * columns]
        bounds = list(itertools.pairwise(ends))
    params = [random(rows, columns)] + ([random(outputs)] if case["bias"] and bounds is None else [])
    trainable = case["trainable"][: len(params)]
    operand = LocalOperand(
        params,
        case["rank"],
        case["world_size"],
        case["slices"],
        trainable=trainable,
        transposed=case["transposed"],
        flat_bounds=bounds,
    )
    x = random(*case["lead"], inputs)
    if case["strided"] and x.dim() == 2:
        x = x.t().contiguous().t()
    x.requires_grad_(case["input_grad"])
    y = fused.fused_linear(x, operand, 0)
    exact = [p.double().requires_grad_() for p in params]
    exact_x = x.detach().double().requires_grad_()
    weight, *bias = exact
    wanted = F.linear(exact_x, weight.t() if case["transposed"] else weight, *bias)
    assert y.shape == wanted.shape and y.dtype == case["dtype"] and y.requires_grad == (case["input_grad"] or any(trainable))
    close(y.detach(), wanted.detach(), inputs)
    if not y.requires_grad:
        return
    grad = random(*wanted.shape)
    y.backward(grad)
    wanted.backward(grad.double())
    if case["input_grad"]:
        assert x.grad is not None
        close(x.grad, exact_x.grad, outputs)
    else:
        assert x.grad is None
    tokens = grad.numel() // outputs
    for partial, reference, wanted_now in zip(operand.partials, exact, trainable, strict=True):
        if wanted_now:
            close(partial, reference.grad, tokens)
        else:
            assert partial.isnan().all()  # nobody computed it
    assert operand.exchanges == 1 and operand.expected == 1


def test_order_own_first_then_own_last_and_wgrad_before_dgrad():
    operand = LocalOperand([torch.randn(12, 4), torch.randn(12)], rank=2, world_size=4, slices=1)
    x = torch.randn(3, 4, requires_grad=True)
    fused.fused_linear(x, operand, 0).sum().backward()
    assert operand.visits[:4] == [("gather", 2), ("gather", 3), ("gather", 0), ("gather", 1)]
    assert operand.visits[4:] == [(what, owner) for owner in (3, 0, 1, 2) for what in ("produce", "consume")]


def test_gradcheck_of_the_input():
    generator = torch.Generator().manual_seed(3)
    params = [torch.randn(7, 5, generator=generator, dtype=torch.float64), torch.randn(7, generator=generator).double()]
    x = torch.randn(2, 5, generator=generator, dtype=torch.float64, requires_grad=True)

    def function(value: torch.Tensor) -> torch.Tensor:
        return fused.fused_linear(value, LocalOperand(params, 1, 3, 2), 0)

    assert torch.autograd.gradcheck(function, (x,))


def test_no_grad_saves_nothing_and_expects_no_backward():
    operand = LocalOperand([torch.randn(6, 4)], 0, 2, 1)
    with torch.no_grad():
        y = fused.fused_linear(torch.randn(3, 4, requires_grad=True), operand, 0)
    assert not y.requires_grad and operand.expected == 0


@pytest.mark.parametrize(
    ("trainable", "input_grad", "bias_grad"),
    [((False,), False, False), ((True,), False, False), ((False,), True, False), ((False,), False, True)],
)
def test_the_output_wants_a_gradient_if_anything_does_that_it_is_made_of(trainable, input_grad, bias_grad):
    operand = LocalOperand([torch.randn(6, 4)], 0, 2, 1, trainable=trainable)
    x, bias = torch.randn(3, 4, requires_grad=input_grad), torch.randn(6, requires_grad=bias_grad)
    wanted = any(trainable) or input_grad or bias_grad
    y = fused.fused_linear(x, operand, 0, bias)
    assert (y.requires_grad, operand.expected) == (wanted, int(wanted))


def test_partials_in_a_narrower_type_are_rounded_once():
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(9, 6, generator=generator)
    operand = LocalOperand([weight, torch.randn(9, generator=generator)], 0, 2, 2, partial_dtype=torch.bfloat16)
    x, grad = torch.randn(20, 6, generator=generator, requires_grad=True), torch.randn(20, 9, generator=generator)
    fused.fused_linear(x, operand, 0).backward(grad)
    assert torch.equal(operand.partials[0], (grad.t() @ x.detach()).bfloat16())
    close(operand.partials[1], grad.double().sum(0), 20)


def test_autocast_computes_in_its_type_and_hands_on_in_the_parameters():
    generator = torch.Generator().manual_seed(6)
    params = [torch.randn(9, 6, generator=generator), torch.randn(9, generator=generator)]
    operand = LocalOperand(params, 1, 3, 2)
    x = torch.randn(4, 6, generator=generator, requires_grad=True)
    stock = [p.clone().requires_grad_() for p in params]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = fused.fused_linear(x, operand, 0)
        wanted = F.linear(x, *stock)
    assert y.dtype == wanted.dtype == torch.bfloat16
    close(y.detach(), wanted.detach().double(), 6)
    grad = torch.randn(4, 9, generator=generator).bfloat16()
    (dx,) = torch.autograd.grad(wanted, x, grad, retain_graph=True)
    y.backward(grad)
    assert x.grad.dtype == torch.float32
    close(x.grad, dx.double(), 9, torch.bfloat16)
    wanted.backward(grad)
    for partial, param in zip(operand.partials, stock, strict=True):
        assert partial.dtype == torch.float32
        close(partial, param.grad.double(), 4, torch.bfloat16)


@pytest.mark.parametrize("x", [torch.zeros(3, 5), torch.zeros(()), torch.zeros(3, 0)])
def test_an_input_of_the_wrong_width(x):
    with pytest.raises(RuntimeError, match=r"4 input features.*shape \("):
        fused.fused_linear(x, LocalOperand([torch.zeros(6, 4)], 0, 2, 1), 0)


def test_an_input_of_the_wrong_dtype_names_both():
    with pytest.raises(RuntimeError, match=r"float32.*float64"):
        fused.fused_linear(torch.zeros(3, 4).double(), LocalOperand([torch.zeros(6, 4)], 0, 2, 1), 0)


def test_twice_through_backward_is_refused_as_by_torch():
    operand = LocalOperand([torch.randn(6, 4)], 0, 2, 1)
    y = fused.fused_linear(torch.randn(3, 4, requires_grad=True), operand, 0).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


# ---- registered ops ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lead", [(5,), (2, 3)])
def test_opcheck_of_the_linear(lead):
    operand = LocalOperand([torch.randn(7, 4), torch.randn(7)], 1, 3, 2)
    handle = register_operand(operand)
    x = torch.randn(*lead, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.commfuse.linear.default, (x, operand.anchor, None, handle, 7, False, 0))
    assert operand.exchanges > 0  # the backward op ran, though nobody uses what it returns
    grad = torch.randn(*lead, 7)
    for needs_input_grad in (True, False):
        torch.library.opcheck(
            torch.ops.commfuse.linear_backward.default, (grad, x.detach(), operand.anchor.detach(), handle, needs_input_grad, 0)
        )


def test_a_bias_beside_the_operand_is_added_before_the_product_is_rounded():
    """DeepSpeed's, in a graph as without."""
    torch.manual_seed(0)
    x = torch.randn(33, 64, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(48, dtype=torch.bfloat16, requires_grad=True)
    operand = LocalOperand([torch.randn(48, 64, dtype=torch.bfloat16)], 0, 2, 2)
    handle = register_operand(operand)

    def call() -> torch.Tensor:
        return fused.fused_linear(x, operand, handle, bias)

    graphs.fresh()
    found = []
    for run in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        x.grad = bias.grad = None
        y = run()
        y.sum().backward()
        found.append((y.detach(), x.grad, bias.grad, operand.partials[0].clone()))
    for eager, compiled in zip(*found, strict=True):
        assert torch.equal(eager, compiled)
    assert not torch.equal(found[0][0], x.detach() @ operand.params[0].t() + bias.detach())  # rounded twice: another result


def test_under_autocast_a_compiled_linear_computes_the_bits_of_eager_mode():
    torch.manual_seed(0)
    x = torch.randn(33, 64, requires_grad=True)
    operand = LocalOperand([torch.randn(48, 64), torch.randn(48)], 0, 2, 2)
    handle = register_operand(operand)

    def call() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return fused.fused_linear(x, operand, handle)

    graphs.fresh()
    found = []
    for run in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        x.grad = None
        y = run()
        y.float().square().sum().backward()
        found.append((y.detach(), x.grad, *(partial.clone() for partial in operand.partials)))
    assert found[0][0].dtype == torch.bfloat16 and found[0][1].dtype == torch.float32
    for eager, compiled in zip(*found, strict=True):
        assert eager.dtype == compiled.dtype and torch.equal(eager, compiled)


def test_the_op_is_the_function():
    operand = LocalOperand([torch.randn(7, 4), torch.randn(7)], 1, 3, 2)
    handle = register_operand(operand)
    x = torch.randn(5, 4, requires_grad=True)
    y = torch.ops.commfuse.linear(x, operand.anchor, None, handle, 7, False, 0)
    assert torch.equal(y, fused.fused_linear(x, operand, handle))
    y.sum().backward()
    first, partials = x.grad.clone(), [p.clone() for p in operand.partials]
    x.grad = None
    fused.fused_linear(x, operand, handle).sum().backward()
    assert torch.equal(first, x.grad)
    assert all(torch.equal(a, b) for a, b in zip(partials, operand.partials, strict=True))


def test_a_compiled_function_keeps_the_weight_gradient_of_an_unused_input_gradient():
    """Dead code elimination must not take the backward op away when x needs no gradient."""
    operand = LocalOperand([torch.randn(7, 4), torch.randn(7)], 0, 2, 1)
    handle = register_operand(operand)
    graphs.fresh()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x: torch.Tensor) -> torch.Tensor:
        return fused.fused_linear(x, operand, handle).relu()

    x = torch.randn(5, 4)
    y = run(x)
    y.sum().backward()
    weight, bias = (p.clone().requires_grad_() for p in operand.params)
    F.linear(x, weight, bias).relu().sum().backward()
    close(operand.partials[0], weight.grad.double(), 5)
    close(operand.partials[1], bias.grad.double(), 5)


def called_twice(rank: int, world_size: int, backend: str) -> None:
    linear = LocalOperand([torch.randn(7, 4), torch.randn(7)], 0, 2, 1)
    norm = LocalOperand([torch.ones(7), torch.zeros(7)], 0, 2, 1)
    handles = register_operand(linear), register_operand(norm)
    graphs.fresh()

    @torch.compile(backend=backend, fullgraph=True)
    def run(x: torch.Tensor) -> torch.Tensor:
        y = [fused.fused_linear(x, linear, handles[0]) for _ in range(2)]
        return sum(F.layer_norm(part, (7,), *gather_parameters(norm, handles[1])) for part in y)

    run(torch.randn(5, 4, requires_grad=True)).sum().backward()
    for operand in (linear, norm):
        assert operand.exchanges == 2 and [owner for what, owner in operand.visits if what == "gather"] == [0, 1] * 2


# Under inductor make test has it as a part of the test of the order, whose graph is compiled anyway.
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=(INDUCTOR, pytest.mark.slow))])
def test_equal_calls_in_a_graph_are_two_calls(workers, backend):
    """One layer, called twice with one input, and a norm likewise: merged, the gradients would be half of what they are."""
    workers(1).run(called_twice, backend, timeout=200)  # inductor leaves variables in the environment


class Noted(LocalOperand):
    """Notes when it is called."""

    calls: list[tuple[str, int]]

    def gather(self, consume: Any) -> None:
        self.calls.append(("gather", self.out_features))
        super().gather(consume)

    def exchange(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("exchange", self.out_features))
        super().exchange(*args, **kwargs)


def in_order(rank: int, world_size: int, sizes: tuple[int, ...]) -> None:
    widths, calls = (64, 8, 256, 16, 128), []
    operands = [Noted([torch.randn(width, 8)], 0, 2, 1) for width in widths]
    handles = [register_operand(operand) for operand in operands]
    mixes = [torch.randn(width, 8) for width in widths]
    graphs.fresh()

    @torch.compile(backend="inductor", fullgraph=True, dynamic=False)
    def run(x: torch.Tensor) -> torch.Tensor:
        parts = [fused.fused_linear(x, *pair) for pair in zip(operands, handles, strict=True)]
        again = fused.fused_linear(x, operands[1], handles[1])  # equal to parts[1], and not to be merged with it
        return sum((parts[n].relu() @ mixes[n]).sin() for n in (2, 0, 4, 1, 3)) + again

    for operand in operands:
        operand.calls = calls
    called = (*widths, widths[1])
    for tokens in sizes:
        calls.clear()
        run(torch.randn(tokens, 8, requires_grad=True)).sum().backward()
        assert calls == [*(("gather", width) for width in called), *(("exchange", width) for width in reversed(called))]


@INDUCTOR
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(512,), (4, 512)])
def test_the_order_of_calls_is_the_programs_whatever_the_sizes(workers, sizes):
    """Calls that do not depend on each other: inductor would order them by size, and on ranks of other sizes otherwise."""
    workers(1).run(in_order, sizes, timeout=200)


def test_an_operand_is_not_kept_alive_by_its_number():
    handle = register_operand(LocalOperand([torch.zeros(2, 2)], 0, 1, 1))
    with pytest.raises(RuntimeError, match="compile the model again"):
        operand_of(handle)
