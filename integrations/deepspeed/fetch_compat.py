"""ZeRO-3's coordinator, which fetches what is not served ahead and in the order that it has recorded: its private names."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("commfuse_dp")

_OFFLOAD_NAMES = ("get_param_coordinator", "empty_partition_cache", "module")
_COORDINATOR_NAMES = ("is_complete_trace", "is_invalid_trace", "_invalidate_trace")


def can_forget_fetches(optimizer: Any) -> bool:
    """Whether this DeepSpeed has the names that `forget_fetches` needs; if not, that is said."""
    offload: Any = getattr(optimizer, "parameter_offload", None)
    lacking = [name for name in _OFFLOAD_NAMES if not hasattr(offload, name)]
    if not lacking:
        lacking = [name for name in _COORDINATOR_NAMES if not hasattr(offload.get_param_coordinator(), name)]
        lacking += [name for name in ("ds_inflight_param_registry",) if not hasattr(offload.module, name)]
    if lacking:
        log.warning("CommFuse: this DeepSpeed lacks %s: ZeRO-3's own fetches do not survive a broken step", ", ".join(lacking))
    return not lacking


def forget_order(optimizer: Any) -> None:
    """ZeRO-3 prefetches along the parameters' order that it has recorded; which of them it fetches is about to change."""
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    if coordinator.is_complete_trace():
        coordinator._invalidate_trace()


def forget_fetches(optimizer: Any) -> None:
    """All ranks do this after a step that was broken off, on each of them at another place. Whatever ZeRO-3 had fetched is
    released and what was on its way is forgotten, with the order that it had recorded: some ranks may have recorded a part."""
    offload = optimizer.parameter_offload
    coordinator = offload.get_param_coordinator()
    offload.module.ds_inflight_param_registry.clear()
    for param in offload.module.parameters():
        if param.ds_status.name == "INFLIGHT":  # what is in its memory is released, too
            param.ds_status = type(param.ds_status).AVAILABLE
    if hasattr(coordinator, "release_backward_leftovers"):  # newer versions
        coordinator.release_backward_leftovers()
    offload.empty_partition_cache()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
