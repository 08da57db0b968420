"""Attention of a block of queries against a block of keys, with the log-sum-exp that joins blocks; forward and backward.

Shapes: q, o [B, h, s, d]; k, v [B, g, t, d] with h a multiple of g (grouped queries: head i attends with head i * g // h); lse
[B, h, s]. Any strides. Queries and keys stand at positions of one sequence: `q_start` and `k_start` are those of their first
rows, and under a causal mask a query sees the keys up to its own position.

| pass | of one block |
| --- | --- |
| forward | S = scale * q k^T (masked), lse = log sum exp S, o = exp(S - lse) v |
| joined | lse = log(exp lse_1 + exp lse_2), o = exp(lse_1 - lse) o_1 + exp(lse_2 - lse) o_2 |
| backward | P = exp(S - lse), dS = P * (do v^T - rowsum(do * o)); dq += scale * dS k, dk += scale * dS^T q, dv += P^T do |

The backward takes the joined lse and o, so that the blocks' shares simply add up: the sum over all blocks is the gradient of
the unsharded attention. Sums of several blocks are kept in the wide type. Source: FlashAttention-2
(arXiv 2307.08691), section 3.

Blocks are computed by torch's flash attention where it has one (CPUs; CUDA GPUs in float16 and bfloat16: not yet run on one),
else by plain torch operations that hold the block's scores.

[Note: A mask by offsets]
`is_causal` aligns the mask with the top left corner on CPUs and with the bottom right one in CUDA's kernels, which are the same
where there are as many queries as keys, that begin at one position. So a block is cut into what all of its queries see and a
square corner: keys before the first query; the corner; queries behind the last key.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from commfuse_dp.collectives.summation import wide_dtype
from commfuse_dp.ops.compat import FlashAttention, flash_attention

# Of fewer keys than a vector register has numbers torch's kernel for CPUs takes NaN for masked: a query that has it gives 0.
LEAST_KEYS = 16


class _Part(NamedTuple):
    """Queries start .. stop-1 against keys start .. stop-1, counted within the block."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    corner: bool  # as many queries as keys, at the same positions, under a causal mask


def parts(q_start: int, q_size: int, k_start: int, k_size: int, causal: bool) -> list[_Part]:
    """The block cut into what is full and what is a corner; nothing for queries that see none of the keys."""
    if not causal:
        return [_Part((0, q_size), (0, k_size), False)] if q_size and k_size else []
    skipped = min(max(k_start - q_start, 0), q_size)  # queries before the first key
    before = min(max(q_start + skipped - k_start, 0), k_size)  # keys before the first of the other queries
    found = []
    if q_size > skipped and before:
        found.append(_Part((skipped, q_size), (0, before), False))
    side = min(q_size - skipped, k_size - before)
    if side > 0:
        found.append(_Part((skipped, skipped + side), (before, before + side), True))
        if q_size > skipped + side:
            found.append(_Part((skipped + side, q_size), (before, before + side), False))
    return found


class Attended:
    """Queries with what has been computed of them so far: o in the wide type, and lse; keys are taken in block by block.

    The result depends on the order of the blocks by rounding only; the same order gives the same bits.
    """

    def __init__(self, q: torch.Tensor, *, q_start: int, causal: bool, scale: float) -> None:
        self.q = q
        self.out: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None
        self._start = q_start
        self._causal = causal
        self._scale = scale

    def take(self, k: torch.Tensor, v: torch.Tensor, k_start: int) -> None:
        rows = self.q.shape[2]
        for (low, high), (first, last), corner in parts(self._start, rows, k_start, k.shape[2], self._causal):
            o, lse = _forward(self.q[:, :, low:high], k[:, :, first:last], v[:, :, first:last], corner, self._scale)
            if self.out is None and (low, high) == (0, rows):
                self.out, self.lse = o, lse
                continue
            if self.out is None:
                self._clear(o, lse)
            assert self.out is not None and self.lse is not None
            _join(self._wide()[:, :, low:high], self.lse[:, :, low:high], o, lse)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(o in the dtype of q or wider, lse); queries that have seen no key are 0."""
        if self.out is None:
            wide = wide_dtype(self.q.dtype)
            self._clear(self.q.new_empty(0, dtype=wide), self.q.new_empty(0, dtype=wide))
        assert self.out is not None and self.lse is not None
        return self.out, self.lse

    def _clear(self, o: torch.Tensor, lse: torch.Tensor) -> None:
        self.out = torch.zeros(self.q.shape, dtype=wide_dtype(o.dtype), device=self.q.device)
        self.lse = torch.full(self.q.shape[:3], -math.inf, dtype=lse.dtype, device=self.q.device)

    def _wide(self) -> torch.Tensor:
        assert self.out is not None
        self.out = self.out.to(wide_dtype(self.out.dtype))
        return self.out


def _join(out: torch.Tensor, lse: torch.Tensor, o: torch.Tensor, other: torch.Tensor) -> None:
    """In place. `other` is finite; lse may be -inf, where nothing has been computed."""
    joined = torch.logaddexp(lse, other)
    out.mul_((lse - joined).exp_().unsqueeze(-1)).addcmul_(o.to(out.dtype), (other - joined).exp_().unsqueeze(-1).to(out.dtype))
    lse.copy_(joined)


class Gradients(NamedTuple):
    """dq, dk, dv of a whole sequence, in the wide type; each block adds its share."""

    q: torch.Tensor  # [B, h, S, d]
    k: torch.Tensor  # [B, g, S, d]
    v: torch.Tensor


def add_gradients(
    grads: Gradients,
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    q_start: int,
    k_start: int,
    causal: bool,
    scale: float,
) -> None:
    """Add one block's share, in place: to grads.q of these queries, to grads.k and grads.v of these keys.

    grad_out, q, out, lse and grads.q have the block's queries only, k, v, grads.k and grads.v its keys only; out and lse are
    those of all keys together.
    """
    for (low, high), (first, last), corner in parts(q_start, q.shape[2], k_start, k.shape[2], causal):
        rows, columns = (slice(None), slice(None), slice(low, high)), (slice(None), slice(None), slice(first, last))
        dq, dk, dv = _backward(grad_out[rows], q[rows], k[columns], v[columns], out[rows], lse[rows], corner, scale)
        grads.q[rows].add_(dq)
        grads.k[columns].add_(dk)
        grads.v[columns].add_(dv)


# ---- one block -------------------------------------------------------------------------------------------------------
def _kernel(q: torch.Tensor, k: torch.Tensor) -> FlashAttention | None:
    """For this block; None: plain operations."""
    few = q.device.type == "cpu" and k.shape[2] < LEAST_KEYS
    return None if few or not q.numel() else flash_attention(q)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, corner: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    flash = _kernel(q, k)
    if flash is not None:
        return flash.forward(_dense(q), _dense(k), _dense(v), corner, scale)
    scores = _scores(q, k, corner, scale)
    lse = scores.logsumexp(-1)
    o = (scores - lse.unsqueeze(-1)).exp_() @ _by_group(v, k.shape[1], scores.dtype)
    return o.view(q.shape).to(q.dtype), lse.view(q.shape[:3])


def _backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    corner: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    flash = _kernel(q, k)
    if flash is not None:
        return flash.backward(*map(_dense, (grad_out, q, k, v, out)), lse, corner, scale)
    scores = _scores(q, k, corner, scale)
    groups, wide = k.shape[1], scores.dtype
    do, queries, keys, values = (_by_group(tensor, groups, wide) for tensor in (grad_out, q, k, v))
    probabilities = (scores - lse.to(wide).reshape(scores.shape[:2]).unsqueeze(-1)).exp_()
    delta = (do * _by_group(out, groups, wide)).sum(-1, keepdim=True)
    ds = (do @ values.transpose(1, 2)).sub_(delta).mul_(probabilities).mul_(scale)
    dk, dv = ds.transpose(1, 2) @ queries, probabilities.transpose(1, 2) @ do
    return (ds @ keys).view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """With a dense last dimension. The kernel takes it for dense without asking, and reads beside the tensor otherwise."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _by_group(tensor: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, heads, s, d] -> [B * groups, heads / groups * s, d]: heads that share a key head lie below each other."""
    batch, heads, positions, width = tensor.shape
    return tensor.to(dtype).reshape(batch * groups, heads // groups * positions, width)


def _scores(q: torch.Tensor, k: torch.Tensor, corner: bool, scale: float) -> torch.Tensor:
    """[B * g, h / g * s, t] in the wide type."""
    wide, groups = wide_dtype(q.dtype), k.shape[1]
    scores = (_by_group(q, groups, wide) @ _by_group(k, groups, wide).transpose(1, 2)).mul_(scale)
    if corner:
        rows, columns = q.shape[2], k.shape[2]
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu_(1)
        scores.view(q.shape[0] * q.shape[1], rows, columns).masked_fill_(hidden, -math.inf)
    return scores
