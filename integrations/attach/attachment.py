"""CommFuse on one model: the engine, how to take everything back, and the report."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.forwards import ATTACHMENT, Service, nothing, serve
from commfuse_dp.integrations.attach.linears import LinearForm, own_forward
from commfuse_dp.integrations.attach.ranks import Ranks, any_of
from commfuse_dp.integrations.attach.reads import ReadLog, Reads, Scope
from commfuse_dp.integrations.attach.report import ParameterRow, Report
from commfuse_dp.integrations.attach.transaction import Transaction
from torch import nn

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.operand import UnitOperand
from commfuse_dp.engine.plan import Unit
from commfuse_dp.engine.replicas import ReplicaGroup, open_replicas
from commfuse_dp.engine.room import least_ring, most_bytes, published_bytes
from commfuse_dp.errors import ConfigError
from commfuse_dp.kernels.choice import Row
from commfuse_dp.ops.gathered import gather_parameters
from commfuse_dp.ops.linear import fused_linear, register_operand
from commfuse_dp.ops.sequence.whole import use_kernels
from commfuse_dp.transport.backends import check_replicas
from commfuse_dp.transport.base import Transport
from commfuse_dp.transport.budget import Footprint
from commfuse_dp.transport.compat import default_store
from commfuse_dp.transport.select import open_for

_NOT_ON = "commfuse_dp.remove(): this model has no CommFuse; apply() was not called for it, or remove() already"


class Attachment:
    """Lies in the dictionary of the object that it is for (a model, a DeepSpeed engine), so that both are freed together.

    Everything that is changed goes through `transaction`; `remove` is its rollback. key: under which it lies there; a model may
    have one for each kind of parallelism."""

    engine: Engine  # from `open` on
    transport: Transport  # from `open` or `connect` on
    report: Report  # from `finish` on

    def __init__(self, holder: Any, ranks: Ranks, key: str = ATTACHMENT) -> None:
        self._holder = weakref.ref(holder)
        self._ranks = ranks
        self._key = key
        self.transaction = Transaction()
        self._reads = ReadLog()
        self._transport_reason = ""

    # ---- attaching ---------------------------------------------------------------------------------------------------
    def open(
        self,
        units: Sequence[Unit],
        config: CommFuseConfig,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        order: str,
        numel: int,
        replicate_group: dist.ProcessGroup | None = None,
    ) -> Engine:
        """Collective: a transport among the ranks of `group`, and an engine for `units` over it. numel: of the whole model."""
        take = self.transaction.acquire

        def opened() -> tuple[Transport, str]:
            if replicate_group is not None:
                check_replicas(replicate_group)
            return open_for(
                config,
                group=group,
                device=device,
                least_ring=least_ring(units, group.size(), streams=device.type != "cpu"),
                most_bytes=most_bytes(numel) if device.type == "cpu" else None,  # streams may need more: engine/room.py
                stream_ordered=True,
                order=order,
                published_bytes=published_bytes(units),
                prefetch_bytes=config.prefetch_bytes,
            )

        # A vote of its own, before ranks wait for those of other groups.
        transport, self._transport_reason = self._ranks.together(lambda: take(opened, lambda found: found[0].close()))
        self.transport = transport
        replicas = None
        if replicate_group is not None and replicate_group.size() > 1:
            over, store = replicate_group, default_store() if device.type == "cpu" else None

            def summed() -> ReplicaGroup:
                return take(lambda: open_replicas(over, store, config.deadline_s, transport), ReplicaGroup.close)

            replicas = Ranks([over, *self._ranks.groups]).together(summed)

        def engine() -> Engine:
            return Engine(
                transport,
                units,
                config,
                device=device,
                replicas=replicas,
                vote=any_of(group, device),
            )

        self.engine = take(engine, lambda made: made.close())
        self._ranks.together(self.engine.parameters.require_room)
        self._explain: Callable[[], Sequence[Row]] = self.engine.kernel_explainer()
        self._close_with_holder(self.engine)
        return self.engine

    def connect(self, config: CommFuseConfig, *, group: dist.ProcessGroup, device: torch.device) -> Transport:
        """Collective: a transport alone, among the ranks of `group`, for what is served without an engine."""
        self.transport, self._transport_reason = self._ranks.together(
            lambda: self.transaction.acquire(
                lambda: open_for(config, group=group, device=device, stream_ordered=True, growing=True),
                lambda found: found[0].close(),
            )
        )
        self._close_with_holder(self.transport)
        self._explain = use_kernels(self.transport, config.kernels)
        return self.transport

    def _close_with_holder(self, what: Engine | Transport) -> None:
        """Also at interpreter exit: peers are told goodbye."""
        holder = self._holder()
        assert holder is not None
        self.transaction.acquire(lambda: weakref.finalize(holder, _end, what), weakref.finalize.detach)

    def serve(
        self,
        module: nn.Module,
        unit: Unit,
        compute: Callable[[UnitOperand, int], Callable[..., torch.Tensor]],
        scope: Scope | None = None,
        *,
        transposed: bool = False,
        wrap: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """From now on `module` computes with `unit`. compute(operand, handle): see `fused` and `gathered`.

        scope: when whoever reads the module's parameters gets whole ones; None: never. transposed: a linear whose weight is
        [in, out]. wrap: see `Reads`."""
        operand = UnitOperand(self.engine, unit, transposed=transposed)
        handle = register_operand(operand)
        slots: Any = unit.slots
        reads = Reads(operand, handle, slots, scope, self._reads, wrap) if scope is not None else None
        serve(self.transaction, module, Service(module, compute(operand, handle), slots, reads))

    def finish(
        self, rows: list[ParameterRow], config: CommFuseConfig, *, names: Sequence[str], minimum_bytes_per_step: int
    ) -> Report:
        """The report; from now on `attachment_of(holder)` finds this attachment. names: of the parameters, in order."""
        place = {name: number for number, name in enumerate(names)}
        transport = self.transport
        self.report = Report(
            sorted(rows, key=lambda row: place.get(row.name, len(place))),
            transport=transport.name,
            transport_reason=self._transport_reason,
            config=config,
            probe=transport.probe,
            world_size=transport.world_size,
            minimum_bytes_per_step=minimum_bytes_per_step,
            kernels=self._explain,
            reads=self._reads.gathers,
            footprint=_footprint_of(transport),
        )
        self.transaction.set(vars(self._holder()), self._key, self)
        return self.report

    # ---- ending ------------------------------------------------------------------------------------------------------
    def remove(self) -> None:
        """Take everything back. Raises the first error that an undo raised, after all of them have run."""
        error = self.transaction.roll_back()
        if error is not None:
            raise error

    # ---- copies ------------------------------------------------------------------------------------------------------
    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return nothing, ()


def _end(what: Engine | Transport) -> None:
    """The holder has gone. Garbage is collected in any thread: also in one that the transport joins, or that has its lock."""
    if threading.current_thread() is threading.main_thread():
        what.close()
    else:
        threading.Thread(target=what.close, name="commfuse-close", daemon=True).start()


def attachment_of(holder: Any, key: str = ATTACHMENT) -> Attachment | None:
    """What CommFuse has on a model (or another object that it was switched on for); None for copies of it."""
    found = vars(holder).get(key)
    return found if found is not None and found._holder() is holder else None


def _footprint_of(transport: Transport) -> Callable[[], Footprint | None]:
    """As it is now. Does not keep the transport alive."""
    first, known = transport.footprint, weakref.ref(transport)

    def footprint() -> Footprint | None:
        now = known()
        return first if now is None else now.footprint

    return footprint


def engine_of(holder: Any) -> Engine | None:
    """The engine that serves a model (or a DeepSpeed engine), for measurements and tests."""
    attachment = attachment_of(holder)
    return attachment.engine if attachment is not None else None


@contextlib.contextmanager
def attaching(holder: Any, ranks: Ranks | None = None, key: str = ATTACHMENT) -> Iterator[Attachment]:
    """`with attaching(model) as attachment`: what its body does to anything is taken back if the body raises."""
    attachment = Attachment(holder, ranks if ranks is not None else Ranks([]), key)
    try:
        yield attachment
    except BaseException:
        attachment.transaction.roll_back()
        raise


def attach(holder: Any, ranks: Ranks, install: Callable[[Attachment], Report], key: str = ATTACHMENT) -> Report:
    """Collective: `install` on all ranks, or on none. ranks: the first group is the one that the transport is opened over."""
    with attaching(holder, ranks, key) as attachment:
        return ranks.together(lambda: install(attachment))


def fused(
    form: LinearForm, kind: type[nn.Module] = nn.Linear, *, keeps_bias: bool = False, dtype: torch.dtype | None = None
) -> Callable[[UnitOperand, int], Callable[..., torch.Tensor]]:
    """What a module of class `kind` computes that is a linear of this form. (The operand must be as transposed as the form.)

    keeps_bias: the module has its bias itself. dtype: of the parameters, if they travel in another one."""

    def make(operand: UnitOperand, handle: int) -> Callable[..., torch.Tensor]:
        def compute(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
            if dtype is not None and not torch.is_autocast_enabled(input.device.type):
                return otherwise(module, input)
            return fused_linear(input, operand, handle, module.bias if keeps_bias else None)  # type: ignore[arg-type]

        def otherwise(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
            whole = gather_parameters(operand, handle)
            if dtype is not None:
                whole = tuple(param.to(dtype) for param in whole)
            bias = module._parameters.get("bias") if keeps_bias else None
            return own(module, whole if bias is None else (*whole, bias), input)

        return called_as(form, kind, compute, otherwise)

    own = own_forward(kind)
    return make


def called_as(
    form: LinearForm,
    kind: type[nn.Module],
    compute: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    otherwise: Callable[[nn.Module, torch.Tensor], torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """`compute`, called as the forward of `kind` is; `otherwise` under an autocast under which `kind` is not like a linear."""

    def by_name(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) + len(kwargs) != 1 or (kwargs and form.argument not in kwargs):
            return kind.forward(module, *args, **kwargs)  # says what is wrong
        input = args[0] if args else kwargs[form.argument]
        if not form.autocast and torch.is_autocast_enabled(input.device.type):
            return otherwise(module, input)
        return compute(module, input)

    return compute if form.autocast and form.argument == "input" else by_name


def gathered(
    function: Callable[[Any, torch.Tensor, Sequence[torch.Tensor]], torch.Tensor],
) -> Callable[[UnitOperand, int], Callable[..., torch.Tensor]]:
    """What a module computes over parameters gathered whole. function: of `whole_function`."""

    def make(operand: UnitOperand, handle: int) -> Callable[..., torch.Tensor]:
        def compute(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
            return function(module, input, gather_parameters(operand, handle))

        return compute

    return make


def check_absent(model: nn.Module, key: str = ATTACHMENT) -> None:
    """Raises ConfigError if CommFuse is on for the model or for a part of it."""
    if attachment_of(model, key) is not None:
        raise ConfigError(
            "commfuse_dp.apply() was called twice for this model; call commfuse_dp.remove(model) before the second"
        )
    inside = [name for name, module in model.named_modules() if attachment_of(module, key) is not None]
    if inside:
        raise ConfigError(f"commfuse_dp.apply() was already called for the submodule {inside[0]!r}; remove() it first")


def remove_from(holder: Any, missing: str = _NOT_ON, key: str = ATTACHMENT) -> None:
    """Take CommFuse off `holder`. Raises ConfigError with the text `missing` if it is not on."""
    attachment = attachment_of(holder, key)
    if attachment is None:
        raise ConfigError(missing)
    attachment.remove()
