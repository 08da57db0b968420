"""Which adapter serves a model that a framework has wrapped: for launchers and trainers that wrap models of any kind.

| wrapped as | served by |
| --- | --- |
| DistributedDataParallel | the hook of `integrations.ddp` |
| FullyShardedDataParallel | the hook of `integrations.fsdp1` |
| modules that `fully_shard` or `parallelize_module` was applied to | `commfuse_dp.apply` |

DeepSpeed is not among them: its engine is served out of `deepspeed.initialize`, by the block in its JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from commfuse_dp.integrations.attach.forwards import nothing
from commfuse_dp.integrations.ddp_compat import registered_hook
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from commfuse_dp.config import CommFuseConfig


class Kind(NamedTuple):
    """How one kind of wrapped model is served."""

    name: str
    serve: Callable[[Any, CommFuseConfig | None], Any]  # (model, config) -> report; collective
    served: Callable[[Any], bool]  # CommFuse is on for the model already
    obstacle: Callable[[Any], str | None] = nothing  # why the model cannot be served; None: it can
    hook: bool = False  # served by a communication hook
    holds: Callable[[Any], bool] = lambda inner: not isinstance(inner, (DistributedDataParallel, FullyShardedDataParallel))
    """Whether a module inside of the model is served with it."""
    ready: Callable[[Any], bool] = lambda model: True
    """Whether it can be served just ahead of this forward."""


def kind_of(model: Any) -> Kind | None:
    """None: a model that nothing is to be done for."""
    if isinstance(model, DistributedDataParallel):
        return _ddp()
    if isinstance(model, FullyShardedDataParallel):
        return _fsdp1()
    return _sharded_kind(model) if isinstance(model, nn.Module) and _sharded(model) else None


def _ddp() -> Kind:
    from commfuse_dp.integrations.ddp import DDPState, register_ddp

    return Kind(
        "DDP",
        register_ddp,
        served=lambda model: isinstance(registered_hook(model)[1], DDPState),
        obstacle=_hook_of_the_script,
        hook=True,
        holds=lambda inner: isinstance(inner, DistributedDataParallel),
        ready=_trains,
    )


def _trains(model: DistributedDataParallel) -> bool:
    """A rank may evaluate alone. Lightning changes the mode of what is inside, and leaves that of DDP's own module."""
    return torch.is_grad_enabled() and (model.training or model.module.training)


def _fsdp1() -> Kind:
    from commfuse_dp.integrations import fsdp1_compat
    from commfuse_dp.integrations.fsdp1 import obstacle, register_fsdp1

    return Kind(
        "FSDP1",
        register_fsdp1,
        served=lambda model: _is_ours(fsdp1_compat.registered_hook(model)),
        obstacle=obstacle,
        hook=True,
        holds=lambda inner: isinstance(inner, FullyShardedDataParallel),
    )


def _sharded_kind(model: nn.Module) -> Kind:
    from commfuse_dp.integrations.fsdp2 import compat
    from commfuse_dp.integrations.fsdp2.apply import engine_of
    from commfuse_dp.integrations.tensor_parallel import applied

    import commfuse_dp

    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return Kind(
        "FSDP2" if parts else "DTensor",
        commfuse_dp.apply,
        served=lambda model: engine_of(model) is not None or applied(model),
        ready=lambda model: not any(map(compat.is_under_way, parts)),  # another method of it may call its forward
    )


def _sharded(model: nn.Module) -> bool:
    from commfuse_dp.integrations.tensor_parallel import parallelized

    return any(isinstance(module, FSDPModule) for module in model.modules()) or parallelized(model)


def called_roots(model: nn.Module) -> Iterator[nn.Module]:
    """For a module whose own forward no step calls (a LightningModule's methods are): its parts that hold all its sharded
    modules and that are called themselves. Containers that only hold modules are none of them."""
    for child in model.children():
        if not _sharded(child):
            continue
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) and not isinstance(child, FSDPModule):
            yield from called_roots(child)
        else:
            yield child


def _hook_of_the_script(model: DistributedDataParallel) -> str | None:
    hook, _ = registered_hook(model)
    return None if hook is None else f"the script set a communication hook of its own ({_name(hook)})"


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("commfuse_dp.")


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", hook))
