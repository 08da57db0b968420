"""Compute fused with communication, slice by slice, and for each function its unfused reference of the same signature.

| function | what is sharded |
| --- | --- |
| `fused_linear` | a weight, by rows (data parallelism) |
| `column_parallel`, `row_parallel` | the sequence, over the ranks that share a layer (tensor and sequence parallelism) |
| `row_parallel_attention` | as `row_parallel`, with the attention before it, by query slice |
| `ulysses_attention`, `ring_attention` | the sequence, over ranks that have all weights |
"""

from commfuse_dp.ops.attention.reference import (
    ring_attention_reference,
    row_parallel_attention_reference,
    ulysses_attention_reference,
)
from commfuse_dp.ops.attention.ring import ring_attention
from commfuse_dp.ops.attention.row_parallel import row_parallel_attention
from commfuse_dp.ops.attention.ulysses import ulysses_attention
from commfuse_dp.ops.functional import fused_linear, fused_linear_reference
from commfuse_dp.ops.sequence.column_parallel import column_parallel, column_parallel_reference
from commfuse_dp.ops.sequence.row_parallel import row_parallel, row_parallel_reference

__all__ = [
    "column_parallel",
    "column_parallel_reference",
    "fused_linear",
    "fused_linear_reference",
    "ring_attention",
    "ring_attention_reference",
    "row_parallel",
    "row_parallel_attention",
    "row_parallel_attention_reference",
    "row_parallel_reference",
    "ulysses_attention",
    "ulysses_attention_reference",
]
