"""CommFuse in a DeepSpeed engine: fused layers out of ZeRO's partitions, everything else over the ring backend."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.attachment import (
    Attachment,
    attach,
    attachment_of,
    called_as,
    fused,
    gathered,
    remove_from,
)
from commfuse_dp.integrations.attach.fingerprint import check_equal, check_same_left
from commfuse_dp.integrations.attach.forwards import nothing, whole_function
from commfuse_dp.integrations.attach.linears import LinearForm, looks_linear
from commfuse_dp.integrations.attach.ranks import Ranks
from commfuse_dp.integrations.attach.report import FROZEN, ParameterRow, Path, Report, frozen_first
from commfuse_dp.integrations.attach.root import hook_root
from commfuse_dp.integrations.attach.rules import check_exclude, full_name, how_computed, original_type, require_fused
from commfuse_dp.integrations.deepspeed import backend, compat, fetch_compat, flat_compat
from commfuse_dp.integrations.deepspeed.deferred import DeferredGather, FlatGroup, unwatch, watch
from commfuse_dp.integrations.deepspeed.select import Layer, Selection, select
from commfuse_dp.integrations.deepspeed.weights import PartitionedWeight, ReplicatedWeight, ZeroGradients, ZeroPolicy, referent
from torch import nn

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine.collective_port import CollectivePort
from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.operand import UnitOperand
from commfuse_dp.engine.plan import Unit
from commfuse_dp.errors import ConfigError
from commfuse_dp.ops.linear import replicated_linear
from commfuse_dp.program.layout import chunk_bounds
from commfuse_dp.transport.select import open_transport

log = logging.getLogger("commfuse_dp")


def apply_to_engine(engine: Any, config: CommFuseConfig) -> Report:
    """Switch CommFuse on for a `DeepSpeedEngine` that has just been built. Collective over its data-parallel group: it is on on
    all ranks afterwards, or on none, and then the engine is as it was.

    Returns the report: path and reason of every parameter. Raises ConfigError if fuse="always" cannot be met, MismatchError
    if ranks differ, TransportError; on ranks whose peer failed, an error of the same kind that names the peer and the cause.
    """
    if attachment_of(engine) is not None:
        raise ConfigError(
            "CommFuse is on for this DeepSpeed engine already; call commfuse_dp.integrations.deepspeed.remove first"
        )
    if engine.optimizer is None:
        return _stock(
            engine, config, "the engine has no optimizer: nothing is sharded by ZeRO-1/2, and inference is left alone"
        )
    obstacle = compat.backend_obstacle()
    if obstacle is not None:
        if config.fuse == "always":
            raise ConfigError(f"fuse='always', but DeepSpeed's communication cannot be served: {obstacle}")
        log.warning("CommFuse cannot serve this DeepSpeed engine: %s. It runs as it is.", obstacle)
        return _stock(engine, config, obstacle)
    group = compat.group_of(engine)
    ranks = Ranks([group])
    facts = ranks.together(lambda: _facts(engine, config))
    check_equal(facts, group)
    if not config.enabled:
        return _stock(engine, config, "enabled=false")
    selection, units = ranks.together(lambda: _prepare(engine, config, group))
    check_same_left(selection.unserved, facts, [group])

    def install(attachment: Attachment) -> Report:
        _open(attachment, engine, units, config, group)
        gather = _open_gather(attachment, engine, config, group)
        return _install(attachment, engine, config, selection, units, group, gather)

    return attach(engine, ranks, install)


def remove(engine: Any) -> None:
    """Give stock DeepSpeed back. Between steps only; all ranks call it."""
    remove_from(engine, "CommFuse is not on for this DeepSpeed engine")


def report_of(engine: Any) -> Report | None:
    attachment = attachment_of(engine)
    return attachment.report if attachment is not None else None


def _facts(engine: Any, config: CommFuseConfig) -> list[tuple[str, str]]:
    from commfuse_dp import __version__

    facts = [("commfuse_dp", __version__), ("torch", torch.__version__), ("deepspeed", compat.version())]
    facts += [(f"setting {key}", repr(value)) for key, value in config.model_dump().items()]
    facts.append(("ZeRO stage", str(int(engine.zero_optimization_stage()))))
    facts += [
        (f"parameter {name}", f"{compat.whole_shape(p)} {p.dtype} requires_grad={p.requires_grad}")
        for name, p in engine.module.named_parameters()
    ]
    return facts


def _prepare(engine: Any, config: CommFuseConfig, group: dist.ProcessGroup) -> tuple[Selection, list[Unit]]:
    check_exclude(engine.module, config)
    selection = select(engine, config, group, torch.device(engine.device))
    lost = (f"{name} ({why})" for name, (_, why) in selection.left.items() if why != FROZEN and _is_linear(engine.module, name))
    require_fused(config, lost)
    stage = int(engine.zero_optimization_stage())
    if stage != 3 and config.order == "hierarchical":  # their chains cross to a host once anyway
        raise ConfigError(
            "order='hierarchical' is for ZeRO-3 and FSDP2; under ZeRO-1 and 2 gradients travel in chains: use order='auto'"
        )
    units = [_unit(number, layer, engine, stage, config, group) for number, layer in enumerate(selection.layers)]
    return selection, units


def _is_linear(model: nn.Module, name: str) -> bool:
    return name.endswith("weight") and looks_linear(original_type(model.get_submodule(name.rpartition(".")[0])))


def _stock(engine: Any, config: CommFuseConfig, why: str) -> Report:
    rows = [ParameterRow(name, "stock", why, compat.numel(param)) for name, param in engine.module.named_parameters()]
    return Report.untouched(rows, config, why, dist.get_world_size())


def _open(attachment: Attachment, zero: Any, units: list[Unit], config: CommFuseConfig, group: dist.ProcessGroup) -> None:
    order = config.order if int(zero.zero_optimization_stage()) == 3 else "pairwise"
    total = sum(compat.numel(param) for param in zero.module.parameters())
    attachment.open(units, config, group=group, device=torch.device(zero.device), order=order, numel=total)


def _open_gather(attachment: Attachment, zero: Any, config: CommFuseConfig, group: dist.ProcessGroup) -> DeferredGather | None:
    """For defer_gather, if that is asked for and possible."""
    if not config.defer_gather:
        return None
    if int(zero.zero_optimization_stage()) == 3:
        log.warning("CommFuse: defer_gather concerns ZeRO-1 and 2; under ZeRO-3 there is no all-gather after the step.")
        return None
    obstacle = compat.engine_obstacle(zero)
    if obstacle is not None:
        log.warning("CommFuse: defer_gather is left out: %s.", obstacle)
        return None
    engine, transaction = attachment.engine, attachment.transaction
    symmetric = engine.transport.name == "symmetric"  # what else orders by streams serves no pulls of one's own
    groups = [FlatGroup(*entry) for entry in flat_compat.flat_groups(zero.optimizer, group.size())]
    transport, _ = open_transport(
        "symmetric" if symmetric else config.transport,
        group=group,
        inbox_bytes=1 << 16,
        deadline_s=config.deadline_s,
        probe=engine.probe,
        device=engine.device,
        stream_ordered=symmetric,
        published_bytes=sum(entry.partition * entry.whole.element_size() for entry in groups) * group.size(),
    )
    transaction.on_undo(transport.close)
    gather = DeferredGather(transport, groups)
    transaction.on_undo(gather.close)
    transaction.on_undo(weakref.finalize(zero, gather.close).detach)
    return gather


def _install(
    attachment: Attachment,
    zero: Any,
    config: CommFuseConfig,
    selection: Selection,
    units: list[Unit],
    group: dist.ProcessGroup,
    gather: DeferredGather | None,
) -> Report:
    engine, transaction = attachment.engine, attachment.transaction
    streams = engine.transport.device is not None
    for layer, unit in zip(selection.layers, units, strict=True):
        transposed = layer.form is not None and layer.form.transposed
        attachment.serve(layer.module, unit, _computes(layer), transposed=transposed)
    # On streams DeepSpeed keeps its own collectives: see [Note: Collectives beside streams] in backend.py.
    port = None if streams else CollectivePort(engine, "DeepSpeed", "Its next forward begins anew, on all ranks.")
    client = backend.Client(engine, port, tuple(dist.get_process_group_ranks(group)), gather)
    backend.serve(transaction, zero, client)
    _hook_steps(attachment, zero, selection, units, client)
    if gather is not None:
        for module in zero.module.modules():
            transaction.on_undo(functools.partial(unwatch, module))
        watch(zero.module, gather, flat_compat.flat_ranges(zero.optimizer))
        flat_compat.before_moves(transaction, zero.optimizer, gather.complete)
    _hook_gradients(attachment, zero)
    _hook_destroy(attachment, zero)
    stage = int(zero.zero_optimization_stage())
    report = attachment.finish(
        _rows(selection, streams),
        config,
        names=[name for name, _ in zero.module.named_parameters()],
        minimum_bytes_per_step=_minimum_bytes(selection, zero, stage, group.size(), rest=not streams),
    )
    report.deferred_gather = gather.footprint if gather is not None else None
    return report


def _unit(number: int, layer: Layer, zero: Any, stage: int, config: CommFuseConfig, group: dist.ProcessGroup) -> Unit:
    name, rank, optimizer = full_name(layer.name, "weight"), dist.get_rank(group), zero.optimizer
    slot: PartitionedWeight | ReplicatedWeight
    if layer.place is None:
        bounds = chunk_bounds(compat.numel(layer.param), group.size())
        slot = PartitionedWeight(name, layer.module, layer.param, optimizer, bounds, rank)
    else:
        bounds = layer.place.bounds
        slot = ReplicatedWeight(name, layer.module, layer.param, optimizer, layer.place, rank)
    return Unit(
        number,
        layer.name,
        [slot],
        ZeroPolicy(optimizer, layer.param, stage, travelling=_travelling(layer), zero=zero),
        config.slices_per_rank,
        flat_bounds=bounds,
        replicated=layer.place is not None,
    )


def _travelling(layer: Layer) -> torch.dtype | None:
    """Dtype in which a layer's weight travels, if that is not its own. Under "torch_autocast" ZeRO-3 rounds on the way what
    autocast would round behind it. So does a linear here; what is gathered whole comes as it is."""
    found = compat.travelling_dtype(layer.param)
    return None if layer.place is not None or layer.form is None or found == layer.param.dtype else found


# ---- what a served layer computes ------------------------------------------------------------------------------------
def _computes(layer: Layer) -> Callable[[UnitOperand, int], Callable[..., torch.Tensor]]:
    """For `Attachment.serve`. DeepSpeed keeps the biases, and fetches them for their modules."""
    kind = original_type(layer.module)
    if layer.form is None:
        return gathered(whole_function(kind))
    if layer.place is not None:
        return functools.partial(_replicated, layer.form, kind)
    return fused(layer.form, kind, keeps_bias=True, dtype=layer.param.dtype if _travelling(layer) is not None else None)


def _replicated(form: LinearForm, kind: type[nn.Module], operand: UnitOperand, handle: int) -> Callable[..., torch.Tensor]:
    def compute(module: Any, input: torch.Tensor) -> torch.Tensor:
        # Looked up, not remembered: with defer_gather this is where its values are waited for.
        return replicated_linear(input, module.weight, operand, module.bias)

    return called_as(form, kind, compute, kind.forward)


# ---- hooks -----------------------------------------------------------------------------------------------------------
def _hook_steps(attachment: Attachment, zero: Any, selection: Selection, units: list[Unit], client: backend.Client) -> None:
    engine, optimizer, transaction = attachment.engine, zero.optimizer, attachment.transaction
    stage = int(zero.zero_optimization_stage())
    unfetched = [layer for layer in selection.layers if layer.place is None]
    replicated = [slot for unit in units for slot in unit.slots if isinstance(slot, ReplicatedWeight)]
    microbatch_begins: Callable[[], object] = nothing
    if stage == 3 and fetch_compat.can_forget_fetches(optimizer):
        reference = weakref.ref(optimizer)
        engine.on_recovery = lambda: fetch_compat.forget_fetches(referent(reference))
    if unfetched:
        forget_order = functools.partial(fetch_compat.forget_order, optimizer)
        transaction.do(forget_order, forget_order)
        compat.leave_unfetched(
            transaction, client, [(layer.module, layer.param, _Reader(layer.name, optimizer)) for layer in unfetched]
        )
        microbatch_begins = compat.sum_partitions(transaction, optimizer)

    hooks = compat.GradientHooks(optimizer)
    unheard = _Once(
        "CommFuse: hooks on gradients of weights were registered after deepspeed.initialize, and are not called: of layers %s. "
        "Register them before, or add the layers to 'exclude'."
    )

    def before() -> None:
        unheard(lambda: [layer.name for layer in selection.layers if hooks.on(layer.param)])
        if not compat.coalescing(optimizer):
            for slot in replicated:
                slot.forget()
            if unfetched:
                compat.forget_broken_backward(optimizer)
        microbatch_begins()
        backend.activate(client)

    hook_root(transaction, zero.module, engine, before=before)
    if selection.layers:
        whole = [layer.param for layer in selection.layers if layer.place is not None]
        compat.before_epilogue(transaction, optimizer, functools.partial(collect, engine, optimizer, stage, replicated, whole))
    # It comes behind the engine's end of a backward, and is part of the step.
    compat.during(transaction, zero, "_backward_epilogue", functools.partial(engine.guarded, "(end of DeepSpeed's backward)"))
    for method in ("_backward_epilogue", "step"):
        compat.during(transaction, zero, method, client.inside)


class _Once:
    """A warning about layers, given for the first of them alone."""

    def __init__(self, text: str) -> None:
        self._text: str | None = text

    def __call__(self, layers: Callable[[], list[str]]) -> None:
        if self._text is not None and (found := layers()):
            log.warning(self._text, ", ".join(found))
            self._text = None


class _Reader:
    """Other code reads the weight of a served layer."""

    def __init__(self, layer: str, optimizer: Any) -> None:
        self._layer = layer
        self._optimizer = weakref.ref(optimizer)

    def __call__(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            fetch_compat.forget_order(optimizer)  # recorded without this parameter
        log.warning(
            "CommFuse: the weight of layer %r is read by other code than its own forward, for which ZeRO-3 gathers it whole: "
            "it travels twice. Add %r to 'exclude' to leave the layer to DeepSpeed.",
            self._layer,
            self._layer,
        )


def collect(engine: Engine, optimizer: Any, stage: int, replicated: list[ReplicatedWeight], whole: list[nn.Parameter]) -> None:
    """All gradients of the backward that has just ended must be there before the optimizer looks at them, on any stream.

    replicated, whole: slots and parameters of fused layers under ZeRO-1/2."""
    engine.settle()
    waiting = not compat.coalescing(optimizer) and (replicated or engine.has_accumulated)
    if waiting and (stage == 3 or flat_compat.reduces_every_backward(optimizer)):
        engine.reduce_accumulated()
        flat_compat.reduce_waiting(optimizer, whole)
    if replicated:
        flat_compat.expect_gradients(optimizer)
    for slot in replicated:
        slot.hand_over()
    compat.after_current(optimizer)


def _hook_gradients(attachment: Attachment, zero: Any) -> None:
    """`zero_grad` clears what is accumulated locally, as with stock ZeRO-1. After a backward that was broken off it clears all
    that this has left, and there is no step of the optimizer before."""
    if compat.engine_obstacle(zero) is not None:
        return
    engine, transaction = attachment.engine, attachment.transaction
    engine.breakage.gradients = ZeroGradients(zero, engine)
    optimizer, zero_grad, step, optimizer_zero_grad = zero.optimizer, zero.zero_grad, zero.step, zero.optimizer.zero_grad

    @functools.wraps(zero_grad)
    def cleared(*args: Any, **kwargs: Any) -> Any:
        zero_grad(*args, **kwargs)
        engine.clear_gradients()
        if not flat_compat.accumulates_apart(optimizer):
            engine.drop_accumulated()

    @functools.wraps(optimizer_zero_grad)
    def emptied(*args: Any, **kwargs: Any) -> Any:
        optimizer_zero_grad(*args, **kwargs)
        engine.drop_accumulated()

    @functools.wraps(step)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if compat.steps_now(zero):
            engine.check_gradients()
        return step(*args, **kwargs)

    transaction.set(vars(zero), "zero_grad", cleared)
    transaction.set(vars(optimizer), "zero_grad", emptied)
    transaction.set(vars(zero), "step", checked)


def _hook_destroy(attachment: Attachment, zero: Any) -> None:
    """DeepSpeedEngine.destroy() ends CommFuse, too: its transport would otherwise stay open until the process ends."""
    original = zero.destroy

    def destroy(*args: Any, **kwargs: Any) -> Any:
        if attachment_of(zero) is attachment:
            attachment.remove()
        return original(*args, **kwargs)

    attachment.transaction.set(vars(zero), "destroy", destroy)


# ---- the report ------------------------------------------------------------------------------------------------------
def _rows(selection: Selection, streams: bool) -> list[ParameterRow]:
    rows = []
    for layer in selection.layers:
        path: Path = "gathered" if layer.form is None else "fused"
        what = how_computed(original_type(layer.module), layer.form)
        rows.append(ParameterRow(full_name(layer.name, "weight"), path, what, compat.numel(layer.param)))
    rest: Path = "stock" if streams else "hooks"
    why_stock = "; on a GPU, what is not fused stays with DeepSpeed's own collectives" if streams else ""
    return rows + [
        ParameterRow(name, *((rest, why + why_stock) if why != FROZEN else ("stock", why)), compat.numel(param))
        for name, (param, why) in selection.left.items()
    ]


def _minimum_bytes(selection: Selection, zero: Any, stage: int, world_size: int, *, rest: bool) -> int:
    """Bytes this rank must receive in a step of one microbatch; see Report.minimum_bytes_per_step.

    What ZeRO-3 keeps whole is gathered once, after the step; what has no backward (`frozen_first`), once, in forward. Equal
    partitions are assumed for ZeRO-1/2.
    rest: what is not served by slices goes over CommFuse's collectives, and counts. Its gradients travel as DeepSpeed's
    `communication_data_type` says, those of slices in the narrower of that and their own.
    """
    total, first = 0, frozen_first(zero.module)

    def gathers(name: str) -> int:
        """Of a module's parameters, where they are not kept whole."""
        if stage == 0:
            return 0
        own = (full_name(name, inner) for inner, _ in zero.module.get_submodule(name).named_parameters(recurse=False))
        return 1 if stage != 3 or first.issuperset(own) else 2

    slices = {id(layer.param) for layer in selection.layers}
    params = [(layer.param, gathers(layer.name), 1) for layer in selection.layers]
    if rest:  # under ZeRO-1/2 its gradients are reduced to all ranks
        params += [
            (param, 1 if compat.is_kept_whole(param) else gathers(name.rpartition(".")[0]), 1 if stage == 3 else 2)
            for name, (param, why) in selection.left.items()
            if why != FROZEN
        ]
    for param, times, reductions in params:
        travelling, reduced = compat.travelling_dtype(param).itemsize, compat.reduced_dtype(zero, param).itemsize
        if id(param) in slices:
            reduced = min(reduced, travelling)
        gathered = times * (travelling if stage == 3 else param.element_size())
        size = compat.numel(param) * (world_size - 1) // world_size
        total += size * (gathered + reductions * reduced * param.requires_grad)
    return total
