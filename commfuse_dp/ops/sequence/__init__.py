"""Layers of tensor parallelism: products of a sequence that is sharded over the ranks, or replicated, slice by slice."""
