"""What a `TorchDispatchMode` sees of a fused op: the operations of the framework that it stands for, not what it is made of.

| fused op | seen |
| --- | --- |
| linear by slices of its weight | `aten.mm`, `aten.addmm` with a bias |
| column-parallel layers | `all_gather_into_tensor` (not of a replicated input), then one of these for each weight |
| row-parallel layer | `mm`, then `reduce_scatter_tensor`, or `all_reduce` |
| their backward | the products |
| parameters gathered whole, comparisons of the ranks | nothing |

[Note: Dispatch modes]
Selective activation checkpointing numbers the operations that it sees in a forward, and in the recomputation answers those that
it has saved, by these numbers. What runs inside a fused op differs from call to call: sums of other layers' gradients that come
due while it waits, slices that have come together, a comparison of the ranks where shapes are new. So it must not be counted;
and a policy that saves every second `mm` means layers. An op announces itself by a call of the framework's with an operand that
has no memory (`absent`): the modes see the call, and it ends at this operand, which answers with what the op computes. What a
mode has saved is not computed again, and nothing is sent for it: the policy has to be the same on all ranks, as it has to be
for the framework's own collectives. A mode that has an attribute `sees_inside_commfuse` (true) sees what is inside instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commfuse_dp.ops.compat import unseen

Answer = Callable[[], torch.Tensor]

aten = torch.ops.aten
_SAME = {aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default}


class _Absent(torch.Tensor):
    """An operand without memory. With an answer: what an operation on it comes to."""

    _answer: Answer | None

    @staticmethod
    def __new__(cls, shape: Sequence[int], like: torch.Tensor, answer: Answer | None) -> _Absent:
        self = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=like.dtype, device=like.device)
        self._answer = answer
        return self

    def __init__(self, *_: Any) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<operand of a layer that CommFuse computes by slices: {tuple(self.shape)}, {self.dtype}>"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:  # type: ignore[override]
        if func in _SAME:  # a mode keeps what it has seen; autocast, where a backward runs in it, casts
            return _Absent(args[0].shape, args[0], args[0]._answer)
        for arg in args:
            if isinstance(arg, _Absent) and arg._answer is not None:
                return arg._answer()
        raise RuntimeError(
            f"{func} was called by a TorchDispatchMode with an operand that is nowhere whole: a layer that CommFuse computes "
            "by slices shows it to modes, for its shape. Leave the layer to the framework (CommFuseConfig(exclude=[...]))."
        )


def absent(shape: Sequence[int], like: torch.Tensor, answer: Answer | None = None) -> torch.Tensor:
    """An operand of this shape, of the dtype and device of another. answer(): what the operation on it comes to."""
    return _Absent(shape, like, answer)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] @ weight [K, F] (+ bias [F]), as the modes see it. One of x and weight has the answer, [T, F]."""
    return aten.mm.default(x, weight) if bias is None else aten.addmm.default(bias, x, weight)


@contextmanager
def products(like: torch.Tensor, shapes: Iterable[tuple[int, int, int]]) -> Iterator[None]:
    """The body computes these products, [T, K] @ [K, F] each, of tensors like this one. For a backward, which nobody saves."""
    for rows, inner, columns in shapes:
        answer = partial(absent, (rows, columns), like)
        aten.mm.default(absent((rows, inner), like, answer), absent((inner, columns), like))
    with unseen():
        yield


def gathered(part: torch.Tensor, ranks: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All ranks' parts. part has the answer."""
    return torch.ops._c10d_functional.all_gather_into_tensor.default(part, ranks, _name(group))  # type: ignore[no-any-return]


def scattered(partial: torch.Tensor, ranks: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sums over the ranks, of which this one gets its part. partial has the answer."""
    return torch.ops._c10d_functional.reduce_scatter_tensor.default(partial, "sum", ranks, _name(group))  # type: ignore[no-any-return]


def summed(partial: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sums over the ranks, for all of them. partial has the answer."""
    return torch.ops._c10d_functional.all_reduce.default(partial, "sum", _name(group))  # type: ignore[no-any-return]


def _name(group: dist.ProcessGroup | None) -> str:
    """Of the ranks' group; empty: they have none (a transport of their own)."""
    return group.group_name if group is not None else ""
