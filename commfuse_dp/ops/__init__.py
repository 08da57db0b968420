"""Compute fused with communication, slice by slice, as functions; each with its unfused reference of the same signature."""

from commfuse_dp.ops.attention_reference import row_parallel_attention_reference
from commfuse_dp.ops.functional import fused_linear, fused_linear_reference
from commfuse_dp.ops.row_attention import row_parallel_attention

__all__ = [
    "fused_linear",
    "fused_linear_reference",
    "row_parallel_attention",
    "row_parallel_attention_reference",
]
