"""Attention over ranks, fused with what moves its queries, keys and values, and unfused."""
