"""Which parameter takes which path, and why. Reads the model; changes nothing."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from commfuse_dp.integrations.fsdp2 import compat
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from commfuse_dp.config import CommFuseConfig

FUSED_TYPE = nn.Linear
GATHERED_TYPES = (nn.LayerNorm, nn.RMSNorm, nn.Embedding)

# Modules whose own forward reads its children's weights without calling the children.
_READS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass
class Adoption:
    """One module whose parameters leave FSDP2's groups: all of its own parameters, in the order weight, bias."""

    name: str
    module: nn.Module
    fused: bool
    group: Any
    fsdp_params: list[Any]  # weight first
    param_names: list[str]


@dataclass
class Selection:
    adoptions: list[Adoption] = field(default_factory=list)
    left: list[tuple[str, Any, Any, str]] = field(default_factory=list)  # (name, group, FSDPParam, reason)
    shard_group: dist.ProcessGroup | None = None
    replicate_group: dist.ProcessGroup | None = None
    groups: list[tuple[nn.Module, Any]] = field(default_factory=list)
    foreign: dict[int, str] = field(default_factory=dict)  # id(group) -> why the engine cannot serve this group at all


def original_type(module: nn.Module) -> type:
    """The module's class without the FSDP class that `fully_shard` mixes in."""
    kind = type(module)
    return kind.__mro__[2] if isinstance(module, FSDPModule) else kind


def select(model: nn.Module, config: CommFuseConfig) -> Selection:
    """Walk over all FSDP2 parameter groups of `model` and decide for each parameter."""
    out = Selection()
    for _, module in model.named_modules():
        for group in compat.param_groups(module):
            if all(group is not known for _, known in out.groups):
                out.groups.append((module, group))
    names = {id(module): name for name, module in model.named_modules()}
    parents = {id(child): module for _, module in model.named_modules() for child in module.children()}
    unadoptable = compat.probe(model)

    for _, group in out.groups:
        reason = _foreign(group, out)
        if reason is not None:
            out.foreign[id(group)] = reason
        by_module: dict[int, list[Any]] = {}
        for fsdp_param in group.fsdp_params:
            by_module.setdefault(id(fsdp_param._module_info.module), []).append(fsdp_param)
        for key, fsdp_params in by_module.items():
            module = fsdp_params[0]._module_info.module
            name = names.get(key, "?")
            why = reason or (unadoptable and f"adoption is not possible: {unadoptable}")
            if why is None and config.fuse == "never":
                why = "fuse='never'"
            why = why or _obstacle(name, module, parents.get(key), group, fsdp_params, config)
            order = sorted(fsdp_params, key=lambda p: p._module_info.param_name != "weight")
            if why is None:
                out.adoptions.append(
                    Adoption(
                        name,
                        module,
                        original_type(module) is FUSED_TYPE,
                        group,
                        order,
                        [p._module_info.param_name for p in order],
                    )
                )
            else:
                for fsdp_param in order:
                    full = f"{name}.{fsdp_param._module_info.param_name}" if name else fsdp_param._module_info.param_name
                    out.left.append((full, group, fsdp_param, why))
    return out


def _foreign(group: Any, out: Selection) -> str | None:
    """Why the engine cannot serve a parameter group at all; remembers the first group's mesh, which all others must share."""
    shard = compat.shard_group(group)
    if shard is None:
        return "replicated, not sharded"
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        return "CPU offloading: parameters and gradients live on another device than the compute"
    if out.shard_group is None:
        out.shard_group = shard
        out.replicate_group = compat.replicate_group(group)
    ranks, first = dist.get_process_group_ranks(shard), dist.get_process_group_ranks(out.shard_group)
    if ranks != first:
        return f"sharded over ranks {ranks}, other layers over {first}: one engine serves one group"
    if (compat.replicate_group(group) is None) != (out.replicate_group is None):
        return "some layers have replicas and some have not"
    return None


def _obstacle(
    name: str, module: nn.Module, parent: nn.Module | None, group: Any, fsdp_params: list[Any], config: CommFuseConfig
) -> str | None:
    """Why a module's parameters cannot leave FSDP2's group (None: they can)."""
    for pattern in config.exclude:
        if fnmatch.fnmatchcase(name, pattern):
            return f"excluded by {pattern!r}"
    kind = original_type(module)
    if kind is not FUSED_TYPE and kind not in GATHERED_TYPES:
        return f"{kind.__name__} is not a layer type that can be served by slices"
    if type(module).forward is not kind.forward or "forward" in vars(module):
        return f"the forward of this {kind.__name__} was replaced"
    if hasattr(module, "parametrizations"):
        return "its parameters are parametrized"
    if isinstance(parent, _READS_CHILDREN):
        return f"{type(parent).__name__} reads this layer's weights without calling it"
    own = {param_name for param_name, param in module.named_parameters(recurse=False)}
    adoptable = {fsdp_param._module_info.param_name for fsdp_param in fsdp_params}
    if own != adoptable:
        return f"its parameters lie in several FSDP2 groups or outside of them: {', '.join(sorted(own - adoptable))}"
    if "weight" not in adoptable:
        return "it has no weight"
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return "an embedding with max_norm or sparse gradients"
    if compat.reshards_to_smaller_mesh(group):
        return "reshard_after_forward is an int: kept sharded over fewer ranks between forward and backward"
    for fsdp_param in fsdp_params:
        reason = _param_obstacle(fsdp_param)
        if reason is not None:
            return reason
    return None


def _param_obstacle(fsdp_param: Any) -> str | None:
    info = fsdp_param._module_info
    if info.shared_modules:
        return f"tied: {info.param_name} is shared by {1 + len(info.shared_modules)} modules"
    if fsdp_param.fsdp_placement.dim != 0:
        return f"sharded along dim {fsdp_param.fsdp_placement.dim}, not along dim 0"
    if getattr(fsdp_param, "is_dtensor", False):
        return "also sharded by another parallelism (a DTensor before fully_shard)"
    local = compat.local_tensor(fsdp_param.sharded_param)
    if type(local) is not torch.Tensor:
        return f"its data is a {type(local).__name__}"
    if local.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        return f"dtype {local.dtype}"
    return None
