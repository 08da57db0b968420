"""PyTorch FSDP2 (`fully_shard`): see `apply`."""

from commfuse_dp.integrations.fsdp2.apply import apply, engine_of, remove
from commfuse_dp.integrations.fsdp2.report import ParameterRow, Report

__all__ = ["ParameterRow", "Report", "apply", "engine_of", "remove"]
