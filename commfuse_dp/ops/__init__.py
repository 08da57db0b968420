"""Compute fused with communication, slice by slice, and for each function its unfused reference of the same signature.

`fused_linear`: a weight sharded by rows (data parallelism). `column_parallel`, `row_parallel`: a sequence sharded over the
ranks that share a layer (tensor and sequence parallelism)."""

from commfuse_dp.ops.column_parallel import column_parallel, column_parallel_reference
from commfuse_dp.ops.functional import fused_linear, fused_linear_reference
from commfuse_dp.ops.row_parallel import row_parallel, row_parallel_reference

__all__ = [
    "column_parallel",
    "column_parallel_reference",
    "fused_linear",
    "fused_linear_reference",
    "row_parallel",
    "row_parallel_reference",
]
