"""CommFuse in a DeepSpeed engine: fused layers out of ZeRO's partitions, everything else over the ring backend."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from commfuse_dp.integrations.deepspeed import compat
from commfuse_dp.integrations.deepspeed.backend import RingBackend
from commfuse_dp.integrations.deepspeed.deferred import DeferredGather, FlatGroup, unwatch, watch
from commfuse_dp.integrations.deepspeed.select import Layer, Selection, numel, select
from commfuse_dp.integrations.deepspeed.weights import PartitionedWeight, ReplicatedWeight, ZeroPolicy
from commfuse_dp.integrations.fingerprint import check_equal
from commfuse_dp.integrations.fsdp2.layers import functional_forward
from commfuse_dp.integrations.report import ParameterRow, Path, Report
from commfuse_dp.integrations.root import hook_root
from torch import nn

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine.collective_port import CollectivePort
from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.operand import UnitOperand
from commfuse_dp.engine.plan import Unit
from commfuse_dp.engine.room import published_bytes, room_for
from commfuse_dp.errors import ConfigError
from commfuse_dp.ops.gathered import gather_parameters
from commfuse_dp.ops.linear import fused_linear, register_operand, replicated_linear
from commfuse_dp.probe import Probe
from commfuse_dp.schedule.layout import flat_bounds
from commfuse_dp.transport.select import open_transport

log = logging.getLogger("commfuse_dp")

_ATTRIBUTE = "_commfuse_application"  # on the DeepSpeed engine


class _Application:
    """All that `remove` must undo."""

    def __init__(self, engine: Engine, report: Report) -> None:
        self.engine = engine
        self.report = report
        self.undo: list[Callable[[], None]] = []
        self.operands: list[UnitOperand] = []
        self.finalizer: weakref.finalize | None = None


def apply_to_engine(engine: Any, config: CommFuseConfig) -> Report:
    """Switch CommFuse on for a `DeepSpeedEngine` that has just been built. Collective over its data-parallel group.

    Returns the report: path and reason of every parameter. Raises ConfigError if fuse="always" cannot be met, MismatchError
    if ranks differ, TransportError.
    """
    if application_of(engine) is not None:
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
    device = torch.device(engine.device)
    check_equal(_facts(engine, config), group)
    if not config.enabled:
        return _stock(engine, config, "enabled=false")
    selection = select(engine, config, group, device)
    if config.fuse == "always":
        lost = [f"{name} ({why})" for name, (_, why) in selection.left.items() if _is_linear(engine.module, name)]
        if lost:
            raise ConfigError(f"fuse='always', but these linears cannot be fused: {'; '.join(lost)}. Use fuse='auto'.")
    return _install(engine, config, selection, group, device)


def remove(engine: Any) -> None:
    """Give stock DeepSpeed back. Between steps only; all ranks call it."""
    application = application_of(engine)
    if application is None:
        raise ConfigError("CommFuse is not on for this DeepSpeed engine")
    del vars(engine)[_ATTRIBUTE]
    for action in reversed(application.undo):
        action()
    application.engine.close()
    if application.finalizer is not None:
        application.finalizer.detach()


def application_of(engine: Any) -> _Application | None:
    return vars(engine).get(_ATTRIBUTE)


def engine_of(engine: Any) -> Engine | None:
    """The CommFuse engine that serves a DeepSpeed engine, for measurements and tests."""
    application = application_of(engine)
    return application.engine if application is not None else None


def report_of(engine: Any) -> Report | None:
    application = application_of(engine)
    return application.report if application is not None else None


def _facts(engine: Any, config: CommFuseConfig) -> list[tuple[str, str]]:
    from commfuse_dp import __version__

    facts = [("commfuse_dp", __version__), ("torch", torch.__version__), ("deepspeed", compat.version())]
    facts += [(f"setting {key}", repr(value)) for key, value in config.model_dump().items()]
    facts.append(("ZeRO stage", str(int(engine.zero_optimization_stage()))))
    facts += [
        (f"parameter {name}", f"{tuple(getattr(p, 'ds_shape', p.shape))} {p.dtype} requires_grad={p.requires_grad}")
        for name, p in engine.module.named_parameters()
    ]
    return facts


def _is_linear(model: nn.Module, name: str) -> bool:
    return name.endswith("weight") and isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear)


def _stock(engine: Any, config: CommFuseConfig, why: str) -> Report:
    rows = [ParameterRow(name, "stock", why, numel(param)) for name, param in engine.module.named_parameters()]
    return Report(
        rows,
        transport="none",
        transport_reason=why,
        config=config,
        probe=Probe(),
        world_size=dist.get_world_size(),
        minimum_bytes_per_step=0,
    )


def _install(zero: Any, config: CommFuseConfig, selection: Selection, group: dist.ProcessGroup, device: torch.device) -> Report:
    optimizer, stage = zero.optimizer, int(zero.zero_optimization_stage())
    world_size, rank = group.size(), dist.get_rank(group)
    slots: list[PartitionedWeight | ReplicatedWeight] = []
    units: list[Unit] = []
    for layer in selection.layers:
        name = f"{layer.name}.weight" if layer.name else "weight"
        policy = ZeroPolicy(optimizer, layer.param, stage)
        if layer.place is None:
            bounds = flat_bounds(numel(layer.param), world_size)
            slots.append(PartitionedWeight(name, layer.param, optimizer, bounds, rank))
        else:
            bounds = layer.place.bounds
            slots.append(ReplicatedWeight(name, layer.param, optimizer, layer.place, rank))
        units.append(
            Unit(
                len(units),
                layer.name,
                [slots[-1]],
                policy,
                config.slices_per_rank,
                flat_bounds=bounds,
                replicated=layer.place is not None,
            )
        )
    probe = Probe()
    transport, transport_reason = open_transport(
        config.transport,
        group=group,
        inbox_bytes=config.inbox_bytes if device.type == "cpu" else room_for(units, world_size, config),
        deadline_s=config.deadline_s,
        probe=probe,
        device=device,
        device_ordered=True,
        order=config.order if stage == 3 else _flat_order(config),
        published_bytes=published_bytes(units),
    )
    engine = Engine(transport, units, config, device=device, replicas=None)
    report = Report(
        _rows(zero.module, selection, transport.device_ordered),
        transport=transport.name,
        transport_reason=transport_reason,
        config=config,
        probe=probe,
        world_size=world_size,
        minimum_bytes_per_step=_minimum_bytes(selection, stage, world_size, rest=not transport.device_ordered),
        kernels=engine.kernel_explainer(),
    )
    application = _Application(engine, report)
    for layer, unit in zip(selection.layers, units, strict=True):
        _serve(application, layer, unit)
    _serve_rest(application, None if transport.device_ordered else CollectivePort(engine), group)
    _hook_steps(application, zero, selection, slots)
    if config.defer_gather:
        _defer_gather(application, zero, config, group, device)
    _hook_destroy(application, zero)
    vars(zero)[_ATTRIBUTE] = application
    application.finalizer = weakref.finalize(zero, _close, engine)
    return report


def _flat_order(config: CommFuseConfig) -> str:
    """ZeRO-1 and 2: gradients travel in chains, which cross to a host once anyway, and parameters are not sharded."""
    if config.order == "hierarchical":
        raise ConfigError(
            "order='hierarchical' is for ZeRO-3 and FSDP2; under ZeRO-1 and 2 gradients travel in chains: use order='auto'"
        )
    return "pairwise"


def _defer_gather(
    application: _Application, zero: Any, config: CommFuseConfig, group: dist.ProcessGroup, device: torch.device
) -> None:
    if int(zero.zero_optimization_stage()) == 3:
        log.warning("CommFuse: defer_gather concerns ZeRO-1 and 2; under ZeRO-3 there is no all-gather after the step.")
        return
    obstacle = compat.engine_obstacle(zero)
    if obstacle is not None:
        log.warning("CommFuse: defer_gather is left out: %s.", obstacle)
        return
    probe = application.engine.probe
    symmetric = application.engine.transport.name == "symmetric"  # what else orders by streams serves no pulls of one's own
    transport, _ = open_transport(
        "symmetric" if symmetric else config.transport,
        group=group,
        inbox_bytes=1 << 16,
        deadline_s=config.deadline_s,
        probe=probe,
        device=device,
        device_ordered=symmetric,
    )
    gather = DeferredGather(transport, [FlatGroup(*entry) for entry in compat.flat_groups(zero.optimizer, group.size())])
    for module in watch(zero.module, gather, compat.flat_ranges(zero.optimizer)):
        application.undo.append(functools.partial(unwatch, module))
    compat.get_backend().defer(application.engine, gather)
    application.undo.append(gather.close)
    weakref.finalize(application, gather.close)


def _hook_destroy(application: _Application, zero: Any) -> None:
    """DeepSpeedEngine.destroy() ends CommFuse, too: its transport would otherwise stay open until the process ends."""
    original = zero.destroy

    def destroy(*args: Any, **kwargs: Any) -> Any:
        if application_of(zero) is application:
            remove(zero)
        return original(*args, **kwargs)

    vars(zero)["destroy"] = destroy
    application.undo.append(lambda: vars(zero).pop("destroy", None) and None)


def activate(engine: Engine | None) -> None:
    """Tell the shared backend whose collectives come next: see [Note: Whose call it is] in backend.py."""
    backend = compat.get_backend()
    if isinstance(backend, RingBackend):
        backend.activate(engine)


def leave_alone(zero: Any) -> None:
    """Have an engine without CommFuse keep DeepSpeed's own collectives, though another engine of this process is served."""
    zero.module.register_forward_pre_hook(lambda module, args: activate(None))


def _close(engine: Engine) -> None:
    backend = compat.get_backend()
    if isinstance(backend, RingBackend) and backend.release(engine):
        compat.set_backend(backend.original)
    engine.close()


def _serve(application: _Application, layer: Layer, unit: Unit) -> None:
    module, param = layer.module, layer.param
    operand = UnitOperand(application.engine, unit)
    application.operands.append(operand)
    handle = register_operand(operand)
    bias = module._parameters.get("bias") is not None
    if layer.place is not None:

        def forward(input: torch.Tensor) -> torch.Tensor:
            # Looked up, not remembered: with defer_gather this is where its values are waited for.
            out = replicated_linear(input, module.weight, operand, operand.partial_dtype)  # type: ignore[arg-type]
            return out.add_(_as(module.bias, out)) if bias else out  # type: ignore[arg-type]

    elif layer.fused:

        def forward(input: torch.Tensor) -> torch.Tensor:
            out = fused_linear(input, operand, handle, operand.partial_dtype)
            return out.add_(_as(module.bias, out)) if bias else out  # type: ignore[arg-type]

    else:
        forward = functional_forward(module, lambda: gather_parameters(operand, handle), False)
    vars(module)["forward"] = forward
    application.undo.append(lambda: vars(module).pop("forward", None) and None)
    if layer.place is None:
        compat.mark_unfetched(param, True)
        application.undo.append(lambda: compat.mark_unfetched(param, False))


def _as(bias: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return bias if bias.dtype == like.dtype else bias.to(like.dtype)  # under autocast


def _serve_rest(application: _Application, port: CollectivePort | None, group: dist.ProcessGroup) -> None:
    """port None: DeepSpeed keeps its own collectives, see [Note: Collectives beside streams] in backend.py."""
    backend = compat.get_backend()
    if not isinstance(backend, RingBackend):
        backend = RingBackend(backend)
        compat.set_backend(backend)
    backend.serve(application.engine, port, tuple(dist.get_process_group_ranks(group)))

    def undo() -> None:
        if backend.release(application.engine):
            compat.set_backend(backend.original)

    application.undo.append(undo)


def _hook_steps(
    application: _Application, zero: Any, selection: Selection, slots: list[PartitionedWeight | ReplicatedWeight]
) -> None:
    engine, optimizer = application.engine, zero.optimizer
    unfetched = [(layer.name, layer.param) for layer in selection.layers if layer.place is None]
    replicated = [slot for slot in slots if isinstance(slot, ReplicatedWeight)]
    whole = [layer.param for layer in selection.layers if layer.place is not None]
    named: set[str] = set()

    def release_gathered() -> None:
        """Code that reads a weight without calling its layer makes ZeRO-3 gather it; it would be stale after the step."""
        for name, param in unfetched:
            if compat.is_gathered(param):
                compat.release(param)
                if name not in named:
                    named.add(name)
                    log.warning(
                        "CommFuse: the weight of layer %r is read by other code than its own forward, which makes ZeRO-3 "
                        "gather it whole in every step. Add %r to 'exclude' to leave the layer to DeepSpeed.",
                        name,
                        name,
                    )

    microbatch_begins: Callable[[], None] | None = None
    if unfetched:
        microbatch_begins, undo = compat.sum_partitions(optimizer)
        compat.forget_order(optimizer)
        application.undo += [
            undo,
            compat.before_step(optimizer, release_gathered),
            functools.partial(compat.forget_order, optimizer),
        ]

    def before() -> None:
        release_gathered()
        if microbatch_begins is not None:
            microbatch_begins()
        activate(engine)

    for handle in hook_root(zero.module, engine, before=before):
        application.undo.append(handle.remove)
    if selection.layers:
        stage = int(zero.zero_optimization_stage())
        collecting = functools.partial(collect, engine, optimizer, stage, replicated, whole)
        application.undo.append(compat.before_epilogue(optimizer, collecting))


def collect(engine: Engine, optimizer: Any, stage: int, replicated: list[ReplicatedWeight], whole: list[nn.Parameter]) -> None:
    """All gradients of the backward that has just ended must be there before the optimizer looks at them, on any stream.

    replicated, whole: slots and parameters of fused layers under ZeRO-1/2."""
    engine.settle()
    waiting = not compat.coalescing(optimizer) and (replicated or engine.has_accumulated)
    if waiting and (stage == 3 or compat.reduces_every_backward(optimizer)):
        engine.reduce_accumulated()
        compat.reduce_waiting(optimizer, whole)
    if replicated:
        compat.expect_gradients(optimizer)
    for slot in replicated:
        slot.hand_over()
    compat.after_current(optimizer)


def _rows(model: nn.Module, selection: Selection, device_ordered: bool) -> list[ParameterRow]:
    rows = []
    for layer in selection.layers:
        name = f"{layer.name}.weight" if layer.name else "weight"
        path: Path = "fused" if layer.fused else "gathered"
        what = "nn.Linear" if layer.fused else f"{type(layer.module).__name__} cannot be computed by row slices"
        rows.append(ParameterRow(name, path, what, numel(layer.param)))
    rest: Path = "stock" if device_ordered else "hooks"
    why_stock = "; on a GPU, what is not fused stays with DeepSpeed's own collectives" if device_ordered else ""
    rows += [ParameterRow(name, rest, why + why_stock, numel(param)) for name, (param, why) in selection.left.items()]
    place = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    return sorted(rows, key=lambda row: place.get(row.name, len(place)))


def _minimum_bytes(selection: Selection, stage: int, world_size: int, *, rest: bool) -> int:
    """Bytes this rank must receive in a step of one microbatch; see Report.minimum_bytes_per_step.

    What ZeRO-3 keeps whole is gathered once, after the step. Equal partitions are assumed for ZeRO-1/2.
    rest: what is not served by slices goes over CommFuse's collectives, and counts.
    """
    total = 0
    params = [(layer.param, True) for layer in selection.layers]
    if rest:
        params += [(param, not getattr(param, "ds_persist", False)) for param, _ in selection.left.values()]
    for param, again in params:
        size = numel(param) * param.element_size() * (world_size - 1) // world_size
        total += size * (2 if stage == 3 and again else 1)
        total += size if param.requires_grad else 0
    return total
