"""Switch CommFuse on and off for a model that `fully_shard` was applied to."""

from __future__ import annotations

import itertools
import logging
import weakref
from typing import Any

import torch
import torch.distributed as dist
from commfuse_dp.integrations.fsdp2 import compat
from commfuse_dp.integrations.fsdp2.fingerprint import check_equal, describe
from commfuse_dp.integrations.fsdp2.hooks import StreamAllGather, StreamReduceScatter
from commfuse_dp.integrations.fsdp2.layers import GroupPolicy, ModuleParameter, fused_forward, gathered_forward
from commfuse_dp.integrations.fsdp2.report import ParameterRow, Report
from commfuse_dp.integrations.fsdp2.select import Adoption, Selection, select
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine.collective_port import CollectivePort
from commfuse_dp.engine.engine import Engine, in_backward
from commfuse_dp.engine.gradients import ReplicaGroup
from commfuse_dp.engine.operand import UnitOperand
from commfuse_dp.engine.plan import Unit
from commfuse_dp.errors import CommFuseError, ConfigError
from commfuse_dp.probe import Probe
from commfuse_dp.transport.select import open_transport

log = logging.getLogger("commfuse_dp")

_ATTRIBUTE = "_commfuse_application"  # on the model, so that both are freed together


class _Application:
    """All that `remove` must undo."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.groups: list[tuple[Any, list[Any]]] = []  # parameter group, its first FSDPParams
        self.modules: list[nn.Module] = []  # with a forward of ours
        self.hooked: list[tuple[FSDPModule, Any, Any, bool]] = []  # module, its collectives before, prefetch set by us
        self.handles: list[Any] = []
        self.operands: list[UnitOperand] = []
        self.finalizer: weakref.finalize | None = None


def apply(model: nn.Module, config: CommFuseConfig | None = None) -> Report:
    """Replace the communication of an FSDP2 model by CommFuse. Collective: all ranks of the model's mesh call it.

    Call it once, after the last `fully_shard`; the optimizer may be built before or after, and state_dict, checkpoints and
    gradient clipping keep working as they do with FSDP2. The default config fuses whatever can be fused.

    Returns a printable report: path and reason for every parameter.
    Raises ConfigError (wrong settings, apply() twice or before fully_shard), MismatchError (ranks differ), TransportError.
    """
    config = config if config is not None else CommFuseConfig()
    if not isinstance(config, CommFuseConfig):
        raise ConfigError(f"config must be a CommFuseConfig, got {type(config).__name__}; use CommFuseConfig(**settings)")
    if _application_of(model) is not None:
        raise ConfigError(
            "commfuse_dp.apply() was called twice for this model; call commfuse_dp.remove(model) before the second"
        )
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(
            "commfuse_dp.apply() found no FSDP2 module in this model. Call fully_shard on the layers and on the model first: "
            "for layer in model.layers: fully_shard(layer); fully_shard(model); commfuse_dp.apply(model)"
        )
    inside = [name for name, module in model.named_modules() if module is not model and _application_of(module)]
    if inside:
        raise ConfigError(f"commfuse_dp.apply() was already called for the submodule {inside[0]!r}; remove() it first")
    _reshard(model)
    selection = select(model, config)
    if selection.shard_group is not None:
        check_equal(describe(model, config), selection.shard_group)
    if not config.enabled or selection.shard_group is None:
        reason = "enabled=False" if not config.enabled else "no parameter group that CommFuse can serve"
        return _untouched(selection, config, reason)
    if config.fuse == "always":
        _require_fusion(selection)
    return _install(model, selection, config)


def remove(model: nn.Module) -> None:
    """Give stock FSDP2 back. Between steps only; all ranks call it."""
    application = _application_of(model)
    if application is None:
        raise ConfigError(
            "commfuse_dp.remove(): this model has no CommFuse; apply() was not called for it, or remove() already"
        )
    del vars(model)[_ATTRIBUTE]
    _reshard(model)
    for handle in application.handles:
        handle.remove()
    for module in application.modules:
        del module.forward
    for group, original in application.groups:
        compat.reattach_params(group, original)
    for fsdp_module, gather, reduce, prefetch in application.hooked:
        fsdp_module.set_custom_all_gather(gather)
        fsdp_module.set_custom_reduce_scatter(reduce)
        if prefetch:
            fsdp_module.set_modules_to_forward_prefetch([])
    application.engine.close()
    if application.finalizer is not None:
        application.finalizer.detach()  # it would keep the engine and its memory as long as the model


def engine_of(model: nn.Module) -> Engine | None:
    """The engine that serves a model, for measurements and tests."""
    application = _application_of(model)
    return application.engine if application is not None else None


def _application_of(module: nn.Module) -> _Application | None:
    return vars(module).get(_ATTRIBUTE)


def _reshard(model: nn.Module) -> None:
    """A group that was used without a backward keeps its parameters gathered, and would miss those that come or go."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _require_fusion(selection: Selection) -> None:
    lost = [
        f"{name} ({why})"
        for name, _, fsdp_param, why in selection.left
        if isinstance(fsdp_param._module_info.module, nn.Linear)
    ]
    if lost:
        raise ConfigError(f"fuse='always', but these linears cannot be fused: {'; '.join(lost)}. Use fuse='auto'.")


def _untouched(selection: Selection, config: CommFuseConfig, why: str) -> Report:
    rows = [ParameterRow(name, "stock", reason, param.sharded_param.numel()) for name, _, param, reason in selection.left]
    for adoption in selection.adoptions:
        for param_name, param in zip(adoption.param_names, adoption.fsdp_params, strict=True):
            rows.append(ParameterRow(f"{adoption.name}.{param_name}", "stock", why, param.sharded_param.numel()))
    world_size = selection.shard_group.size() if selection.shard_group is not None else 1
    return Report(
        rows,
        transport="none",
        transport_reason=why,
        config=config,
        probe=Probe(),
        world_size=world_size,
        minimum_bytes_per_step=0,
    )


def _install(model: nn.Module, selection: Selection, config: CommFuseConfig) -> Report:
    group = selection.shard_group
    assert group is not None
    device = next(param for param in model.parameters()).device
    if device.type == "meta":
        device = torch.device("cpu" if dist.get_backend(group) == "gloo" else "cuda")
    probe = Probe()
    transport, transport_reason = open_transport(
        config.transport, group=group, inbox_bytes=config.inbox_bytes, deadline_s=config.deadline_s, probe=probe, device=device
    )
    replicas = None
    if selection.replicate_group is not None:
        ranks = dist.get_process_group_ranks(selection.replicate_group)
        if len(ranks) > 1:  # a communicator of our own: FSDP2's must not see our all-reduces between its collectives
            replicas = ReplicaGroup(dist.new_group(ranks, use_local_synchronization=True), len(ranks))
    units: list[Unit] = []
    rows: list[ParameterRow] = []
    for adoption in selection.adoptions:
        slots = [
            ModuleParameter(f"{adoption.name}.{param_name}" if adoption.name else param_name, adoption.module, param_name)
            for param_name in adoption.param_names
        ]
        units.append(Unit(len(units), adoption.name, slots, GroupPolicy(adoption.group), config.slices_per_rank))
    engine = Engine(transport, units, config, device=device, replicas=replicas)
    application = _Application(engine)
    for adoption, unit in zip(selection.adoptions, units, strict=True):
        rows += _adopt(application, adoption, unit)
    _keep_originals(application, selection)
    for adoption in selection.adoptions:
        for fsdp_param in adoption.fsdp_params:
            compat.detach_param(adoption.group, fsdp_param)
    rows += _hook_rest(application, selection, engine)
    _hook_root(application, model, engine)
    vars(model)[_ATTRIBUTE] = application
    application.finalizer = weakref.finalize(model, engine.close)  # also at interpreter exit: peers are told goodbye
    names = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    rows.sort(key=lambda row: names.get(row.name, len(names)))
    report = Report(
        rows,
        transport=transport.name,
        transport_reason=transport_reason,
        config=config,
        probe=probe,
        world_size=transport.world_size,
        minimum_bytes_per_step=_minimum_bytes(selection, transport.rank, transport.world_size),
    )
    log.info("%s", report)
    return report


def _adopt(application: _Application, adoption: Adoption, unit: Unit) -> list[ParameterRow]:
    operand = UnitOperand(application.engine, unit)
    application.operands.append(operand)
    module, names = adoption.module, adoption.param_names
    forward = fused_forward(operand) if adoption.fused else gathered_forward(module, operand, names)
    vars(module)["forward"] = forward  # an instance attribute: the class keeps its own
    application.modules.append(module)
    kind = "nn.Linear" if adoption.fused else f"{type(adoption.module).__name__} cannot be computed by row slices"
    return [ParameterRow(slot.name, "fused" if adoption.fused else "gathered", kind, _numel(slot.shape)) for slot in unit.slots]


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _keep_originals(application: _Application, selection: Selection) -> None:
    adopted = {id(adoption.group) for adoption in selection.adoptions}
    for _, group in selection.groups:
        if id(group) in adopted:
            application.groups.append((group, list(group.fsdp_params)))


def _hook_rest(application: _Application, selection: Selection, engine: Engine) -> list[ParameterRow]:
    """Custom collectives for the groups that still have parameters; prefetch of the next group where none is set."""
    rows = []
    port = CollectivePort(engine)
    served: set[int] = set()
    waiting: list[FSDPModule] = []
    for module, group in selection.groups:
        if not group.fsdp_params or id(group) in selection.foreign:
            continue
        assert isinstance(module, FSDPModule)
        if len(compat.param_groups(module)) > 1:
            selection.foreign[id(group)] = "FSDP2 allows no custom collectives for a module with several parameter groups"
            continue
        before = compat.collectives(group)
        module.set_custom_all_gather(StreamAllGather(port))
        module.set_custom_reduce_scatter(StreamReduceScatter(port))
        prefetch = not compat.has_forward_prefetch(module)
        application.hooked.append((module, *before, prefetch))
        served.add(id(group))
        if prefetch:
            waiting.append(module)
    for module, following in itertools.pairwise(waiting):
        module.set_modules_to_forward_prefetch([following])
    for name, group, fsdp_param, reason in selection.left:
        path = "hooks" if id(group) in served else "stock"
        why = selection.foreign.get(id(group), reason)
        rows.append(ParameterRow(name, path, why, fsdp_param.sharded_param.numel()))  # type: ignore[arg-type]
    return rows


def _hook_root(application: _Application, model: nn.Module, engine: Engine) -> None:
    def before(module: nn.Module, args: Any) -> None:
        engine.begin_step()

    def arm(grad: torch.Tensor) -> torch.Tensor:
        engine.arm()
        return grad

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
            return
        wanted = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        for leaf in wanted:
            leaf.register_hook(arm)
        engine.end_forward(bool(wanted))

    before, after = torch.compiler.disable(before), torch.compiler.disable(after)
    application.handles.append(model.register_forward_pre_hook(before, prepend=True))
    application.handles.append(model.register_forward_hook(after, prepend=False))


def _minimum_bytes(selection: Selection, rank: int, world_size: int) -> int:
    """Bytes this rank must receive in a training step: see Report.minimum_bytes_per_step."""
    total = 0
    adopted = [(adoption.group, param, adoption.fused) for adoption in selection.adoptions for param in adoption.fsdp_params]
    left = [(group, param, True) for _, group, param, _ in selection.left if id(group) not in selection.foreign]
    for group, fsdp_param, again in (*adopted, *left):
        param = fsdp_param.sharded_param
        computed = (group.mp_policy.param_dtype or param.dtype).itemsize
        reduced = min(computed, (group.mp_policy.reduce_dtype or param.dtype).itemsize)
        own = compat.local_tensor(param).numel()
        gathers = 2 if again and not compat.keeps_after_forward(group) else 1
        total += (param.numel() - own) * computed * gathers
        if param.requires_grad:
            total += own * (world_size - 1) * reduced
    return total


__all__ = ["CommFuseError", "apply", "engine_of", "remove"]
