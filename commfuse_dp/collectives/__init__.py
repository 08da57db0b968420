"""Collectives with callbacks, executed slice by slice; `reference` has the unfused ones of the same signatures."""

from __future__ import annotations

from commfuse_dp.collectives.bound import Owner
from commfuse_dp.collectives.functions import all_gather, all_reduce, all_to_all, reduce_scatter
from commfuse_dp.collectives.sessions import close_transports

__all__ = ["Owner", "all_gather", "all_reduce", "all_to_all", "close_transports", "reduce_scatter"]
