"""What the attentions over ranks are given beside their tensors, as one call; and what they do not take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from commfuse_dp.collectives import sessions
from commfuse_dp.collectives.agreement import agree
from commfuse_dp.collectives.arguments import check_sizes
from commfuse_dp.ops.attention.places import find, rank_at, world_size_at
from commfuse_dp.ops.compat import transformed, transforms_active
from commfuse_dp.ops.operands import call_number


class Lines(NamedTuple):
    """How a sequence is divided: sizes[r] positions on rank r, each cut in `slices_per_rank`; and by which way it moves."""

    sizes: tuple[int, ...]
    slices_per_rank: int
    order: str
    place: int

    @property
    def rank(self) -> int:
        return rank_at(self.place)

    @property
    def length(self) -> int:
        return sum(self.sizes)

    @property
    def own(self) -> int:
        return self.sizes[self.rank]

    def start(self, rank: int) -> int:
        """Position of a rank's first row."""
        return sum(self.sizes[:rank])

    def calls(self) -> dict[str, Any]:
        """Arguments of every collective."""
        group, transport = find(self.place)
        return {"group": group, "transport": transport, "order": self.order, "slices_per_rank": self.slices_per_rank}

    def agree(self, what: str, device: torch.device, description: Mapping[str, object]) -> None:
        """See collectives/agreement.py."""
        how = {"sizes": self.sizes, "slices_per_rank": self.slices_per_rank, "order": self.order}
        agree(sessions.transport_for(*find(self.place), device), what, {**description, **how})


class AttentionCall(NamedTuple):
    """What every attention over ranks is told beside its tensors, as ops take it, forward and backward."""

    causal: bool
    scale: float
    sizes: Sequence[int]
    slices_per_rank: int
    order: str
    place: int
    keep: bool  # what a backward needs
    number: int  # see [Note: Calls in graphs] in operands.py

    @property
    def lines(self) -> Lines:
        return Lines(tuple(self.sizes), self.slices_per_rank, self.order, self.place)


ATTENTION_CALL = (  # its schema
    "bool causal, float scale, SymInt[] sizes, SymInt slices_per_rank, str order, SymInt place, bool keep, SymInt call"
)


def call_of(lines: Lines, q: torch.Tensor, differentiated: bool, causal: bool, scale: float | None) -> AttentionCall:
    """differentiated: whether an operand requires a gradient. scale: None: 1 / sqrt(d)."""
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[3])
    number = call_number() if torch.compiler.is_compiling() else 0
    return AttentionCall(causal, scale, *lines, torch.is_grad_enabled() and differentiated, number)


def sizes_of(sizes: Sequence[int] | None, default: Sequence[int], place: int) -> tuple[int, ...]:
    return check_sizes(sizes if sizes is not None else default, world_size_at(place))


_REFUSED = {
    "attn_mask": "masks given as tensors",
    "mask": "masks given as tensors",
    "attention_mask": "masks given as tensors",
    "dropout_p": "dropout inside attention",
    "dropout": "dropout inside attention",
    "window_size": "sliding windows",
    "sliding_window": "sliding windows",
    "softcap": "capped scores",
}


def refuse(what: str, given: Mapping[str, object]) -> None:
    """What attention over ranks does not have; a value that asks for nothing (None, 0) is taken."""
    if not torch.compiler.is_compiling() and transforms_active():
        raise transformed(what)
    for name, value in given.items():
        if name not in _REFUSED:
            raise TypeError(f"{what}() got an unexpected keyword argument {name!r}")
        if value is not None and not (isinstance(value, (int, float)) and not value):
            raise ValueError(
                f"{what}: {name}={value if not isinstance(value, torch.Tensor) else tuple(value.shape)!r} asks for "
                f"{_REFUSED[name]}, which attention over ranks does not serve; leave it out, or gather the sequence and use "
                "torch.nn.functional.scaled_dot_product_attention"
            )


def check_heads(what: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, positions: int) -> None:
    """q, k, v are 4-D, `heads` and `positions` being dimensions. Raises ValueError unless they fit together."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if any(tensor.dim() != 4 for tensor in (q, k, v)):
        raise ValueError(f"{what}: {shapes}: three tensors of 4 dimensions are needed")
    if k.shape != v.shape:
        raise ValueError(f"{what}: {shapes}: k and v need the same shape")
    if q.dtype != k.dtype or q.dtype != v.dtype or not q.dtype.is_floating_point:
        raise ValueError(f"{what}: q is {q.dtype}, k {k.dtype}, v {v.dtype}: one floating-point dtype is needed")
    if q.device != k.device or q.device != v.device:
        raise ValueError(f"{what}: q lies on {q.device}, k on {k.device}, v on {v.device}: one device is needed")
    same = (0, positions, 3)
    if any(q.shape[dim] != k.shape[dim] for dim in same):
        raise ValueError(f"{what}: {shapes}: all but the number of heads (dim {heads}) must be equal")
    if k.shape[heads] == 0 or q.shape[heads] % k.shape[heads]:
        raise ValueError(
            f"{what}: {q.shape[heads]} query heads and {k.shape[heads]} key heads: the number of query heads must be a "
            "multiple of the number of key heads"
        )
