"""Which tensors a forward has returned, whatever it has put them into."""

from __future__ import annotations

import collections
import dataclasses
import gc
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from commfuse_dp.integrations.attach.root import hook_root, tensors_in
from commfuse_dp.integrations.attach.transaction import Transaction
from torch import nn
from torch.utils import _pytree


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any = None


@dataclasses.dataclass
class Entries(collections.OrderedDict):  # as the outputs of transformers
    first: Any = None

    def __post_init__(self) -> None:
        self["first"] = self.first


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value
        self.layer = nn.Linear(2, 2)  # not returned, but referred to


Named = collections.namedtuple("Named", "first second")
A, B, C = (torch.full((1,), float(number)) for number in range(3))


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        (A, {A}),
        (None, set()),
        ((A, [B, {"x": C}]), {A, B, C}),
        (Named(A, (B,)), {A, B}),
        (Pair(A, B), {A, B}),
        (Pair(Pair(A, [B]), {"x": C}), {A, B, C}),
        ([Pair(A), Pair(B)], {A, B}),
        ({"x": Pair(A, "text")}, {A}),
        (Entries(A), {A}),
        ((Entries(A), B), {A, B}),
        (Plain(A), {A}),
        (Plain([Pair(A), B]), {A, B}),
        (Pair(Plain(A), B), {B}),  # a class of the user's inside of something else stays closed
        (collections.UserDict({"x": A}), {A}),
        (Pair, set()),
    ],
)
def test_tensors_are_found_in_whatever_a_forward_returns(output: Any, wanted: set[torch.Tensor]) -> None:
    found = tensors_in(output)
    assert {id(tensor) for tensor in found} == {id(tensor) for tensor in wanted}


def test_an_output_that_refers_to_itself_is_entered_once() -> None:
    output = Pair(A)
    output.second = [output, B]
    assert {id(tensor) for tensor in tensors_in(output)} == {id(A), id(B)}


def test_nothing_is_left_for_the_garbage_collector() -> None:
    """Once a step: where collections are switched off, what refers to itself would stay for ever."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for output in (A, (A, {"x": B}), Pair(A, Pair(B)), Entries(A)):
            tensors_in(output)
            gc.collect()
            left = [found for found in gc.garbage if isinstance(found, FunctionType) and found.__module__ == _pytree.__name__]
            assert not left, output  # whatever else this process leaves behind
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


class Weighted(nn.Linear):
    def forward(self, x: torch.Tensor, weighted: bool = True) -> Any:
        return super().forward(x), self.weight if weighted else None


def test_a_parameter_that_forwards_return_has_one_hook():
    """Which another forward does not take away, and none once everything is taken back."""
    told = collections.Counter()
    engine = SimpleNamespace(breakage=SimpleNamespace(forward_raised=None))
    for name in ("begin_step", "enter_forward", "end_forward", "leave_forward", "arm"):
        setattr(engine, name, lambda *_, name=name: told.update([name]))
    model, transaction = Weighted(2, 2), Transaction()
    hook_root(transaction, model, engine)
    for use in (0, 1, 1):
        outputs = model(torch.ones(2))
        assert len(model.weight._backward_hooks) == 1
        told.clear()
        outputs[use].sum().backward()
        assert told["arm"]
    outputs = model(torch.ones(2))
    model(torch.ones(2), weighted=False)
    told.clear()
    outputs[1].sum().backward()
    assert told["arm"]
    transaction.roll_back()
    assert not model.weight._backward_hooks
