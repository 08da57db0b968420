"""What the ops are given: a sharded weight (and bias) whose slices somebody moves.

Compiled graphs, whose ops take tensors and numbers only, find it under a number: `register_operand`, `operand_of`.

[Note: Calls in graphs]
To a compiler the registered ops are functions of their arguments, and what it may do to such calls is not what ranks may do
that communicate in them:

* Equal calls are merged. A layer that is called twice with the same input then computes its output once, which is right, and,
  where the gradients are equal too, its backward once, which is half of the weight's gradient. So each call in a graph has a
  number, given when the graph is traced: to dynamo a constant without a guard, so that blocks of one kind still share a graph.
* Calls that do not depend on each other are reordered: by inductor, to save memory, in an order that depends on sizes. Ranks
  with batches of other sizes would exchange in another order. So this pass is switched off before inductor gets the graph.

Ops registered with ordered effects would be neither merged nor reordered, but torch 2.13 fails on them in a checkpoint within a
graph ("expected all tensors_saved_with_vc_check to be Tensors").
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from commfuse_dp.errors import CommFuseError
from commfuse_dp.ops.compat import constant_in_graphs, prepare_compiler
from commfuse_dp.ops.numbers import Numbers
from commfuse_dp.ops.pieces import Piece


class ByOwner(Protocol):
    """A slice, as far as the ops look at it: whose rows they are."""

    @property
    def owner(self) -> int: ...


Visit = Callable[[Any, "Sequence[Piece]"], None]  # (ByOwner, pieces)


class WholeProducts(Protocol):
    """One kernel a product, which turns to slices as they arrive."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        """False: nothing was done, go by slices."""
        ...

    def backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        dx: torch.Tensor | None,
        consume: Visit | None,
        produce: Visit | None,
    ) -> None:
        """As `exchange`, whose callbacks serve for what has to go by slices."""
        ...


class ShardedOperand(Protocol):
    """A weight (and bias) sharded along dim 0, whose slices somebody moves: the engine, or the plain collectives."""

    name: str
    out_features: int
    in_features: int
    transposed: bool  # the weight is [in, out]: y = x @ W + b, and the slices cut K; otherwise [out, in]: y = x @ W.T + b
    has_bias: bool  # a sharded one, that travels with the weight
    anchor: torch.Tensor  # a new one, of another value, with every set of parameters

    @property
    def split_rows(self) -> tuple[int, ...]:
        """Rows of the weight that come in several pieces."""

    def expect_backward(self) -> None:
        """Autograd records the forward that follows: an `exchange` will come for it. (Inside an autograd Function, and in a
        compiled graph, gradients always look disabled, so that `gather` cannot tell by itself.)"""

    def gather(self, consume: Visit) -> None:
        """consume(slice, pieces) for every slice, own first."""

    def exchange(self, consume: Visit | None, produce: Visit | None) -> None:
        """produce(slice, pieces), then consume(slice, pieces), for every slice, own last. Pieces are produced of the parts that
        want a gradient now, in the dtype in which partial gradients travel; nothing is, if none does."""

    @property
    def whole(self) -> WholeProducts | None:
        """Products in one kernel each (GPUs); None: by slices only."""

    @property
    def trainable(self) -> tuple[bool, ...]:
        """Which of (weight, bias) want a gradient now."""


class Anchored(Protocol):
    name: str
    anchor: torch.Tensor


def check_same_parameters(operand: Anchored, anchor: torch.Tensor) -> None:
    """Raise CommFuseError if the operand stands for other parameters now than when its anchor was `anchor`."""
    # A graph hands on the memory or a copy of it. Comparing values of a device would wait for it: only if it has to be.
    if anchor.data_ptr() != operand.anchor.data_ptr() and int(anchor) != int(operand.anchor):
        raise other_parameters(operand.name)


def other_parameters(layer: str) -> CommFuseError:
    """What is raised where the parameters of one call would be mixed up with those of another."""
    return CommFuseError(
        f"layer {layer!r} has been given another set of parameters (by torch.func.functional_call, say) than the step under "
        "way was begun with. CommFuse serves one set at a time: call backward() for one set before the forward with the next "
        "(gradients add up as ever; after set_requires_gradient_sync(False), reduce them before), swap sets for whole models, "
        f"not inside their forward, or leave the layer to the framework with CommFuseConfig(exclude=[{layer!r}])."
    )


# ---- numbers for compiled graphs -------------------------------------------------------------------------------------
_calls = itertools.count(1)
_OPERANDS: Numbers[Any] = Numbers(
    "this compiled graph uses a layer whose CommFuse integration was removed: compile the model again"
)
register_operand, operand_of = _OPERANDS.of, _OPERANDS.find


@constant_in_graphs
def call_number() -> int:
    """A number for each call that is traced: see [Note: Calls in graphs]. Runs while dynamo traces, before inductor."""
    prepare_compiler()
    return next(_calls)
