"""Switch CommFuse on and off for a model that `parallelize_module` was applied to, alone or below `fully_shard`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.announce import log_report
from commfuse_dp.integrations.attach.attachment import Attachment, attach, attachment_of, check_absent, remove_from
from commfuse_dp.integrations.attach.fingerprint import OFF, check_equal, check_same_left, describe
from commfuse_dp.integrations.attach.forwards import SERVICE, TENSOR_ATTACHMENT, Service, serve
from commfuse_dp.integrations.attach.ranks import Ranks, any_of
from commfuse_dp.integrations.attach.report import ParameterRow, Path, Report
from commfuse_dp.integrations.attach.root import follow_forward
from commfuse_dp.integrations.attach.rules import check_exclude, original_type, require_fused
from commfuse_dp.integrations.attach.transaction import Transaction
from commfuse_dp.integrations.fsdp2 import remove as remove_fsdp2
from commfuse_dp.integrations.fsdp2.apply import apply_over
from commfuse_dp.integrations.fsdp2.layers import TensorLayer
from commfuse_dp.integrations.hugging_face_tp.compat import sharded
from commfuse_dp.integrations.hugging_face_tp.install import install as install_hugging_face
from commfuse_dp.integrations.hugging_face_tp.layers import HeldForward
from commfuse_dp.integrations.hugging_face_tp.select import select as select_hugging_face
from commfuse_dp.integrations.tensor_parallel import compat
from commfuse_dp.integrations.tensor_parallel.layers import (
    ColumnGroup,
    Division,
    FeaturesHook,
    GatherHook,
    NormHook,
    PassHook,
    RowLayer,
    ServedLayer,
    StyleHook,
)
from commfuse_dp.integrations.tensor_parallel.replicated import ReplicatedColumns, WholeHook
from commfuse_dp.integrations.tensor_parallel.rows import left_rows, module_rows, partial_sums, shared_gather, summed_gradient
from commfuse_dp.integrations.tensor_parallel.select import Selected, Selection, select
from commfuse_dp.integrations.tensor_parallel.units import tensor_layer
from commfuse_dp.integrations.unmodified.first_call import forget
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from commfuse_dp.collectives.steps import follow_steps
from commfuse_dp.config import CommFuseConfig, resolved
from commfuse_dp.interrupts import unwatch
from commfuse_dp.transport.base import Transport


def apply(model: nn.Module, config: CommFuseConfig | None = None) -> Report:
    """Replace the communication of tensor-parallel layers with sequence parallelism by CommFuse; below `fully_shard`, that of
    FSDP2 as well. Collective: all ranks of the model's meshes call it, after the last `parallelize_module` and the last
    `fully_shard`.

    Parameters, optimizer and state_dict stay as they are. The report has path `column` or `row` for what is served, and the
    reason for whatever stays with DTensor. Raises ConfigError, MismatchError, TransportError, as apply() for FSDP2 does.
    """
    forget(model)
    groups = groups_of(model)
    config, selection, facts = Ranks(groups).together(lambda: _prepare(model, config))
    unserved: dict[str, tuple[Path, str]] = {name: ("stock", why) for name, why in selection.unserved.items()}
    check_same_left(unserved if config.enabled else OFF, facts, groups)
    group, served = selection.group, config
    ranks = Ranks([group, *groups])
    before, transaction = attachment_of(model), Transaction()
    transaction.on_undo(lambda: remove_from(model, key=TENSOR_ATTACHMENT) if applied(model) else None)
    transaction.on_undo(lambda: remove_fsdp2(model) if attachment_of(model) is not before else None)
    try:
        if group is not None and config.enabled:
            ranks.together(lambda: check_equal(facts, group))
            report = attach(model, ranks, lambda found: _attach(found, model, selection, served), TENSOR_ATTACHMENT)
        else:
            reason = "no layer that can be served" if config.enabled else "enabled=False"
            report = ranks.together(lambda: _untouched(model, selection, served, reason))
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            layers = ranks.together(lambda: _tensor_layers(model))
            data = apply_over(layers, model, config)
            report = ranks.together(lambda: _of_both(data, report))
        ranks.together(lambda: _follow_steps(model, group))
        ranks.together(lambda: log_report(report, ranks))
    except BaseException:
        transaction.roll_back()
        raise
    return report


def remove(model: nn.Module) -> None:
    """Give stock DTensor (and FSDP2) back. Between steps only; all ranks call it."""
    if attachment_of(model) is not None:
        remove_fsdp2(model)
    remove_from(model, key=TENSOR_ATTACHMENT)


def applied(model: nn.Module) -> bool:
    """Whether tensor-parallel layers of this model are served."""
    return attachment_of(model, TENSOR_ATTACHMENT) is not None


def groups_of(model: nn.Module) -> list[dist.ProcessGroup]:
    """Of the meshes that the model is sharded over."""
    found: dict[int, dist.ProcessGroup] = {}
    for param in model.parameters():
        if isinstance(param, DTensor):
            found.update({id(group): group for group in param.device_mesh.get_all_groups()})
    for module in model.modules():
        for style in compat.styles_of(module):
            found.update({id(group): group for group in style.mesh.get_all_groups()})
    return list(found.values())


def _prepare(model: nn.Module, config: CommFuseConfig | None) -> tuple[CommFuseConfig, Selected, list[tuple[str, str]]]:
    config = resolved(config)
    check_absent(model, TENSOR_ATTACHMENT)
    check_exclude(model, config)
    selection = select_hugging_face(model, config) if sharded(model) else select(model, config)
    require_fused(config, (f"{name} ({why})" for name, why in selection.left.items() if _is_linear(model.get_submodule(name))))
    return config, selection, describe(model, config)


def _is_linear(module: nn.Module) -> bool:
    return issubclass(original_type(module), nn.Linear)


# ---- attaching -------------------------------------------------------------------------------------------------------
def _attach(attachment: Attachment, model: nn.Module, selection: Selected, config: CommFuseConfig) -> Report:
    assert selection.group is not None
    transport = attachment.connect(config, group=selection.group, device=selection.device)
    if isinstance(selection, Selection):
        rows, gathered_inputs = _install(attachment, model, selection, config, transport)
    else:
        rows, gathered_inputs = install_hugging_face(attachment, model, selection, config, transport)
    rows += left_rows(model, selection.left, {row.name for row in rows})
    names = [name for name, _ in model.named_parameters()]
    report = attachment.finish(rows, config, names=names, minimum_bytes_per_step=0)
    report.gathered_inputs = gathered_inputs
    return report


def _install(
    attachment: Attachment, model: nn.Module, selection: Selection, config: CommFuseConfig, transport: Transport
) -> tuple[list[ParameterRow], dict[str, int]]:
    division = Division(transport, config, selection.stock_gathers)
    rows: list[ParameterRow] = []
    for found in selection.groups:
        group = ColumnGroup(found, division)
        _replace_hook(attachment, found.module, GatherHook(group))
        names = [member.name for member in found.members]
        for member in found.members:
            if not group.alone:
                _replace_hook(attachment, member.module, PassHook(member.module, member.style))
            serve(attachment.transaction, member.module, Service(member.module, group.forward))
            rows += module_rows(member.name, member.module, "column", shared_gather(found.name, member.name, names))
    for siblings in selection.siblings:
        columns = ReplicatedColumns(siblings, division, siblings.members[0].style.mesh)
        names = [member.name for member in siblings.members]
        for member in siblings.members:
            _replace_hook(attachment, member.module, WholeHook(member))
            serve(attachment.transaction, member.module, Service(member.module, columns.forward))
            rows += module_rows(member.name, member.module, "column", summed_gradient(member.name, names))
    for member in selection.rows:
        _replace_hook(attachment, member.module, FeaturesHook(member.module, member.style))
        serve(attachment.transaction, member.module, Service(member.module, RowLayer(member, division).forward))
        rows += module_rows(member.name, member.module, "row", partial_sums(member.style))
    for member in selection.layer_norms:
        _replace_hook(attachment, member.module, NormHook(member.module, member.style))
    follow_forward(attachment.transaction, model, begin=division.enter, left=division.leave)
    return rows, division.gathered_inputs


def _replace_hook(attachment: Attachment, module: nn.Module, hook: StyleHook) -> None:
    """Under the same number, so that the order of the module's hooks stays."""
    attachment.transaction.set(module._forward_pre_hooks, hook.hook_id, hook)


def _follow_steps(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """A forward of the root begins a step: see collectives/steps.py. With data parallelism it is one of its engine, too."""
    attachment, data = attachment_of(model, TENSOR_ATTACHMENT), attachment_of(model)
    if attachment is None or group is None:
        return
    if data is not None:  # who has lost a rank on one of the transports tells the peers on the other
        data.transport.membership.when_lost.append(attachment.transport.membership.tell_lost)
        attachment.transport.membership.when_lost.append(data.transport.membership.tell_lost)
        if data.transport.recovery is None:
            return
    steps = follow_steps(attachment.transport)
    if steps is None:
        return
    attachment.transaction.on_undo(lambda: unwatch(steps))
    follow_forward(attachment.transaction, model, begin=steps.begin_next, raised=steps.forward_raised, graphs=True)
    if data is not None:
        engine, vote = data.engine, any_of(group, torch.device("cpu"))
        data.transaction.acquire(lambda: engine.step_with(steps, vote), lambda part: part())


# ---- report ----------------------------------------------------------------------------------------------------------
def _untouched(model: nn.Module, selection: Selected, config: CommFuseConfig, why: str) -> Report:
    world_size = selection.mesh.size() if selection.mesh is not None else 1
    return Report.untouched(left_rows(model, selection.left, set()), config, why, world_size)


def _tensor_layers(model: nn.Module) -> list[TensorLayer]:
    """What takes its weights by slices of data parallelism."""
    found = []
    for module in model.modules():
        service, held = vars(module).get(SERVICE), vars(module).get("forward")
        forward = held.compute if isinstance(held, HeldForward) else getattr(service, "compute", None)
        layer = getattr(forward, "__self__", None)
        if isinstance(layer, ServedLayer) and layer.takes_units:
            found.append(tensor_layer(module, forward, layer.mesh, layer.name, layer.sharded_dim))
    return found


def _of_both(data: Report, report: Report) -> Report:
    """What data parallelism and, below it, tensor parallelism do with each parameter."""
    served = {row.name: row for row in report.rows}
    rows = []
    for row in data.rows:
        tensor = served.get(row.name)
        if tensor is None or tensor.path not in ("column", "row"):
            rows.append(row)
        else:
            rows.append(tensor._replace(reason=f"{tensor.reason}; data parallel: {row.path} ({row.reason})"))
    data.rows[:] = rows
    data.tensor_parallel, data.gathered_inputs = report, report.gathered_inputs
    return data
