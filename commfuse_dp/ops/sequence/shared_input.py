"""Column-parallel layers that are called one by one with the same replicated input: one backward for all of them.

    enter       x -> x'                     one node of autograd; it has all weights, and saves them and x
    output      x' -> y_i = x @ W_i.T       a node for each call; its backward leaves dy_i to the first
    backward    dx, dW_i from all dy_i      `column_backward`, once: autograd calls the node of `enter` behind all others

So dx is summed over the ranks once for all layers, as for those that are called together (column_parallel.py), and who is
called with x need not be known before. What is saved does not depend on it either: a recomputation (activation checkpointing)
saves what the forward has saved.

[Note: No circle]
A `SharedInput` is what the nodes have in common, so it must not hold x': that would hold the node that holds it, which Python
does not see. Who calls the layers holds both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commfuse_dp.collectives.end_of_backward import graph_task
from commfuse_dp.ops.compat import hides_inside, modes_active, transformed, transforms_active
from commfuse_dp.ops.gathered import ShardedWeights
from commfuse_dp.ops.linear import autocast
from commfuse_dp.ops.sequence.calls import Column
from commfuse_dp.ops.sequence.column_parallel import (
    announced_backward,
    announced_forward,
    column_backward,
    column_forward,
    prepare,
)
from commfuse_dp.ops.sequence.rows import Ranks
from commfuse_dp.transport.base import Transport


class SharedInput:
    """What layers that are called with one input have in common."""

    def __init__(
        self, call: Column, ranks: Ranks, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> None:
        """call, weights, biases: of all layers that may be called."""
        self.ranks = ranks
        self._call, self._weights, self._biases = call, weights, biases
        self._called: dict[int, ShardedWeights | None] = {}
        self._grads: dict[int, torch.Tensor] = {}
        self._task = -1  # number of the backward that they are of

    def output(self, number: int, entered: torch.Tensor, sharded: ShardedWeights | None = None) -> torch.Tensor:
        """Of one of the layers, once. sharded: its weight, if data parallelism shards it."""
        return _Output.apply(self, number, sharded, entered)  # type: ignore[no-any-return]

    def compute(self, number: int, x: torch.Tensor, sharded: ShardedWeights | None) -> torch.Tensor:
        """Without autograd."""
        self._called[number] = sharded
        compute = announced_forward if modes_active() and hides_inside() else column_forward
        if sharded is None:
            weights, biases = [self._weights[number]], [self._biases[number]]
        else:
            weights, biases = sharded.weights, sharded.biases
        (y,), _ = compute(x, weights, biases, self._call.of((number,)), self.ranks, sharded)
        if sharded is not None:
            sharded.release()
        return y

    def take(self, number: int, grad: torch.Tensor | None) -> None:
        """A layer's part in the backward under way."""
        grads = self._taken()
        if grad is not None:
            grads[number] = grad

    def _taken(self) -> dict[int, torch.Tensor]:
        """Gradients of outputs in the backward under way. One that did not come to x, or was broken off, may have left some."""
        if self._task != graph_task():
            self._task = graph_task()
            self._grads.clear()
        return self._grads

    def backward(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """(gradient of x, of all weights, of all biases); of sharded ones they leave, and are None."""
        taken = self._taken()
        numbers, count = sorted(self._called), len(self._call.want_weights)
        grads = [taken.get(number) for number in numbers]
        taken.clear()
        parts = [part for part in (self._called[number] for number in numbers) if part is not None]
        sharded = ShardedWeights.again(parts) if parts else None
        own = sharded.weights if sharded is not None else [weights[number] for number in numbers]
        compute = announced_backward if modes_active() and hides_inside() else column_backward
        dx, dws, dbs = compute(grads, x, own, self._call.of(numbers), self.ranks, sharded)
        if sharded is not None:
            sharded.release()
            return dx, *[None] * count
        found: list[torch.Tensor | None] = [None] * (2 * count)
        for number, dw, db in zip(numbers, dws, dbs, strict=True):
            found[number], found[count + number] = dw, db
        return dx, *found


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: SharedInput, whole: bool, x: torch.Tensor, *params: torch.Tensor | None) -> torch.Tensor:
        """params: weights and biases; or (not whole) the anchors of what is sharded."""
        ctx.set_materialize_grads(False)
        ctx.shared = shared
        ctx.save_for_backward(x, *(params[: len(params) // 2] if whole else ()))
        return x.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: None) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        return None, None, *ctx.shared.backward(x, weights)


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shared: SharedInput, number: int, sharded: ShardedWeights | None, entered: torch.Tensor
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.shared, ctx.number = shared, number
        return shared.compute(number, entered, sharded)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, ...]:
        ctx.shared.take(ctx.number, grad)
        return None, None, None, None


def enter(
    name: str,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    *,
    slices_per_rank: int | None,
    order: str,
    transport: Transport,
    sharded: ShardedWeights | None = None,
) -> tuple[SharedInput, torch.Tensor]:
    """(what the layers have in common, x' for `SharedInput.output`). weights, biases: of all layers that may be called with x,
    [..., D]. sharded: whose weights these are.

    Raises as `column_parallel` does."""
    if torch.is_autocast_enabled(x.device.type):
        x, weights = autocast(x), [autocast(weight) for weight in weights]
        biases = [None if bias is None else autocast(bias) for bias in biases]
    if transforms_active():
        raise transformed(name)
    params, ranks = (*weights, *biases), (None, transport)
    trainable = sharded.trainable if sharded is not None else None
    call = prepare(name, x, weights, biases, params, 0, None, ranks, "shard", "replicated", slices_per_rank, order, trainable)
    if sharded is None:
        shared = SharedInput(call, ranks, [w.detach() for w in weights], [None if b is None else b.detach() for b in biases])
    else:
        shared, params = SharedInput(call, ranks, (), ()), tuple(sharded.anchors)
        sharded.release()
    return shared, _Enter.apply(shared, sharded is None, x.contiguous(), *params)


__all__ = ["SharedInput", "enter"]
