"""PyTorch FSDP2 (`fully_shard`): see `apply`; by public names of torch alone: see `claim`."""

from commfuse_dp.integrations.attach.report import ParameterRow, Report
from commfuse_dp.integrations.fsdp2.apply import apply, engine_of, remove
from commfuse_dp.integrations.fsdp2.claim import Claimed, claim

__all__ = ["Claimed", "ParameterRow", "Report", "apply", "claim", "engine_of", "remove"]
