"""Attention by blocks, as row_parallel_attention, ulysses_attention and ring_attention compute it, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.gpu.part import Reporter
from commfuse_dp.ops.attention.block import Attended, Gradients, add_gradients

# Twice the error of torch's own attention over everything in the same dtype: each block is rounded to it before it is joined.
TOLERANCE = 2.0


class Case(NamedTuple):
    batch: int
    heads: int
    key_heads: int
    width: int
    cuts: tuple[int, ...]  # of the sequence, for queries and for keys
    causal: bool
    dtype: torch.dtype

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"attention {self.heads}/{self.key_heads} heads of {self.width} cut at {self.cuts} causal={self.causal} {kind}"


def cases(small: bool) -> list[Case]:
    cuts = (0, 16, 40, 64) if small else (0, 700, 1024, 2000)
    widths = (16,) if small else (64, 128)
    found = [
        Case(2, 8, groups, width, cuts, causal, dtype)
        for groups, width, causal, dtype in itertools.product((8, 2), widths, (False, True), (torch.bfloat16, torch.float16))
    ]
    return [*found, Case(1, 4, 2, 32, cuts, True, torch.float32)]


def check_attention(report: Reporter, device: torch.device, *, small: bool) -> None:
    torch.manual_seed(2)
    wrong = 0
    for case in cases(small):
        shape = case.batch, case.heads, case.cuts[-1], case.width
        q, grad = (torch.randn(shape).to(device, case.dtype) for _ in range(2))
        k, v = (torch.randn(case.batch, case.key_heads, *shape[2:]).to(device, case.dtype) for _ in range(2))
        exact = whole(case, *(tensor.double() for tensor in (q, k, v, grad)))
        unfused = whole(case, q, k, v, grad)
        found = by_blocks(q, k, v, case.causal, case.width**-0.5, grad, case.cuts, case.cuts)
        for name, ours, torchs, right in zip(("o", "dq", "dk", "dv"), found, unfused, exact, strict=True):
            error, allowed = ((tensor.double() - right).norm().item() for tensor in (ours, torchs))
            allowed = TOLERANCE * allowed + 1e-6 * right.norm().item()
            if not error <= allowed:  # also NaN
                wrong += 1
                report.fail(f"{case}: {name}: error {error:.3g}, allowed {allowed:.3g}")
    report.row(kind="attention", calls=len(cases(small)), wrong=wrong, ok=wrong == 0)


def whole(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """o, dq, dk, dv by torch's attention over everything."""
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    o = F.scaled_dot_product_attention(*inputs, is_causal=case.causal, enable_gqa=True)
    return [o.detach(), *torch.autograd.grad(o, inputs, grad)]


def by_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    grad: torch.Tensor,
    q_cuts: Sequence[int],
    k_cuts: Sequence[int],
) -> list[torch.Tensor]:
    """o, dq, dk, dv by blocks of queries and keys, cut there."""
    wide = torch.promote_types(q.dtype, torch.float32)
    o, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=wide, device=q.device)
    queries, keys = ([slice(*pair) for pair in itertools.pairwise(cuts)] for cuts in (q_cuts, k_cuts))
    for rows in queries:
        attended = Attended(q[:, :, rows], q_start=rows.start, causal=causal, scale=scale)
        for seen in reversed(keys):  # any order of keys will do
            attended.take(k[:, :, seen], v[:, :, seen], seen.start)
        o[:, :, rows], lse[:, :, rows] = attended.result()
    grads = Gradients(*(torch.zeros(tensor.shape, dtype=wide, device=q.device) for tensor in (q, k, v)))
    for rows, seen in itertools.product(queries, keys):
        add_gradients(
            Gradients(grads.q[:, :, rows], grads.k[:, :, seen], grads.v[:, :, seen]),
            *(grad[:, :, rows], q[:, :, rows], k[:, :, seen], v[:, :, seen], o[:, :, rows], lse[:, :, rows]),
            q_start=rows.start,
            k_start=seen.start,
            causal=causal,
            scale=scale,
        )
    return [o, *grads]
