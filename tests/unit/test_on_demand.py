"""Parameters read beside their layer: what is answered at once, what gathers, where gradients go, what is refused."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from commfuse_dp.ops.linear import fused_linear
from commfuse_dp.ops.on_demand import Reading, standing_for
from tests.unit.local_operand import LocalOperand


class Named(NamedTuple):
    name: str
    parameter: torch.Tensor


class Summing(LocalOperand):
    """Adds up what its exchanges bring, as the engine's owners do."""

    def exchange(self, consume, produce, *, dtype=None):
        super().exchange(consume, produce, dtype=dtype)
        if produce is not None and any(self.trainable):
            self.total = [a + b for a, b in zip(getattr(self, "total", [0.0] * 2), self.partials, strict=False)]


def a_reading(dtype: torch.dtype = torch.float32, **kw) -> tuple[Reading, Summing, list[Reading]]:
    generator = torch.Generator().manual_seed(5)
    params = [torch.randn(shape, generator=generator).to(dtype) for shape in ((7, 5), (7,))]
    operand = Summing(params, 1, 3, 1, **kw)
    gathers: list[Reading] = []
    sources = [Named(name, nn.Parameter(p.float())) for name, p in zip(("up.weight", "up.bias"), params, strict=True)]
    return Reading(operand, sources, gathers.append), operand, gathers


def test_what_it_is_is_answered_without_a_gather():
    reading, operand, gathers = a_reading(torch.bfloat16, trainable=(True, False))
    weight, bias = reading.tensors()
    assert isinstance(weight, torch.Tensor) and isinstance(weight, nn.Parameter)
    assert (weight.dtype, weight.shape, weight.ndim, weight.numel(), weight.size(0)) == (torch.bfloat16, (7, 5), 2, 35, 7)
    assert weight.device == torch.device("cpu") and weight.stride() == (5, 1) and weight.is_contiguous()
    assert weight.is_floating_point() and not weight.is_cuda and not weight.is_sparse and weight.layout is torch.strided
    assert weight.element_size() == 2 and weight.nbytes == 70 and len(weight) == 7
    assert weight.is_leaf and weight.grad is None and weight.grad_fn is None and weight.requires_grad and not bias.requires_grad
    assert weight.data.dtype is torch.bfloat16 and weight.detach().shape == (7, 5) and not weight.detach().requires_grad
    assert not isinstance(weight.data, nn.Parameter)
    assert weight.new_zeros(3).dtype is torch.bfloat16 and torch.zeros_like(weight).shape == (7, 5)
    assert weight.to(torch.bfloat16) is weight and torch.ones(2).to(weight.dtype).dtype is torch.bfloat16
    assert "up.weight" in repr(weight) and "(7, 5)" in f"{weight}"
    assert standing_for(weight) is reading.sources[0].parameter and standing_for(3) == 3
    assert gathers == [] and operand.reads == 0 and operand.expected == 0


USES = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "linear, functional ties": lambda x, w, b: F.linear(F.embedding(torch.tensor([3, 1, 3]), w), w),
    "matmul": lambda x, w, b: x @ w.t() + b,
    "mT": lambda x, w, b: torch.matmul(x, w.mT),
    "einsum": lambda x, w, b: torch.einsum("ti,oi->to", x, w),
    "arithmetic": lambda x, w, b: (w + 1) * 2 - w / 3 + b[:, None],
    "reversed": lambda x, w, b: 1 - w,
    "sums": lambda x, w, b: w.sum() + w.square().mean() + w.norm() + torch.linalg.vector_norm(b),
    "indexing": lambda x, w, b: w[2:5, ::2].sum() + w[0] @ w[3] + w[torch.tensor([1, 1])].sum() + b[-1],
    "views": lambda x, w, b: w.view(-1)[3] * w.reshape(5, 7) + w.flatten()[:7] + w.unsqueeze(0).expand(2, 7, 5).sum(),
    "chunks": lambda x, w, b: w.chunk(2)[0].sum() * torch.cat([w, w]).sum() + torch.stack([b, b]).sum(),
    "conversions": lambda x, w, b: w.double().sum() + w.to(torch.float64).float().sum() + w.clone().sum(),
    "norms": lambda x, w, b: F.layer_norm(x @ x.t(), (4,), w[:4, 0], b[:4]),
    "detached": lambda x, w, b: x @ w.detach().t() + w.data.sum() + b,
    "autocast": lambda x, w, b: _autocast(x, w, b),
    "no_grad": lambda x, w, b: x @ w.t() * _no_grad(w),
}


def _autocast(x, w, b):
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, w, b)


def _no_grad(w):
    with torch.no_grad():
        return w.abs().max()


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
def test_values_and_gradients_of_any_use(use):
    reading, operand, gathers = a_reading()
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(6))
    plain = [p.clone().requires_grad_() for p in operand.params]
    wanted, got = use(x, *plain), use(x, *reading.tensors())
    assert type(got) is torch.Tensor and torch.equal(got, wanted) and got.requires_grad == wanted.requires_grad
    assert len(gathers) == operand.reads == 1 and operand.expected == 1
    got.float().square().sum().backward()
    wanted.float().square().sum().backward()
    assert operand.exchanges == 1, "all uses bring one gradient"
    for total, param in zip(operand.total, plain, strict=True):
        assert torch.equal(total, param.grad if param.grad is not None else torch.zeros_like(param))


def test_modes_of_the_reader_do_not_stick():
    """Read under no_grad or in inference mode, used outside: a parameter is a parameter."""
    reading, operand, _ = a_reading()
    with torch.inference_mode():
        weight, _ = reading.tensors()
        assert (weight + 1).is_inference()
    assert weight.requires_grad and not weight.is_inference() and operand.expected == 0
    weight.sum().backward()
    assert operand.expected == 1 and torch.equal(operand.total[0], torch.ones(7, 5))


def test_without_gradients_nothing_is_expected():
    reading, operand, _ = a_reading()
    with torch.no_grad():
        assert not (reading.tensors()[0] + 1).requires_grad
    frozen, operand2, _ = a_reading(trainable=(False, False))
    assert not (frozen.tensors()[0] + 1).requires_grad
    assert operand.expected == operand2.expected == 0


def test_values_given_up_are_gathered_again_when_the_backward_asks():
    reading, operand, gathers = a_reading()
    x = torch.randn(4, 5, requires_grad=True)
    weight, bias = reading.tensors()
    y = F.linear(x, weight, bias)
    reading.release()
    assert reading._wholes is None and len(gathers) == 1
    y.backward(torch.ones_like(y))
    assert len(gathers) == 2 and torch.equal(x.grad, torch.ones_like(y) @ operand.params[0])


def test_beside_the_layers_own_call_and_under_checkpointing():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(4, 5, generator=generator)
    for reentrant in (None, False, True):
        reading, operand, _ = a_reading()
        plain = [p.clone().requires_grad_() for p in operand.params]

        def block(x, w, b, own):
            return own(x) * 2 + F.linear(x.to(w.dtype), w) + (w * w).mean() + b.sum()

        def mine(x, operand=operand, reading=reading):
            return block(x, *reading.tensors(), lambda x: fused_linear(x, operand, 0))

        def stock(x, plain=plain):
            return block(x, *plain, lambda x: F.linear(x, *plain))

        inputs = [x.clone().requires_grad_() for _ in range(2)]
        for run, leaf in zip((mine, stock), inputs, strict=True):
            out = run(leaf) if reentrant is None else checkpoint(run, leaf, use_reentrant=reentrant)
            out.square().sum().backward()
        assert torch.allclose(inputs[0].grad, inputs[1].grad, rtol=1e-5)
        for total, param in zip(operand.total, plain, strict=True):
            assert torch.allclose(total, param.grad, rtol=1e-5), reentrant
        assert operand.exchanges == 2


WRITES = {
    "in place": lambda w: w.add_(1),
    "out=": lambda w: torch.add(torch.ones(7, 5), 1, out=w),
    "data": lambda w: w.data.mul_(0),
    "detach": lambda w: w.detach().zero_(),
    "data =": lambda w: setattr(w, "data", torch.zeros(7, 5)),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "index": lambda w: w.__setitem__(0, 1.0),
    "view of data": lambda w: w.data[0].zero_(),
    "view": lambda w: w[0].zero_(),
    "transposed": lambda w: w.t().copy_(torch.zeros(5, 7)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_writes_are_refused(write):
    reading, _, _ = a_reading()
    weight, _ = reading.tensors()
    with pytest.raises(RuntimeError, match=r"'up\.weight' was written to.*CommFuse.*exclude=\['up'\]"), torch.no_grad():
        write(weight)


def test_what_would_see_a_part_of_the_gradient_is_refused():
    reading, _, _ = a_reading()
    weight, _ = reading.tensors()
    loss = weight.sum()
    for use in (
        lambda: torch.autograd.grad(loss, weight),
        lambda: weight.register_hook(print),
        lambda: weight.register_post_accumulate_grad_hook(print),
    ):
        with pytest.raises(RuntimeError, match=r"'up\.weight' inside a forward: CommFuse.*exclude=\['up'\]"):
            use()


def test_what_needs_memory_gets_it():
    reading, operand, gathers = a_reading()
    weight, bias = reading.tensors()
    assert weight.tolist() == operand.params[0].tolist() and weight.data_ptr() != 0
    assert (weight.detach().numpy() == operand.params[0].numpy()).all()
    with pytest.raises(RuntimeError, match="requires grad"):
        weight.numpy()
    twin = copy.deepcopy(bias)
    assert type(twin) is nn.Parameter and twin.is_leaf and torch.equal(twin, operand.params[1])
    file = io.BytesIO()
    torch.save({"bias": bias}, file)
    file.seek(0)
    loaded = torch.load(file)["bias"]
    assert type(loaded) is nn.Parameter and torch.equal(loaded, operand.params[1])
    assert len(gathers) == 1


def test_requires_grad_and_grad_are_those_of_the_parameter_itself():
    reading, _, _ = a_reading()
    weight, _ = reading.tensors()
    own = reading.sources[0].parameter
    own.grad = torch.ones(7, 5)
    assert weight.grad is own.grad
    weight.grad = None
    assert own.grad is None
    assert weight.requires_grad_(False) is weight
    assert not reading.sources[0].parameter.requires_grad


def test_a_reading_is_freed():
    reading, _operand, gathers = a_reading()
    weight, bias = reading.tensors()
    kept = weight.data
    (weight.sum() + bias.sum() + kept.sum()).backward()
    gathers.clear()
    watched = [weakref.ref(reading), weakref.ref(weight)]
    del reading, weight, bias, kept
    gc.collect()
    assert [reference() for reference in watched] == [None, None]
