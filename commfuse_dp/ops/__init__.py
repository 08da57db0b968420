"""Compute fused with communication, slice by slice, as functions; each with its unfused reference of the same signature."""

from commfuse_dp.ops.attention_reference import (
    ring_attention_reference,
    row_parallel_attention_reference,
    ulysses_attention_reference,
)
from commfuse_dp.ops.context import ring_attention
from commfuse_dp.ops.functional import fused_linear, fused_linear_reference
from commfuse_dp.ops.row_attention import row_parallel_attention
from commfuse_dp.ops.ulysses import ulysses_attention

__all__ = [
    "fused_linear",
    "fused_linear_reference",
    "ring_attention",
    "ring_attention_reference",
    "row_parallel_attention",
    "row_parallel_attention_reference",
    "ulysses_attention",
    "ulysses_attention_reference",
]
