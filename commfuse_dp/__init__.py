"""CommFuse for sharded data parallelism: parameter all-gather and gradient reduce-scatter, fused slice by slice with the
layers' forward and backward compute (arXiv 2604.24013).

    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    report = commfuse_dp.apply(model)

Every `import torch` imports this file (see autoload.py), so it imports nothing itself: names come when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from commfuse_dp.config import CommFuseConfig
    from commfuse_dp.errors import (
        BrokenStepError,
        CommFuseError,
        ConfigError,
        DeadlineError,
        MismatchError,
        PeerLostError,
        TransportError,
    )
    from commfuse_dp.integrations.fsdp2 import Claimed, Report

__version__ = "0.1.0"


def apply(model: nn.Module, config: CommFuseConfig | None = None) -> Report:
    """Switch CommFuse on for a model sharded by FSDP2 (`commfuse_dp.integrations.fsdp2.apply`), by `parallelize_module` or
    transformers (`commfuse_dp.integrations.tensor_parallel.apply`), or by FSDP2 over one of these."""
    from commfuse_dp.integrations import fsdp2, tensor_parallel

    _require_module("apply", model)
    serving = tensor_parallel if tensor_parallel.parallelized(model) else fsdp2
    return serving.apply(model, config)


def remove(model: nn.Module) -> None:
    """Give stock FSDP2, or stock tensor parallelism, back. Raises ConfigError if CommFuse is not on."""
    from commfuse_dp.integrations import fsdp2, tensor_parallel

    _require_module("remove", model)
    serving = tensor_parallel if tensor_parallel.applied(model) else fsdp2
    serving.remove(model)


def claim(
    model: nn.Module,
    config: CommFuseConfig | None = None,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
) -> Claimed:
    """Before `fully_shard`: fused layers without private names of torch. See `commfuse_dp.integrations.fsdp2.claim`."""
    from commfuse_dp.integrations.fsdp2 import claim as claim_fsdp2

    _require_module("claim", model)
    return claim_fsdp2(model, config, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=reshard_after_forward)


def _require_module(function: str, model: object) -> None:
    from torch import nn

    from commfuse_dp.errors import ConfigError

    if not isinstance(model, nn.Module):
        raise ConfigError(f"commfuse_dp.{function}() needs a model, a torch.nn.Module; got a {type(model).__name__}")


_HOME = {  # public name -> the module that defines it
    "CommFuseConfig": "commfuse_dp.config",
    "BrokenStepError": "commfuse_dp.errors",
    "CommFuseError": "commfuse_dp.errors",
    "ConfigError": "commfuse_dp.errors",
    "DeadlineError": "commfuse_dp.errors",
    "MismatchError": "commfuse_dp.errors",
    "PeerLostError": "commfuse_dp.errors",
    "TransportError": "commfuse_dp.errors",
}
_SUBMODULES = ("collectives", "config", "errors", "integrations", "observe", "ops")


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value  # the next use does not come here
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"commfuse_dp.{name}")
    raise AttributeError(f"module 'commfuse_dp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_SUBMODULES})


__all__ = [
    "BrokenStepError",
    "CommFuseConfig",
    "CommFuseError",
    "ConfigError",
    "DeadlineError",
    "MismatchError",
    "PeerLostError",
    "TransportError",
    "apply",
    "claim",
    "remove",
]
