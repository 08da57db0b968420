"""A function of tokens whose weights are divided among the ranks, such as a mixture's experts: each rank has a part of each.

    y = sharded_experts(name, compute, x, index, weights, params, sizes, place)     # y: of own tokens, summed over the ranks

R ranks; rank j keeps t_j tokens x_j [t_j, D], and the experts that they go to: index_j and weights_j [t_j, k]. E(x, index,
weights), [t, D], is what this rank's parts make of some tokens; the sum over the ranks is the result.

| pass | computed for a slice of rank j's tokens | moves |
| --- | --- | --- |
| forward | P_j = E(x_j, index_j, weights_j) | x_j, index_j, weights_j in, as one message; P_j to j |
| backward | dx_j, dweights_j, terms of the parameters' gradients | dy_j in; dx_j, dweights_j to j |

What is gathered and what is summed up, 4 U in all (U = (R-1)/R x tokens x D), moves beside the experts' own compute: it is the
program `through` of program/layer.py. E is any function that autograd follows: the graph of each slice is made in forward and
gone through in backward.

[Note: Graphs beside autograd's]
The graph of a slice cannot be saved for backward, and held by the node it would defeat activation checkpointing, which computes
a forward again and hands what it has saved to the first forward's node. So graphs are held by the memory of a tensor that is
saved: who drops the tensor drops them, and who hands it on, detached even, hands them on. Hooks on saved tensors do not reach
inside. A hook that copies the tensor loses them: then backward gathers the tokens and computes them again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from commfuse_dp.collectives.bound import Owner, Rows, Types
from commfuse_dp.collectives.execution import Bindings
from commfuse_dp.collectives.sessions import begin, execute
from commfuse_dp.ops.compat import unseen
from commfuse_dp.ops.sequence.rows import (
    RESULTS,
    TENSOR_PARALLEL,
    TOKENS,
    Place,
    agree_on,
    check_dtype,
    gathered_rows,
    moves,
    summed_rows,
)

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Tokens of an expert in a slice. Each reads its weights anew for every slice: on one core without a link a step by slices of
# 64, 128, 256, 512 took 1.21, 1.06, 0.99, 0.93 times as long as stock's: benchmarks/results/2026-11-28_mixture.md.
THIN = 128


class _Slice(NamedTuple):
    """What was computed of some tokens. inputs: x and weights, as leaves."""

    inputs: tuple[torch.Tensor, torch.Tensor]
    out: torch.Tensor


class _Graphs(bytearray):
    """Of all slices, by their first row; and the parameters in them, as leaves. See [Note: Graphs beside autograd's]."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        super().__init__(1)
        self.params = params
        self.slices: dict[int, _Slice] = {}

    def token(self) -> torch.Tensor:
        token = torch.frombuffer(self, dtype=torch.uint8)
        _alive[token.data_ptr()] = self
        return token


_alive: weakref.WeakValueDictionary[int, _Graphs] = weakref.WeakValueDictionary()


class _Call(NamedTuple):
    name: str
    compute: Compute
    place: Place
    sizes: tuple[int, ...]  # tokens of every rank
    at_once: bool  # all tokens are one slice
    trains: bool

    def run(self, rows: tuple[Rows, ...], bindings: Sequence[Bindings], device: torch.device) -> None:
        place = self.place
        session = begin(place.group, place.transport, device, TENSOR_PARALLEL)
        execute(self.name, moves((place.order, place.slices_per_rank, place.rank), self.sizes, rows), bindings, session, device)

    def through(
        self, own: torch.Tensor, function: Callable[[int, torch.Tensor], torch.Tensor], out: torch.Tensor | None
    ) -> None:
        """function(first row, rows) of slices of all ranks' rows, summed over the ranks: the own rows of it to out, if it is
        not called for what it does alone."""
        gather = gathered_rows(own.shape[1], own.dtype)
        partials: dict[int, torch.Tensor] = {}

        def consume(owner: Owner, rows: torch.Tensor) -> None:
            partials[owner.start] = function(owner.start, rows)

        if self.at_once:
            whole = own.new_empty(sum(self.sizes), own.shape[1])
            whole.split(self.sizes)[self.place.rank].copy_(own)
            self.run((gather,), (Bindings(own, target=whole),), own.device)
            partials[0] = function(0, whole)
            if out is not None:
                self.sum(partials, out)
        elif out is None:
            self.run((gather,), (Bindings(own, consume=consume),), own.device)
        else:
            rows = gather._replace(tensor=TOKENS), Rows(RESULTS, (out.shape[1],), Types.summed(out.dtype, out.dtype))
            self.run(rows, (Bindings(own, consume=consume), _leaving(partials, out)), own.device)

    def sum(self, partials: dict[int, torch.Tensor], out: torch.Tensor) -> None:
        """partials: by the first row of each slice."""
        bindings = Bindings(partials[0], target=out) if self.at_once else _leaving(partials, out)
        self.run((summed_rows(out.shape[1], out.dtype, out.dtype),), (bindings,), out.device)


def _leaving(partials: dict[int, torch.Tensor], out: torch.Tensor) -> Bindings:
    return Bindings(target=out, produce=lambda owner, buffer: buffer.copy_(partials.pop(owner.start)))


class _Packed(NamedTuple):
    """x, weights and index of a token in one row of x's dtype; their bits, where the dtypes differ."""

    features: int
    k: int
    weights: torch.dtype
    indices: torch.dtype

    @classmethod
    def of(cls, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> tuple[_Packed, torch.Tensor]:
        narrow = _WHOLE_NUMBERS[x.dtype.itemsize]
        fine = weights if weights.dtype.itemsize >= x.dtype.itemsize else weights.to(x.dtype)
        how = cls(int(x.shape[1]), int(index.shape[1]), weights.dtype, index.dtype)
        return how, torch.cat((x, fine.contiguous().view(x.dtype), index.to(narrow).view(x.dtype)), dim=1)

    def taken(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(x, index, weights): x is a view."""
        narrow, wide = _WHOLE_NUMBERS[rows.dtype.itemsize], self.weights.itemsize > rows.dtype.itemsize
        x, weights, index = rows.split((self.features, int(rows.shape[1]) - self.features - self.k, self.k), dim=1)
        weights = weights.contiguous()
        return (
            x,
            index.contiguous().view(narrow).to(self.indices),
            weights.view(self.weights) if wide else weights.to(self.weights),
        )


def sharded_experts(
    name: str,
    compute: Compute,
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    params: Sequence[torch.Tensor],
    sizes: Sequence[int],
    place: Place,
    experts: int = 1,
) -> torch.Tensor:
    """The own tokens' sum over the ranks of what each rank's parts of the experts make of them.

    Args:
        compute: (x [t, D], index [t, k], weights [t, k], params) -> [t, D], for any t: token by token, by the same function on
            all ranks, each with its own params.
        x: [t_r, D], this rank's tokens; index: [t_r, k], whole numbers; weights: [t_r, k], in floating point.
        params: this rank's parts of the experts.
        sizes: t_j of every rank.
        experts: among how many tokens are divided, each to k of them. Slices would be thin where few come to each: then,
            unless place says how many there are to be, all tokens are gathered, computed at once and summed up.

    Returns [t_r, D]. Differentiable in x, weights and params. Raises ValueError for arguments that do not fit; MismatchError,
    on all ranks and before data moves, if the ranks' do not fit together; and what collectives raise.
    """
    if x.dim() != 2 or index.shape != weights.shape or index.dim() != 2 or index.shape[0] != x.shape[0]:
        raise ValueError(
            f"{name}: x {tuple(x.shape)}, index {tuple(index.shape)}, weights {tuple(weights.shape)}: [t, D], [t, k], [t, k] "
            "are needed"
        )
    if index.dtype.is_floating_point or not weights.dtype.is_floating_point:
        raise ValueError(
            f"{name}: index is {index.dtype}, weights {weights.dtype}: whole numbers and floating point are needed"
        )
    check_dtype(name, x, {})
    leaves = (x.requires_grad, weights.requires_grad, any(param.requires_grad for param in params))
    wanted = leaves if torch.is_grad_enabled() else (False,) * 3
    place, at_once = _cut(place, sizes, int(index.shape[1]) / experts)
    more: dict[str, Any] = {"features": x.shape[1], "experts": experts, "of a token": index.shape[1], "weights": weights.dtype}
    agree_on(place, x, 0, wanted, sizes, int(x.shape[0]), **more)
    call = _Call(name, compute, place, tuple(sizes), at_once, any(wanted))
    y: torch.Tensor = _Experts.apply(call, x, index, weights, *params)
    return y


def _cut(place: Place, sizes: Sequence[int], share: float) -> tuple[Place, bool]:
    """(with a number of slices, whether there is one only of all tokens). share: of tokens that come to an expert."""
    if place.slices_per_rank is not None or not sizes:
        return place, False
    of_an_expert = max(sizes) * share
    slices = 2 if of_an_expert >= 4 * THIN and len(sizes) == 2 else 1  # else half of what is sent has nothing beside it
    return place._replace(slices_per_rank=slices), of_an_expert < THIN


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _Call, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *params: torch.Tensor
    ) -> torch.Tensor:
        with unseen():
            packing, packed = _Packed.of(x, index, weights)
            graphs = _Graphs([param.detach().requires_grad_(call.trains and param.requires_grad) for param in params])
            needs = call.trains and x.requires_grad, call.trains and weights.requires_grad
            y = torch.empty_like(x, memory_format=torch.contiguous_format)
            call.through(packed, lambda start, rows: _computed(call, graphs, start, packing.taken(rows), needs), y)
        if call.trains:
            ctx.call, ctx.packing = call, packing
            ctx.save_for_backward(packed, graphs.token(), *params)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        packed, token, *params = ctx.saved_tensors
        needs, wanted = (ctx.needs_input_grad[1], ctx.needs_input_grad[3]), ctx.needs_input_grad[4:]
        with unseen():
            graphs = _alive.get(token.data_ptr())
            if graphs is None:
                graphs = _again(call, ctx.packing, packed, params, wanted, needs)
            dx, dweights, totals = _backward(call, graphs, grad.contiguous(), ctx.packing, needs)
        own = [total if want else None for total, want in zip(totals, wanted, strict=True)]
        return None, dx, None, dweights, *own


def _computed(
    call: _Call,
    graphs: _Graphs,
    start: int,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    needs: tuple[bool, bool],
) -> torch.Tensor:
    """What this rank's parts make of a slice; its graph is kept, if there is to be a backward."""
    x, index, weights = given
    if not call.trains:
        return call.compute(x.contiguous(), index, weights, graphs.params)
    # Not views of the message, whose memory is used again.
    x, weights = x.clone(memory_format=torch.contiguous_format), weights.clone()
    x.requires_grad_(needs[0])
    weights.requires_grad_(needs[1])
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
        out = call.compute(x, index, weights, graphs.params)
    graphs.slices[start] = _Slice((x, weights), out)
    return out.detach()


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _again(
    call: _Call,
    packing: _Packed,
    packed: torch.Tensor,
    params: Sequence[torch.Tensor],
    wanted: Sequence[bool],
    needs: tuple[bool, bool],
) -> _Graphs:
    graphs = _Graphs([param.detach().requires_grad_(want) for param, want in zip(params, wanted, strict=True)])
    call.through(packed, lambda start, rows: _computed(call, graphs, start, packing.taken(rows), needs), None)
    return graphs


def _backward(
    call: _Call, graphs: _Graphs, grad: torch.Tensor, packing: _Packed, needs: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None, list[torch.Tensor | None]]:
    """(dx, dweights of the own tokens; terms of this rank's parameters, which are complete)"""
    trained = [at for at, param in enumerate(graphs.params) if param.requires_grad]
    totals: list[torch.Tensor | None] = [None] * len(graphs.params)
    for at in trained:
        totals[at] = torch.zeros_like(graphs.params[at])
    together = grad.dtype == packing.weights and all(needs)  # gradients of x and weights, in one message
    late: dict[int, torch.Tensor] = {}  # of weights, by the first row of a slice

    def terms(start: int, dy: torch.Tensor) -> torch.Tensor:
        inputs, out = graphs.slices[start]
        leaves = [leaf for leaf, need in zip(inputs, needs, strict=True) if need]
        every = [*leaves, *(graphs.params[at] for at in trained)]
        found: Sequence[torch.Tensor | None] = [None] * len(every)
        if out.requires_grad:  # of experts that no token goes to it does not
            found = torch.autograd.grad(out, every, dy.to(out.dtype), retain_graph=True, allow_unused=True)
        for at, term in zip(trained, found[len(leaves) :], strict=True):
            if term is not None:
                totals[at] += term  # type: ignore[operator]
        made = [torch.zeros_like(leaf) if term is None else term for leaf, term in zip(leaves, found, strict=False)]
        if needs[1] and not together:
            late[start] = made.pop()
        return torch.cat(made, dim=1) if made else dy.new_empty(len(dy), 0)

    widths = packing.features if needs[0] else 0, packing.k if together else 0
    summed = grad.new_empty(grad.shape[0], sum(widths))
    call.through(grad, terms, summed if needs[0] else None)
    dx, dweights = (part.contiguous() for part in summed.split(widths, dim=1))
    if needs[1] and not together:
        dweights = grad.new_empty((grad.shape[0], packing.k), dtype=packing.weights)
        call.sum(late, dweights)
    return dx if needs[0] else None, dweights if needs[1] else None, totals


__all__ = ["sharded_experts"]
