"""Which layers of a DeepSpeed engine's model are served by slices, and why the others are not."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.linears import LinearForm
from commfuse_dp.integrations.attach.report import FROZEN, Path
from commfuse_dp.integrations.attach.rules import form_of, full_name, how_computed, module_obstacle, tensor_obstacle
from commfuse_dp.integrations.deepspeed import compat, flat_compat
from torch import nn

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.transport.exchange import exchange_of


class Layer(NamedTuple):
    """A module whose weight is served by slices."""

    name: str
    module: nn.Module
    param: nn.Parameter  # its weight
    form: LinearForm | None  # which linear it computes; None: none, the weight is gathered whole
    place: flat_compat.FlatPlace | None  # ZeRO-1/2


class Selection(NamedTuple):
    layers: list[Layer]
    left: dict[str, tuple[nn.Parameter, str]]  # parameter -> reason

    @property
    def unserved(self) -> dict[str, tuple[Path, str]]:
        """Module whose weight stays with DeepSpeed -> why."""
        parts = ((*name.rpartition("."), why) for name, (_, why) in self.left.items())
        return {module: ("stock", why) for module, _, param, why in parts if param == "weight"}


def select(engine: Any, config: CommFuseConfig, group: dist.ProcessGroup, device: torch.device) -> Selection:
    """Collective over the group: what has a hook of the user's on one rank only is left alone on all."""
    model, stage = engine.module, int(engine.zero_optimization_stage())
    why = "fuse='never'" if config.fuse == "never" else compat.engine_obstacle(engine)
    if why is None and stage == 3:
        why = compat.fetch_obstacle()
    layers: list[Layer] = []
    left: dict[str, tuple[nn.Parameter, str]] = {}
    owners = Counter(id(param) for module in model.modules() for param in module._parameters.values() if param is not None)
    places = flat_compat.flat_places(engine.optimizer, group.size()) if why is None and stage != 3 else {}
    parents = {id(child): module for module in model.modules() for child in module.children()}
    external = compat.external_parameters(model)
    hooks = compat.GradientHooks(engine.optimizer)
    hooked = set[str]().union(*exchange_of(group)([name for name, param in model.named_parameters() if hooks.on(param)]))
    served: set[int] = set()
    for name, module in model.named_modules():
        if module._parameters.get("weight") is None:
            continue
        param = module._parameters["weight"]
        assert param is not None
        reason = why or ("registered as an external parameter" if id(param) in external and stage == 3 else None)
        if stage != 3 and not param.requires_grad:
            reason = FROZEN
        if reason is None and full_name(name, "weight") in hooked:
            reason = "a hook is registered on its gradient"
        reason = reason or _obstacle(name, module, parents.get(id(module)), param, stage, places, owners, config, group, device)
        if reason is None:
            layers.append(Layer(name, module, param, form_of(module), places.get(id(param))))
            served.add(id(param))
        else:
            left[full_name(name, "weight")] = (param, reason)
    for name, param in model.named_parameters():
        if id(param) not in served and name not in left:
            frozen = FROZEN if stage != 3 and not param.requires_grad else None
            left[name] = (param, frozen or why or _kept(param, "a bias or another parameter that is not a layer's weight"))
    return Selection(layers, left)


def _kept(param: nn.Parameter, otherwise: str) -> str:
    if compat.is_kept_whole(param):
        return "kept whole on every rank (stage3_param_persistence_threshold)"
    return otherwise


def _obstacle(
    name: str,
    module: nn.Module,
    parent: nn.Module | None,
    param: nn.Parameter,
    stage: int,
    places: dict[int, flat_compat.FlatPlace],
    owners: Counter[int],
    config: CommFuseConfig,
    group: dist.ProcessGroup,
    device: torch.device,
) -> str | None:
    """Why the weight of one module cannot be served by slices."""
    obstacle = module_obstacle(name, module, parent, config)
    if obstacle is not None:
        return obstacle
    if owners[id(param)] > 1:
        return "shared by several modules"
    if form_of(module) is None and not (stage == 3 and isinstance(module, nn.Embedding)):
        return _kept(param, how_computed(type(module), None))
    if stage == 3:
        return compat.partition_obstacle(param, device, group) or tensor_obstacle(param.data)
    if id(param) not in places:
        return "not in the optimizer"
    if param.device.type != device.type:
        return f"it is on {param.device}"
    return tensor_obstacle(param.data)
