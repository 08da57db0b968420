"""A unit's backward: bound, run entry by entry, and what microbatches leave for a later one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from commfuse_dp.engine.bound import Binder
from commfuse_dp.engine.parameters import Consume
from commfuse_dp.engine.partials import PartialGradients, Produce
from commfuse_dp.engine.plan import Settings, Unit, UnitSlice
from commfuse_dp.engine.scatter import Scatter
from commfuse_dp.engine.whole import Whole
from commfuse_dp.interrupts import HELD, deliver_held
from commfuse_dp.ops.operands import other_parameters
from commfuse_dp.ops.pieces import Piece

if TYPE_CHECKING:
    from commfuse_dp.engine.engine import Engine


class Backward:
    """Of all units of an engine.

    Attributes:
        accumulating: indices of units whose partials were added up here and are due at the end of the backward, at the latest.
        settings: by policy (its identity), of the backward under way.
    """

    def __init__(self, engine: Engine, binder: Binder) -> None:
        self._engine = engine
        self._binder = binder
        self._parameters = engine.parameters
        self._gradients = engine.gradients
        self._in_place = engine.transport.in_place
        self.accumulating: set[int] = set()
        self.settings: dict[int, Settings] = {}

    def renew(self) -> None:
        """A forward has come between the one of this backward and it. If that was one with other values (of an average, say,
        for an evaluation), these are what is published: then a step begins here, with the values that the parameters have."""
        engine, published = self._engine, [unit for unit in self._engine.units if not unit.replicated]
        if not published:
            return
        with engine.guarded("(start of backward)"):
            # Other parameters than those that were published (torch.func.functional_call) are told by their anchors.
            changed = any(
                self._parameters.differs(unit) and not any(slot.replaced for slot in unit.slots) for unit in published
            )
            on_host = engine.transport.device is None
            changed = engine.ports[0].any_of(changed) if engine.ports and on_host else engine.vote(changed)
            if changed and engine.calls is not None:  # tensor parallelism's step goes on in this backward
                raise other_parameters(published[0].name)
        if changed:
            engine.next_step()

    def exchange(
        self,
        unit: Unit,
        consume: Consume | None,
        produce: Produce | None,
        *,
        dtype: torch.dtype | None = None,
        whole: Whole | None = None,
    ) -> None:
        """Slices owed to others first, own last. For each: produce its partial gradient, which leaves at once, then consume its
        parameters. Parts that are not trained have no gradient.

        dtype: of the partial gradients; None: the narrower of the dtypes of computing and of reducing (sums are wide).
        consume None: the parameters are not needed.
        whole: products of all slices at once, tried first; all partials then come before the parameters (whole.py).
        """
        engine, breakage, gradients = self._engine, self._engine.breakage, self._gradients
        if breakage.cause:
            breakage.check()
        if engine.armed is None or engine.armed() is None:
            engine.arm()
        breakage.layer = unit.name
        try:
            unit.pending_backwards = max(0, unit.pending_backwards - 1)
            settings = self.settings.get(id(unit.policy))
            if settings is None:
                settings = self.settings[id(unit.policy)] = Settings.of(unit.policy)
            wanted = [slot.wants() for slot in unit.slots] if len(unit.slots) > 1 else (unit.slots[0].wants(),)
            include, kinds = zip(*wanted, strict=True)
            computed: torch.dtype | None = None
            if produce is not None and True in include:
                computed = dtype if dtype is not None else narrower(unit.params.dtype, settings.reduce_dtype)
            reduce = settings.reduce_grads
            if reduce and (unit.pending_backwards > 0 if computed is not None else unit.accumulated is not None):
                # The module was called several times: its partials are added up here, and sent with the last. Or it is trained
                # no more, and what was accumulated before is due.
                self.accumulating.add(unit.index)
                reduce = False
            reads = consume is not None
            record = self._binder.record(unit, settings, computed, include, kinds[0], read=reads, reduce=reduce)
            bound = self._binder.backward(unit, record)
            scatter: Scatter | None = None
            partials: PartialGradients | None = None
            if computed is not None and reduce and unit.accumulated is None:
                scatter = gradients.begin(bound, engine.step)
            elif computed is not None:
                partials = PartialGradients(engine, unit, bound, computed, include)
            parameters = self._parameters
            in_view = reads and parameters.in_view(unit)
            if reads and not in_view:
                parameters.announce(bound.remote)
            if whole is not None:
                if scatter is not None and whole.wgrad(scatter, bound.order):
                    scatter = None
                if consume is not None and whole.dgrad():
                    consume = None
            for item, read in bound.entries:
                if item is not None:
                    if scatter is not None:
                        gradients.produce(scatter, item, produce)  # type: ignore[arg-type]
                    elif partials is not None:
                        partials.fill(item, produce)  # type: ignore[arg-type]
                elif consume is not None and read is not None:
                    if in_view:
                        consume(read.item, read.pieces)
                    else:
                        parameters.read(unit, read, consume)
            if not self._in_place:
                parameters.forget(unit)
            gradients.poll()
            for port in engine.ports:
                if port.under_way:
                    engine.move_on()
            if HELD.pending:
                deliver_held()
        except BaseException as error:
            breakage.by(unit.name, error)
            raise

    def scatter_accumulated(self, unit: Unit) -> None:
        """Reduce what was accumulated locally, without a new partial: the call that should have brought it did not come."""
        dtype = unit.accumulated_dtype
        if dtype is None:
            return
        nothing, delivered = (False,) * len(unit.slots), unit.slots[0].wants()[1]
        record = self._binder.record(unit, Settings.of(unit.policy), dtype, nothing, delivered, read=False, reduce=True)
        bound = self._binder.backward(unit, record)
        partials = PartialGradients(self._engine, unit, bound, dtype, nothing)
        for item in bound.order:
            partials.fill(item, _nothing_new)

    def finish(self) -> None:
        """The backward pass is over: what was left for a call that did not come, and what was held for one."""
        for unit in self._engine.units:
            # Frozen since the microbatch before, and so is all that comes before it: then no call comes at all.
            frozen = unit.accumulated is not None and not any(slot.wants()[0] for slot in unit.slots)
            if (frozen or unit.index in self.accumulating) and unit.policy.reduce_grads:
                self.scatter_accumulated(unit)
            if not self._in_place and unit.pending_backwards == 0:
                self._parameters.forget(unit)
        self.accumulating.clear()

    def forget_all(self) -> None:
        """The end: drop every view of memory."""
        self._binder.forget_all()


@functools.cache
def narrower(computed: torch.dtype, reduced: torch.dtype | None) -> torch.dtype:
    """In which of the two partial gradients travel."""
    return reduced if reduced is not None and reduced.itemsize < computed.itemsize else computed


def _nothing_new(item: UnitSlice, pieces: list[Piece]) -> None:
    """A `Produce` where all comes from earlier microbatches."""
