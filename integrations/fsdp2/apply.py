"""Switch CommFuse on and off for a model that `fully_shard` was applied to."""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.announce import log_report
from commfuse_dp.integrations.attach.attachment import Attachment, attach, check_absent, engine_of, fused, gathered, remove_from
from commfuse_dp.integrations.attach.fingerprint import OFF, check_equal, check_same_left, describe
from commfuse_dp.integrations.attach.forwards import whole_function
from commfuse_dp.integrations.attach.linears import looks_linear
from commfuse_dp.integrations.attach.ranks import Ranks
from commfuse_dp.integrations.attach.reads import Scope
from commfuse_dp.integrations.attach.report import ParameterRow, Path, Report, frozen_first
from commfuse_dp.integrations.attach.root import hook_root
from commfuse_dp.integrations.attach.rules import check_exclude, form_of, full_name, how_computed, original_type, require_fused
from commfuse_dp.integrations.fsdp2 import compat, hooks
from commfuse_dp.integrations.fsdp2.claim import ClaimPolicy, follow, read_whole
from commfuse_dp.integrations.fsdp2.layers import GroupPolicy, ModuleParameter, ShardedGradients, TensorLayer, gathered_shape
from commfuse_dp.integrations.fsdp2.select import Left, Selection, select
from commfuse_dp.integrations.unmodified.first_call import forget
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from commfuse_dp.config import CommFuseConfig, resolved
from commfuse_dp.engine.broken import resetting
from commfuse_dp.engine.collective_port import CollectivePort
from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.plan import Unit, UnitPolicy
from commfuse_dp.errors import CommFuseError, ConfigError

log = logging.getLogger("commfuse_dp")


def apply(model: nn.Module, config: CommFuseConfig | None = None) -> Report:
    """Replace the communication of an FSDP2 model by CommFuse. Collective: all ranks of the model's mesh call it.

    Call it once, after the last `fully_shard`; the optimizer may be built before or after, and state_dict, checkpoints and
    gradient clipping keep working as they do with FSDP2. The default config, CommFuseConfig.from_environment(), fuses whatever
    can be fused. With a torch that lacks the private names this needs (a warning and the report say so), layers are fused only
    if `claim` got them before `fully_shard`.

    Returns a printable report: path and reason for every parameter.
    Raises ConfigError (wrong settings, apply() twice or before fully_shard), MismatchError (ranks differ), TransportError.
    """
    ranks = Ranks(groups_of(model))
    report = apply_over((), model, config)
    log_report(report, ranks)
    return report


def apply_over(tensor_layers: Sequence[TensorLayer], model: nn.Module, config: CommFuseConfig | None) -> Report:
    """`apply`, where tensor parallelism serves `tensor_layers`; it logs the report of both."""
    forget(model)
    groups = groups_of(model)
    config, selection, facts = Ranks(groups).together(lambda: _prepare(model, config, tensor_layers))
    check_same_left(selection.unserved if config.enabled else OFF, facts, groups)
    # Switched off, ranks may differ in what could be served, and so in the group that would serve it.
    ranks = Ranks([selection.shard_group, selection.replicate_group, *groups] if config.enabled else groups)
    if selection.shard_group is not None and config.enabled:
        group = selection.shard_group
        claims = ", ".join(f"{name} ({layer.policy})" for name, layer in selection.claims) or "none"
        ranks.together(lambda: check_equal([*facts, ("claimed layers", claims)], group))
    untouched = ranks.together(lambda: _begin(model, selection, config))
    if untouched is not None:
        return untouched
    return attach(model, ranks, lambda attachment: _install(attachment, model, selection, config))


def remove(model: nn.Module) -> None:
    """Give stock FSDP2 back. Between steps only; all ranks call it. Of a step that was broken off nothing is left."""
    engine = engine_of(model)
    try:
        if engine is not None:
            if engine.broken_off:
                with resetting(engine):
                    engine.on_recovery()
            _reshard(model)
    finally:  # also if peers that the framework waits for are gone
        remove_from(model)


def groups_of(model: nn.Module) -> list[dist.ProcessGroup]:
    """Of the meshes that the model is sharded over."""
    _reshard(model)
    sharded = [param for param in model.parameters() if isinstance(param, DTensor)]
    return list({id(group): group for param in sharded for group in param.device_mesh.get_all_groups()}.values())


def _prepare(
    model: nn.Module, config: CommFuseConfig | None, tensor_layers: Sequence[TensorLayer]
) -> tuple[CommFuseConfig, Selection, list[tuple[str, str]]]:
    config = resolved(config)
    check_absent(model)
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(
            f"commfuse_dp.apply() found no FSDP2 module in this {type(model).__name__}, and no tensor-parallel layer. Call "
            "fully_shard on the layers and on the model first: for layer in model.layers: fully_shard(layer); "
            "fully_shard(model); commfuse_dp.apply(model); or parallelize_module. DDP and FSDP1 have hooks "
            '(commfuse_dp.integrations.register_ddp, register_fsdp1), DeepSpeed the block "commfuse" in its JSON'
        )
    check_exclude(model, config)
    return config, select(model, config, {id(layer.module): layer for layer in tensor_layers}), describe(model, config)


def _reshard(model: nn.Module) -> None:
    """A group that was used without a backward keeps its parameters gathered, and would miss those that come or go; so would
    an `unshard(async_op=True)` that has not been waited for."""
    known = compat.probe(model) is None  # without the private names a pending unshard stays as it is
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in compat.param_groups(module) if known else ():
                compat.drop_pending_unshard(group)
            module.reshard()


def _begin(model: nn.Module, selection: Selection, config: CommFuseConfig) -> Report | None:
    """The report of a model that nothing of which is served."""
    follow(model)
    if not config.enabled or selection.shard_group is None:
        reason = "enabled=False" if not config.enabled else "no parameter group that CommFuse can serve"
        return _untouched(selection, config, reason)
    left = (f"{item.name} ({item.reason})" for item in selection.left if _is_linear(item))
    plain = (f"{name} ({why})" for name, layer, why in selection.plain if layer.fused)
    require_fused(config, itertools.chain(left, plain))
    if selection.missing is not None:
        _warn(selection)
    return None


def _is_linear(item: Left) -> bool:
    return any(looks_linear(original_type(module)) for module in item.modules)


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
            rows.append(ParameterRow(full_name(adoption.name, param_name), "stock", why, param.sharded_param.numel()))
    world_size = selection.shard_group.size() if selection.shard_group is not None else 1
    return Report.untouched(rows, config, why, world_size)


def _plain_rows(selection: Selection) -> list[ParameterRow]:
    return [
        ParameterRow(slot.name, "plain", why, _numel(slot.shape))
        for name, layer, why in selection.plain
        for slot in layer.slots(name)
    ]


def _install(attachment: Attachment, model: nn.Module, selection: Selection, config: CommFuseConfig) -> Report:
    group = selection.shard_group
    assert group is not None
    device = next(param for param in model.parameters()).device
    if device.type == "meta":
        device = torch.device("cpu" if dist.get_backend(group) == "gloo" else "cuda")
    units: list[Unit] = []
    groups = [group, selection.replicate_group]
    policies: dict[int, GroupPolicy] = {}  # by FSDP2's group: what it wants is read once a backward
    for adoption in selection.adoptions:
        within = groups if adoption.tensor is not None else []
        slots = [
            ModuleParameter(full_name(adoption.name, name), adoption.module, name, within) for name in adoption.param_names
        ]
        policy = policies.setdefault(id(adoption.group), GroupPolicy(adoption.group))
        units.append(Unit(len(units), adoption.name, slots, policy, config.slices_per_rank))
    for name, layer in selection.claims:
        units.append(Unit(len(units), name, layer.slots(name), layer.policy, config.slices_per_rank))
    engine = attachment.open(
        units,
        config,
        group=group,
        device=device,
        order=config.order,
        numel=sum(param.numel() for param in model.parameters()),
        replicate_group=selection.replicate_group,
    )
    rows: list[ParameterRow] = []
    scopes = _scopes(attachment, selection)
    for adoption, unit in zip(selection.adoptions, units, strict=False):
        scope = scopes[id(adoption.group)]
        if adoption.tensor is None:
            rows += _serve(attachment, unit, adoption.module, adoption.fused, scope)
        else:
            attachment.serve(adoption.module, unit, adoption.tensor.compute, scope, wrap=adoption.tensor.wrap)
            rows += _rows(unit, "fused", "slices go into and out of the tensor-parallel layer")
    whole = read_whole(attachment.transaction, model)
    for (_, layer), unit in zip(selection.claims, units[len(selection.adoptions) :], strict=True):
        rows += _serve(attachment, unit, layer.module, layer.fused, whole.get(id(layer.module)), claimed=True)
    rows += _plain_rows(selection)
    _detach(attachment, selection)
    more, prefetch = _hook_rest(attachment, selection, engine)
    hook_root(
        attachment.transaction,
        model,
        engine,
        before=functools.partial(_prefetch, prefetch, True),
        after=functools.partial(_prefetch, prefetch, False),
    )
    _hook_reset(attachment, model, engine)
    _hook_zero_grad(attachment, model, [] if selection.missing else [group for _, group in selection.groups])
    return attachment.finish(
        rows + more,
        config,
        names=[name for name, _ in model.named_parameters()],
        minimum_bytes_per_step=_minimum_bytes(selection, frozen_first(model), engine.world_size),
    )


def _scopes(attachment: Attachment, selection: Selection) -> dict[int, Scope]:
    """id(group) -> when its layers are read as whole parameters: while FSDP2 has the group unsharded."""
    scopes: dict[int, Scope] = {}
    for adoption in selection.adoptions:
        group = adoption.group
        if id(group) not in scopes:
            scope = scopes[id(group)] = Scope(functools.partial(compat.is_unsharded, group))
            attachment.transaction.set(*compat.watch_reshard(group, scope.close))
        for handle in compat.reshard_for_state_dict(adoption.module, group):
            attachment.transaction.on_undo(handle.remove)
    return scopes


def _serve(
    attachment: Attachment, unit: Unit, module: nn.Module, fusable: bool, scope: Scope | None = None, *, claimed: bool = False
) -> list[ParameterRow]:
    kind, form = original_type(module), form_of(module) if fusable else None
    if form is not None:
        attachment.serve(module, unit, fused(form, kind), scope, transposed=form.transposed)
    else:
        attachment.serve(module, unit, gathered(whole_function(kind)), scope)
    reason = how_computed(kind, form) + (", claimed" if claimed else "")
    return _rows(unit, "fused" if fusable else "gathered", reason)


def _rows(unit: Unit, path: Path, reason: str) -> list[ParameterRow]:
    return [ParameterRow(slot.name, path, reason, _numel(slot.shape)) for slot in unit.slots]


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _detach(attachment: Attachment, selection: Selection) -> None:
    """Take what is served out of FSDP2's hands."""
    taken: dict[int, tuple[Any, list[Any]]] = {}
    for adoption in selection.adoptions:
        taken.setdefault(id(adoption.group), (adoption.group, []))[1].extend(adoption.fsdp_params)
    for group, fsdp_params in taken.values():
        attachment.transaction.on_undo(functools.partial(compat.reattach_params, group, list(group.fsdp_params)))
        for fsdp_param in fsdp_params:
            compat.detach_param(group, fsdp_param)


_Prefetched = list[tuple[FSDPModule, FSDPModule, Any]]  # module, the one after it, whose group is fetched ahead


def _hook_rest(attachment: Attachment, selection: Selection, engine: Engine) -> tuple[list[ParameterRow], _Prefetched]:
    """Custom collectives for the groups that still have parameters; prefetch of the next group where none is set."""
    rows = []
    served: set[int] = set()
    waiting: list[tuple[FSDPModule, Any]] = []
    if engine.transport.device is not None:  # what is waited for in streams cannot pump plain collectives from the host
        for _, group in selection.groups:
            selection.foreign.setdefault(id(group), "on a GPU, what is not fused stays with FSDP2's own collectives")
    fix = "Call reset_iter_state() on the root module after a step that was broken off, on all ranks."
    port = CollectivePort(engine, "an FSDP2 group", fix)
    for module, group in selection.groups:
        if id(group) in selection.foreign or all(item.group is not group for item in selection.left):
            continue
        assert isinstance(module, FSDPModule)
        stock = hooks.StockCollective(hooks.all_gather), hooks.StockCollective(hooks.reduce_scatter)
        gather, reduce = stock if selection.missing else compat.collectives(group)
        try:
            module.set_custom_all_gather(gather)
        except ValueError:
            selection.foreign[id(group)] = "FSDP2 allows no custom collectives for a module with several parameter groups"
            continue
        attachment.transaction.do(
            functools.partial(module.set_custom_all_gather, hooks.StreamAllGather(port)),
            functools.partial(module.set_custom_all_gather, gather),
        )
        attachment.transaction.do(
            functools.partial(module.set_custom_reduce_scatter, hooks.StreamReduceScatter(port)),
            functools.partial(module.set_custom_reduce_scatter, reduce),
        )
        served.add(id(group))
        if selection.missing is None and not compat.has_forward_prefetch(module):
            waiting.append((module, group))
    for item in selection.left:
        path: Path = "hooks" if id(item.group) in served else "stock"
        rows.append(ParameterRow(item.name, path, selection.foreign.get(id(item.group), item.reason), item.param.numel()))
    prefetch = [(module, *following) for (module, _), following in itertools.pairwise(waiting)]
    attachment.transaction.on_undo(functools.partial(_prefetch, prefetch, False))
    return rows, prefetch


def _prefetch(prefetch: _Prefetched, on: bool) -> None:
    """Let FSDP2 fetch the next group ahead, during a root's forward only.

    A group that was fetched and then not used would keep what it got, and be out of date after the next optimizer step.
    """
    for module, following, group in prefetch:
        module.set_modules_to_forward_prefetch([following] if on else [])
        compat.drop_pending_unshard(group)


def _hook_reset(attachment: Attachment, model: nn.Module, engine: Engine) -> None:
    """FSDPModule.reset_iter_state, of newer versions: what an iteration broken off has accumulated is dropped here, too."""

    def reset(ref: weakref.ref[FSDPModule]) -> None:
        engine.drop_accumulated()
        module = ref()
        if module is not None:
            with resetting(engine):
                compat.reset_iteration(module)

    names: list[str] = []
    roots: list[weakref.ref[FSDPModule]] = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            if hasattr(module, "reset_iter_state"):
                attachment.transaction.set(vars(module), "reset_iter_state", functools.partial(reset, weakref.ref(module)))
            if not any(name == outer or name.startswith(f"{outer}.") or not outer for outer in names):
                names.append(name)
                roots.append(weakref.ref(module))

    def reset_roots() -> None:
        """FSDP2 would otherwise leave its groups unsharded, and what is read of served layers with them."""
        for ref in roots:
            module = ref()
            if module is not None and compat.has_begun(module):
                compat.reset_iteration(module)

    engine.on_recovery = reset_roots


def _hook_zero_grad(attachment: Attachment, model: nn.Module, groups: Sequence[Any]) -> None:
    """After a backward that was broken off, `model.zero_grad` drops what has been accumulated without being reduced, too."""
    engine, ref = attachment.engine, weakref.ref(model)
    engine.breakage.gradients = ShardedGradients(engine, groups)

    def zero_grad(set_to_none: bool = True) -> None:
        module = ref()
        if module is not None:
            type(module).zero_grad(module, set_to_none)
            engine.clear_gradients()

    attachment.transaction.set(vars(model), "zero_grad", zero_grad)


def _minimum_bytes(selection: Selection, first: set[str], world_size: int) -> int:
    """Bytes this rank must receive in a training step: see Report.minimum_bytes_per_step.

    first: of `frozen_first`. FSDP2's own groups count twice even so: it prefetches them in the backward behind them. Without
    the private names, they are taken to reshard after forward and to communicate in full precision.
    """
    served: list[tuple[UnitPolicy, torch.Tensor, bool]] = []
    for adoption in selection.adoptions:
        frozen = adoption.tensor is None and first.issuperset(full_name(adoption.name, name) for name in adoption.param_names)
        again = adoption.fused and not frozen
        served += [(GroupPolicy(adoption.group), param.sharded_param, again) for param in adoption.fsdp_params]
    for name, layer in selection.claims:
        slots = layer.slots(name)
        again = layer.fused and not first.issuperset(slot.name for slot in slots)
        served += [(layer.policy, slot.parameter, again) for slot in slots]
    for item in selection.left:
        if id(item.group) not in selection.foreign:
            served.append((ClaimPolicy() if selection.missing else GroupPolicy(item.group), item.param, True))
    total, groups = 0, (selection.shard_group, selection.replicate_group)
    for policy, param, again in served:
        computed = (policy.compute_dtype or param.dtype).itemsize
        reduced = min(computed, (policy.reduce_dtype or param.dtype).itemsize)
        with torch.no_grad():
            own = param.to_local().numel()  # type: ignore[attr-defined]
        gathers = 2 if again and not policy.keep_after_forward else 1
        total += (_numel(gathered_shape(param, groups)) - own) * computed * gathers
        if param.requires_grad:
            total += own * (world_size - 1) * reduced
    return total


__all__ = ["CommFuseError", "apply", "engine_of", "remove"]
