"""Attention over ranks, fused with what moves its queries, keys and values, and unfused."""

from commfuse_dp.ops.attention.reference import (
    ring_attention_reference,
    row_parallel_attention_reference,
    ulysses_attention_reference,
)
from commfuse_dp.ops.attention.ring import ring_attention
from commfuse_dp.ops.attention.row_parallel import row_parallel_attention
from commfuse_dp.ops.attention.ulysses import ulysses_attention

__all__ = [
    "ring_attention",
    "ring_attention_reference",
    "row_parallel_attention",
    "row_parallel_attention_reference",
    "ulysses_attention",
    "ulysses_attention_reference",
]
