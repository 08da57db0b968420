"""Which parameter takes which path, and why. Reads the model; changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.report import Path
from commfuse_dp.integrations.attach.rules import excluded, form_of, full_name, module_obstacle, tensor_obstacle
from commfuse_dp.integrations.fsdp2 import compat
from commfuse_dp.integrations.fsdp2.claim import ClaimedLayer, claimed_layer, holders
from commfuse_dp.integrations.fsdp2.layers import TensorLayer
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.errors import ConfigError


@dataclass
class Adoption:
    """One module whose parameters leave FSDP2's groups: all of its own parameters, in the order weight, bias."""

    name: str
    module: nn.Module
    fused: bool
    group: Any
    fsdp_params: list[Any]  # weight first
    param_names: list[str]
    tensor: TensorLayer | None = None  # how tensor parallelism computes with it


class Left(NamedTuple):
    """One parameter that stays with FSDP2."""

    name: str
    modules: list[nn.Module]  # the one it belongs to, then those that it is tied to
    param: torch.Tensor  # sharded
    group: Any  # its parameter group; without the private names, the FSDP2 module that holds it
    reason: str


@dataclass
class Selection:
    missing: str | None  # private names that this torch lacks: then FSDP2 is used by its public names only
    adoptions: list[Adoption] = field(default_factory=list)
    claims: list[tuple[str, ClaimedLayer]] = field(default_factory=list)  # claimed layers to be served
    plain: list[tuple[str, ClaimedLayer, str]] = field(default_factory=list)  # claimed layers that are not, and why
    left: list[Left] = field(default_factory=list)
    shard_group: dist.ProcessGroup | None = None
    replicate_group: dist.ProcessGroup | None = None
    groups: list[tuple[nn.Module, Any]] = field(default_factory=list)
    foreign: dict[int, str] = field(default_factory=dict)  # id(group) -> why the engine cannot serve this group at all

    @property
    def unserved(self) -> dict[str, tuple[Path, str]]:
        """Module -> what becomes of its parameters instead, and why."""
        found: dict[str, tuple[Path, str]] = {name: ("plain", why) for name, _, why in self.plain}
        for item in self.left:
            foreign = self.foreign.get(id(item.group))
            found[item.name.rpartition(".")[0]] = ("hooks", item.reason) if foreign is None else ("stock", foreign)
        return found


def select(model: nn.Module, config: CommFuseConfig, layers: Mapping[int, TensorLayer]) -> Selection:
    """Decide for every parameter that FSDP2 holds, and for every claimed layer. layers: by id of the module."""
    out = Selection(compat.probe(model))
    if out.missing is None:
        _select_from_groups(model, config, layers, out)
        _keep_together(layers, out)
    else:
        _select_by_public_names(model, config, out)
    _select_claims(model, config, out)
    return out


def _select_from_groups(model: nn.Module, config: CommFuseConfig, layers: Mapping[int, TensorLayer], out: Selection) -> None:
    for _, module in model.named_modules():
        for group in compat.param_groups(module):
            if all(group is not known for _, known in out.groups):
                out.groups.append((module, group))
    names = {id(module): name for name, module in model.named_modules()}
    parents = {id(child): module for _, module in model.named_modules() for child in module.children()}
    if config.enabled:
        _refuse_ties(compat.tied_over_groups([group for _, group in out.groups]), names)

    for _, group in out.groups:
        reason = _foreign(group, out)
        if reason is not None:
            out.foreign[id(group)] = reason
        by_module: dict[int, list[Any]] = {}
        for fsdp_param in group.fsdp_params:
            by_module.setdefault(id(compat.module_of(fsdp_param)), []).append(fsdp_param)
        for key, fsdp_params in by_module.items():
            module = compat.module_of(fsdp_params[0])
            name = names.get(key, "?")
            why = reason
            if why is None and config.fuse == "never":
                why = "fuse='never'"
            tensor = layers.get(key)
            why = why or _obstacle(name, module, parents.get(key), group, fsdp_params, config, names, tensor)
            order = sorted(fsdp_params, key=lambda p: compat.name_of(p) != "weight")
            if why is None:
                out.adoptions.append(
                    Adoption(
                        name,
                        module,
                        form_of(module) is not None,
                        group,
                        order,
                        [compat.name_of(p) for p in order],
                        tensor,
                    )
                )
            else:
                out.left += _left(name, order, group, why)


def _left(name: str, fsdp_params: list[Any], group: Any, why: str) -> list[Left]:
    return [
        Left(full_name(name, compat.name_of(param)), compat.users(param), param.sharded_param, group, why)
        for param in fsdp_params
    ]


def _keep_together(layers: Mapping[int, TensorLayer], out: Selection) -> None:
    """Layers that compute together take their weights in one way."""
    lost = {layers[id(item.modules[0])].holder: item.name for item in out.left if id(item.modules[0]) in layers}
    for adoption in list(out.adoptions):
        if adoption.tensor is not None and adoption.tensor.holder in lost:
            out.adoptions.remove(adoption)
            why = f"{lost[adoption.tensor.holder]}, which computes with it, stays with FSDP2"
            out.left += _left(adoption.name, adoption.fsdp_params, adoption.group, why)


def _refuse_ties(pairs: list[tuple[Any, Any]], names: dict[int, str]) -> None:
    """As FSDP2 itself does in its first forward. Of a layer that is served it would see nothing, and the tie would be gone."""
    for pair in pairs:
        first, second = (full_name(names.get(id(compat.module_of(p)), "?"), compat.name_of(p)) for p in pair)
        raise ConfigError(
            f"parameter {second!r} is shared with {first!r}, which another FSDP2 group manages: each would train a copy "
            "of its own. For tied parameters, use fully_shard([module_a, module_b]) to place them in one group."
        )


def _select_by_public_names(model: nn.Module, config: CommFuseConfig, out: Selection) -> None:
    """Nothing can be taken out of FSDP2's hands: all that it holds goes over the public hooks."""
    parents = {id(child): module for module in model.modules() for child in module.children()}
    holder_of = holders(model)
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            users.setdefault(id(param), []).append(module)
    seen: set[int] = set()
    for name, module in model.named_modules():
        holder = holder_of.get(id(module))
        if holder is None or claimed_layer(module) is not None:
            continue
        if all(holder is not known for known, _ in out.groups):
            out.groups.append((holder, holder))
        for param_name, param in module.named_parameters(recurse=False):
            if id(param) in seen or not isinstance(param, DTensor):  # ignored by FSDP2
                continue
            seen.add(id(param))
            why = "fuse='never'" if config.fuse == "never" else f"adoption is not possible: {out.missing}"
            if config.fuse != "never" and module_obstacle(name, module, parents.get(id(module)), config) is None:
                why += "; commfuse_dp.claim(model) before fully_shard would serve this layer"
            out.left.append(Left(full_name(name, param_name), users[id(param)], param, holder, why))
            foreign = _foreign_publicly(param, out)
            if foreign is not None:
                out.foreign[id(holder)] = foreign


def _select_claims(model: nn.Module, config: CommFuseConfig, out: Selection) -> None:
    for name, module in model.named_modules():
        layer = claimed_layer(module)
        if layer is None:
            continue
        why = _other_ranks(layer.shard_group, layer.replicate_group, out) or excluded(name, config)
        if why is None and (config.fuse == "never" or not config.enabled):
            why = "fuse='never'" if config.enabled else "enabled=False"
        if why is None and layer.replaced():
            why = "its forward was replaced after claim()"
        for slot in layer.slots(name):
            why = why or tensor_obstacle(slot.local())
        if why is None:
            out.claims.append((name, layer))
        else:
            out.plain.append((name, layer, why))


def _foreign(group: Any, out: Selection) -> str | None:
    """Why the engine cannot serve a parameter group at all; remembers the first group's mesh, which all others must share."""
    shard = compat.shard_group(group)
    if shard is None:
        return "replicated, not sharded"
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        return "CPU offloading: parameters and gradients live on another device than the compute"
    if compat.has_all_reduce_hook(group):
        return "an all-reduce hook (set_all_reduce_hook): it is given what FSDP2 has summed"
    own = compat.own_collective(group)
    if own is not None:
        return f"a collective of your own ({own})"
    return _other_ranks(shard, compat.replicate_group(group), out)


def _foreign_publicly(param: DTensor, out: Selection) -> str | None:
    """The same, read off a sharded parameter: (Shard,) over a 1-D mesh or (Replicate, Shard) over a 2-D one."""
    mesh, sharded = param.device_mesh, [isinstance(placement, Shard) for placement in param.placements]
    if sharded not in ([True], [False, True]):
        return f"placed as {param.placements}"
    if param.device.type not in (mesh.device_type, "meta"):
        return "CPU offloading: parameters and gradients live on another device than the compute"
    return _other_ranks(mesh.get_group(mesh.ndim - 1), mesh.get_group(0) if mesh.ndim == 2 else None, out)


def _other_ranks(shard: dist.ProcessGroup, replicate: dist.ProcessGroup | None, out: Selection) -> str | None:
    if out.shard_group is None:
        out.shard_group = shard
        out.replicate_group = replicate
    ranks, first = dist.get_process_group_ranks(shard), dist.get_process_group_ranks(out.shard_group)
    if ranks != first:
        return f"sharded over ranks {ranks}, other layers over {first}: one engine serves one group"
    if (replicate is None) != (out.replicate_group is None):
        return "some layers have replicas and some have not"
    return None


def _obstacle(
    name: str,
    module: nn.Module,
    parent: nn.Module | None,
    group: Any,
    fsdp_params: list[Any],
    config: CommFuseConfig,
    names: dict[int, str],
    tensor: TensorLayer | None,
) -> str | None:
    """Why a module's parameters cannot leave FSDP2's group (None: they can)."""
    why = module_obstacle(name, module, parent, config, forward_of_ours=tensor is not None)
    if why is not None:
        return why
    own = {param_name for param_name, param in module.named_parameters(recurse=False)}
    adoptable = {compat.name_of(fsdp_param) for fsdp_param in fsdp_params}
    if own != adoptable:
        return f"its parameters lie in several FSDP2 groups or outside of them: {', '.join(sorted(own - adoptable))}"
    if compat.reduces_unused(group):
        return "set_reduce_scatter_unused_params: ranks may use different layers, and all are reduced"
    if compat.reshards_to_smaller_mesh(group):
        return "reshard_after_forward is an int: kept sharded over fewer ranks between forward and backward"
    for fsdp_param in fsdp_params:
        reason = _param_obstacle(fsdp_param, names, tensor)
        if reason is not None:
            return reason
    return None


def _param_obstacle(fsdp_param: Any, names: dict[int, str], tensor: TensorLayer | None) -> str | None:
    if others := [f"{names.get(id(module), '?')}.{param_name}" for module, param_name in compat.tied_to(fsdp_param)]:
        return f"tied to {', '.join(others)}"
    if fsdp_param.fsdp_placement.dim != 0:
        return f"sharded along dim {fsdp_param.fsdp_placement.dim}, not along dim 0"
    if getattr(fsdp_param, "is_dtensor", False) and tensor is None:
        return "also sharded by another parallelism (a DTensor before fully_shard)"
    return tensor_obstacle(compat.local_tensor(fsdp_param.sharded_param))
