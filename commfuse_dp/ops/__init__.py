"""Compute fused with communication, slice by slice: `fused_linear`, and its unfused reference of the same signature."""

from commfuse_dp.ops.functional import fused_linear, fused_linear_reference

__all__ = ["fused_linear", "fused_linear_reference"]
