"""Switch CommFuse on and off for a model that `fully_shard` was applied to."""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from typing import Any

import torch
import torch.distributed as dist
from commfuse_dp.integrations.fingerprint import check_equal, describe
from commfuse_dp.integrations.fsdp2 import compat
from commfuse_dp.integrations.fsdp2.claim import ClaimedLayer, ClaimPolicy, follow
from commfuse_dp.integrations.fsdp2.hooks import StockAllGather, StockReduceScatter, StreamAllGather, StreamReduceScatter
from commfuse_dp.integrations.fsdp2.layers import GroupPolicy, ModuleParameter, fused_forward, gathered_forward
from commfuse_dp.integrations.fsdp2.select import Left, Selection, select
from commfuse_dp.integrations.report import ParameterRow, Path, Report
from commfuse_dp.integrations.root import hook_root
from torch import nn
from torch.distributed.fsdp import FSDPModule

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine.collective_port import CollectivePort
from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.operand import UnitOperand
from commfuse_dp.engine.plan import Unit, UnitPolicy
from commfuse_dp.engine.room import published_bytes, room_for
from commfuse_dp.engine.scatter import ReplicaGroup
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
        self.claims: list[ClaimedLayer] = []  # likewise
        self.hooked: list[tuple[FSDPModule, Any, Any]] = []  # module, its collectives before
        self.prefetched: list[tuple[FSDPModule, FSDPModule, Any]] = []  # module, the one after it, whose group is fetched ahead
        self.resettable: list[FSDPModule] = []  # with a reset_iter_state of ours
        self.handles: list[Any] = []
        self.operands: list[UnitOperand] = []
        self.finalizer: weakref.finalize | None = None


def apply(model: nn.Module, config: CommFuseConfig | None = None) -> Report:
    """Replace the communication of an FSDP2 model by CommFuse. Collective: all ranks of the model's mesh call it.

    Call it once, after the last `fully_shard`; the optimizer may be built before or after, and state_dict, checkpoints and
    gradient clipping keep working as they do with FSDP2. The default config, CommFuseConfig.from_environment(), fuses whatever
    can be fused. With a torch that lacks the private names this needs (a warning and the report say so), layers are fused only
    if `claim` got them before `fully_shard`.

    Returns a printable report: path and reason for every parameter.
    Raises ConfigError (wrong settings, apply() twice or before fully_shard), MismatchError (ranks differ), TransportError.
    """
    config = config if config is not None else CommFuseConfig.from_environment()
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
        claims = ", ".join(f"{name} ({layer.policy})" for name, layer in selection.claims) or "none"
        check_equal([*describe(model, config), ("claimed layers", claims)], selection.shard_group)
    follow(model)
    if not config.enabled or selection.shard_group is None:
        reason = "enabled=False" if not config.enabled else "no parameter group that CommFuse can serve"
        return _untouched(selection, config, reason)
    if config.fuse == "always":
        _require_fusion(selection)
    if selection.missing is not None:
        _warn(selection)
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
    for layer in application.claims:
        layer.restore()
    for group, original in application.groups:
        compat.reattach_params(group, original)
    for fsdp_module in application.resettable:
        del vars(fsdp_module)["reset_iter_state"]
    _prefetch(application, False)
    for fsdp_module, gather, reduce in application.hooked:
        fsdp_module.set_custom_all_gather(gather)
        fsdp_module.set_custom_reduce_scatter(reduce)
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
    lost = [f"{item.name} ({item.reason})" for item in selection.left if _is_linear(item)]
    lost += [f"{name} ({why})" for name, layer, why in selection.plain if layer.fused]
    if lost:
        raise ConfigError(f"fuse='always', but these linears cannot be fused: {'; '.join(lost)}. Use fuse='auto'.")


def _is_linear(item: Left) -> bool:
    return any(isinstance(module, nn.Linear) for module in item.modules)


def _warn(selection: Selection) -> None:
    unfused = sum(_is_linear(item) for item in selection.left)
    log.warning(
        "CommFuse cannot take layers out of FSDP2's groups: %s. %d parameters of linear layers stay unfused, over FSDP2's "
        "hooks and without prefetch of ours; %d layers are served because they were claimed. To serve all: "
        "claimed = commfuse_dp.claim(model) before the first fully_shard, and ignored_params=claimed.params for each.",
        selection.missing,
        unfused,
        len(selection.claims),
    )


def _untouched(selection: Selection, config: CommFuseConfig, why: str) -> Report:
    rows = [ParameterRow(item.name, "stock", item.reason, item.param.numel()) for item in selection.left]
    rows += _plain_rows(selection)
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


def _plain_rows(selection: Selection) -> list[ParameterRow]:
    return [
        ParameterRow(slot.name, "plain", why, _numel(slot.shape))
        for name, layer, why in selection.plain
        for slot in layer.slots(name)
    ]


def _install(model: nn.Module, selection: Selection, config: CommFuseConfig) -> Report:
    group = selection.shard_group
    assert group is not None
    device = next(param for param in model.parameters()).device
    if device.type == "meta":
        device = torch.device("cpu" if dist.get_backend(group) == "gloo" else "cuda")
    units: list[Unit] = []
    for adoption in selection.adoptions:
        slots = [
            ModuleParameter(f"{adoption.name}.{param_name}" if adoption.name else param_name, adoption.module, param_name)
            for param_name in adoption.param_names
        ]
        units.append(Unit(len(units), adoption.name, slots, GroupPolicy(adoption.group), config.slices_per_rank))
    for name, layer in selection.claims:
        units.append(Unit(len(units), name, layer.slots(name), layer.policy, config.slices_per_rank))
    probe = Probe()
    transport, transport_reason = open_transport(
        config.transport,
        group=group,
        inbox_bytes=config.inbox_bytes if device.type == "cpu" else room_for(units, group.size(), config),
        deadline_s=config.deadline_s,
        probe=probe,
        device=device,
        device_ordered=True,
        order=config.order,
        published_bytes=published_bytes(units),
    )
    replicas = None
    if selection.replicate_group is not None:
        ranks = dist.get_process_group_ranks(selection.replicate_group)
        if len(ranks) > 1:  # a communicator of our own: FSDP2's must not see our all-reduces between its collectives
            replicas = ReplicaGroup(dist.new_group(ranks, use_local_synchronization=True), len(ranks))
    engine = Engine(transport, units, config, device=device, replicas=replicas)
    application = _Application(engine)
    rows: list[ParameterRow] = []
    for adoption, unit in zip(selection.adoptions, units, strict=False):
        rows += _serve(application, unit, adoption.module, adoption.fused, adoption.param_names)
        application.modules.append(adoption.module)
    for (_, layer), unit in zip(selection.claims, units[len(selection.adoptions) :], strict=True):
        rows += _serve(application, unit, layer.module, layer.fused, layer.param_names, claimed=True)
        application.claims.append(layer)
    rows += _plain_rows(selection)
    _keep_originals(application, selection)
    for adoption in selection.adoptions:
        for fsdp_param in adoption.fsdp_params:
            compat.detach_param(adoption.group, fsdp_param)
    rows += _hook_rest(application, selection, engine)
    application.handles = hook_root(
        model, engine, before=lambda: _prefetch(application, True), after=lambda: _prefetch(application, False)
    )
    _hook_reset(application, model, engine)
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
        kernels=engine.kernel_explainer(),
    )
    log.info("%s", report)
    return report


def _serve(
    application: _Application, unit: Unit, module: nn.Module, fused: bool, param_names: list[str], *, claimed: bool = False
) -> list[ParameterRow]:
    operand = UnitOperand(application.engine, unit)
    application.operands.append(operand)
    forward = fused_forward(operand) if fused else gathered_forward(module, operand, param_names)
    vars(module)["forward"] = forward  # an instance attribute: the class keeps its own
    reason = "nn.Linear" if fused else f"{type(module).__name__} cannot be computed by row slices"
    reason += ", claimed" if claimed else ""
    return [ParameterRow(slot.name, "fused" if fused else "gathered", reason, _numel(slot.shape)) for slot in unit.slots]


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
    served: set[int] = set()
    waiting: list[tuple[FSDPModule, Any]] = []
    if engine.transport.device_ordered:  # what is waited for in streams cannot pump plain collectives from the host
        for _, group in selection.groups:
            selection.foreign.setdefault(id(group), "on a GPU, what is not fused stays with FSDP2's own collectives")
    port = CollectivePort(engine)
    for module, group in selection.groups:
        if id(group) in selection.foreign or all(item.group is not group for item in selection.left):
            continue
        assert isinstance(module, FSDPModule)
        before = (StockAllGather(), StockReduceScatter()) if selection.missing else compat.collectives(group)
        try:
            module.set_custom_all_gather(StreamAllGather(port))
        except ValueError:
            selection.foreign[id(group)] = "FSDP2 allows no custom collectives for a module with several parameter groups"
            continue
        module.set_custom_reduce_scatter(StreamReduceScatter(port))
        application.hooked.append((module, *before))
        served.add(id(group))
        if selection.missing is None and not compat.has_forward_prefetch(module):
            waiting.append((module, group))
    application.prefetched = [(module, *following) for (module, _), following in itertools.pairwise(waiting)]
    for item in selection.left:
        path: Path = "hooks" if id(item.group) in served else "stock"
        rows.append(ParameterRow(item.name, path, selection.foreign.get(id(item.group), item.reason), item.param.numel()))
    return rows


def _prefetch(application: _Application, on: bool) -> None:
    """Let FSDP2 fetch the next group ahead, during a root's forward only.

    A group that was fetched and then not used would keep what it got, and be out of date after the next optimizer step.
    """
    for module, following, group in application.prefetched:
        module.set_modules_to_forward_prefetch([following] if on else [])
        compat.drop_pending_unshard(group)


def _hook_reset(application: _Application, model: nn.Module, engine: Engine) -> None:
    """FSDPModule.reset_iter_state, of newer versions: what an iteration broken off has accumulated is dropped here, too."""

    def reset(module: FSDPModule) -> None:
        for unit in engine.units:
            unit.accumulated = unit.replica_partial = None
        type(module).reset_iter_state(module)

    for module in model.modules():
        if isinstance(module, FSDPModule) and hasattr(module, "reset_iter_state"):
            vars(module)["reset_iter_state"] = functools.partial(reset, module)
            application.resettable.append(module)


def _minimum_bytes(selection: Selection, rank: int, world_size: int) -> int:
    """Bytes this rank must receive in a training step: see Report.minimum_bytes_per_step.

    Without the private names, FSDP2's own groups are taken to reshard after forward and to communicate in full precision.
    """
    served: list[tuple[UnitPolicy, torch.Tensor, bool]] = [
        (GroupPolicy(adoption.group), param.sharded_param, adoption.fused)
        for adoption in selection.adoptions
        for param in adoption.fsdp_params
    ]
    served += [(layer.policy, slot.parameter, layer.fused) for name, layer in selection.claims for slot in layer.slots(name)]
    for item in selection.left:
        if id(item.group) not in selection.foreign:
            served.append((ClaimPolicy() if selection.missing else GroupPolicy(item.group), item.param, True))
    total = 0
    for policy, param, again in served:
        computed = (policy.compute_dtype or param.dtype).itemsize
        reduced = min(computed, (policy.reduce_dtype or param.dtype).itemsize)
        with torch.no_grad():
            own = param.to_local().numel()  # type: ignore[attr-defined]
        gathers = 2 if again and not policy.keep_after_forward else 1
        total += (param.numel() - own) * computed * gathers
        if param.requires_grad:
            total += own * (world_size - 1) * reduced
    return total


__all__ = ["CommFuseError", "apply", "engine_of", "remove"]
