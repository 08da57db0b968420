"""Which modules are taken for linears: by what they compute, and only if nothing that may change enters."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from commfuse_dp.integrations.attach.linears import LinearForm, linear_form, linear_obstacle, own_forward
from torch import nn

FLAGS = {"scale": 1.0}
LIMIT = 5.0


class Inherited(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class ByMatmul(nn.Linear):
    """As Falcon's: torch rounds between the product and the bias, and under autocast the bias is not cast."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product = input @ self.weight.T
        return product if self.bias is None else product + self.bias


class BySuper(nn.Linear):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens)


class Conv1D(nn.Module):
    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.ones(nx, nf)), nn.Parameter(torch.ones(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view((*x.size()[:-1], self.nf))


@pytest.fixture
def hugging_face(monkeypatch):
    """Conv1D is found where transformers has it, if somebody has imported that."""
    module: Any = types.ModuleType("transformers.pytorch_utils")
    module.Conv1D = Conv1D
    monkeypatch.setitem(sys.modules, "transformers.pytorch_utils", module)


@pytest.mark.parametrize("kind", [nn.Linear, Inherited, ByMatmul, BySuper])
def test_linears(kind):
    for bias in (True, False):
        module = kind(4, 6, bias=bias)
        argument = "tokens" if kind is BySuper else "input"
        assert linear_form(module) == LinearForm(False, autocast=not (bias and kind is ByMatmul), argument=argument)
        assert linear_obstacle(module) is None


def test_conv1d(hugging_face):
    assert linear_form(Conv1D(6, 4)) == LinearForm(transposed=True, argument="x")


def test_conv1d_of_somebody_else():
    assert linear_form(Conv1D(6, 4)) is None and linear_obstacle(Conv1D(6, 4)) is None


def variant(change: str, **members: Any) -> type[nn.Linear]:
    """A linear that is one but for a change, as the text of its forward's body."""
    space: dict[str, Any] = {"torch": torch, "F": F, "FLAGS": FLAGS, "LIMIT": LIMIT, "Scaled": Scaled}
    exec(f"def forward(self, input):\n    y = F.linear(input, self.weight, self.bias)\n    {change}\n    return y", space)
    return type("Changed", (nn.Linear,), {"forward": space["forward"], **members})


class Scaled(torch.autograd.Function):
    """Straight through: values as before, gradients not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("y = y * self.scale", "reads 'scale'"),
        ("y = y * getattr(self, 'scale', 1.0)", "reads 'scale'"),
        ("y = y if getattr(self, 'adapter', None) is None else self.adapter(y)", "reads 'adapter'"),
        ("self.calls = 1", "changes 'calls'"),
        ("y = F.dropout(y, 0.5, self.training)", "reads 'training'"),
        ("y = y * FLAGS['scale']", "reads the global 'FLAGS'"),
        ("y = y.clamp(-5, 5)", "does not compute a linear"),
        ("y = F.dropout(y, 0.5)", "does not compute a linear"),
        ("y = y if self.bias is None else y + self.bias", "does not compute a linear"),
        ("y = Scaled.apply(y)", "does not compute a linear"),
        ("y = y.float()", "does not give what a linear gives"),
        ("y = (y, None)", "does not give what a linear gives"),
        ("y = y.t()", "does not give what a linear gives"),
        ("y = y if torch.is_grad_enabled() else y * 2", "does not compute a linear"),
    ],
)
def test_forwards_that_are_more_or_may_become_more(change, reason):
    module = variant(change, scale=1.0, adapter=None)(4, 6)
    state = torch.get_rng_state()
    assert linear_form(module) is None and reason in (linear_obstacle(module) or ""), linear_obstacle(module)
    assert torch.equal(state, torch.get_rng_state())


class Casting(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input.to(self.weight.dtype), self.weight, self.bias)


def test_a_forward_that_takes_what_torch_refuses():
    assert "torch.float32 times torch.bfloat16 a linear fails" in (linear_obstacle(Casting(4, 6)) or "")


def test_variables_of_an_enclosing_function_may_change():
    factor = [1.0]

    class Closed(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * factor[0]

    assert "'factor' of an enclosing function" in (linear_obstacle(Closed(4, 6)) or "")


class WithOptions(nn.Linear):
    def forward(self, input: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(input) * scale


def test_a_forward_with_options():
    assert "takes more than one input" in (linear_obstacle(WithOptions(4, 6)) or "")


def test_computed_by_its_own_forward_with_given_parameters():
    module, params = ByMatmul(4, 6), [torch.randn(6, 4), torch.randn(6)]
    x = torch.randn(2, 4)
    module.weight = nn.Parameter(torch.empty(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = own_forward(ByMatmul)(module, params, x)
        assert y.dtype == torch.float32 and torch.equal(y, x @ params[0].T + params[1])


class Below(variant("y = y * self.scale", scale=1.0)):  # type: ignore[misc]
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)


def test_what_a_parent_reads_counts():
    assert "reads 'scale'" in (linear_obstacle(Below(4, 6)) or "")


def test_more_parts_than_weight_and_bias():
    with_adapter, with_buffer = BySuper(4, 6), BySuper(4, 6)
    with_adapter.adapter = nn.Linear(4, 6)
    with_buffer.register_buffer("scale", torch.ones(1))
    assert "weight and bias: adapter" in (linear_obstacle(with_adapter) or "")
    assert "weight and bias: scale" in (linear_obstacle(with_buffer) or "")


def test_the_module_itself_is_left_alone(hugging_face):
    """Its parameters may be on no device, or cut; and what goes on around the trial does not enter it."""
    with torch.device("meta"):
        modules = [ByMatmul(4000, 6000, bias=False), Conv1D(6000, 4000)]
        before = [dict(vars(module)) for module in modules]
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            found = [linear_form(module) for module in modules]
    assert found == [LinearForm(False), LinearForm(True, argument="x")]
    assert [dict(vars(module)) for module in modules] == before
    modules[0].weight = nn.Parameter(torch.empty(0))  # as ZeRO-3 leaves it
    assert linear_form(modules[0]) == LinearForm(False)


def test_a_forward_that_is_replaced_in_its_class_is_tried_anew():
    class Later(nn.Linear):
        pass

    module = Later(4, 6)
    assert linear_form(module) == LinearForm(False)
    Later.forward = lambda self, input: super(Later, self).forward(input) * 2  # type: ignore[method-assign]
    assert linear_form(module) is None


def test_classes_are_not_kept_alive():
    import gc
    import weakref

    kind = variant("y = y + 0")
    assert linear_form(kind(4, 6)) == LinearForm(False)
    gone = weakref.ref(kind)
    del kind
    gc.collect()
    assert gone() is None
