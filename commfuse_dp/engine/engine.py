"""The engine: one step's way of parameters and gradients, across layers.

                         begin_step                                                       finish_backward
    step      |  publish  |  forward: gather(unit, consume) ...  |  backward: exchange(unit, consume, produce) ...  |  optimizer
    window                 pulls ahead along the recorded order   keeps what the turn needs again
    gradients                                                      sent slice by slice, summed while compute goes on

`gather` and `exchange` are the two callbacks of the design: own slice first, own slice last. The engine knows layers only as
units (plan.py); how a slice is computed is the caller's business (ops/).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from commfuse_dp.collectives import progress
from commfuse_dp.collectives.end_of_backward import EndOfBackward, at_end_of_backward, graph_task, in_backward
from commfuse_dp.collectives.steps import Steps
from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine.backward import Backward
from commfuse_dp.engine.bound import Binder
from commfuse_dp.engine.broken import Breakage, resetting
from commfuse_dp.engine.gradients import GradientStream
from commfuse_dp.engine.memory.buffers import BufferPool
from commfuse_dp.engine.ordering import ordering_of
from commfuse_dp.engine.parameters import Consume, ParameterStream
from commfuse_dp.engine.plan import Unit
from commfuse_dp.engine.programs import Programs
from commfuse_dp.engine.replicas import ReplicaGroup
from commfuse_dp.engine.whole import WholeProducts
from commfuse_dp.engine.window import Key
from commfuse_dp.errors import BrokenStepError, CommFuseError, Where
from commfuse_dp.interrupts import HELD, deliver_held, unwatch, watch
from commfuse_dp.kernels.choice import Chooser, Row
from commfuse_dp.kernels.gemms import Gemms
from commfuse_dp.ops.compat import untransformed
from commfuse_dp.ops.operands import other_parameters
from commfuse_dp.probe import COMPUTE, Probe, now_ns
from commfuse_dp.transport.base import CHANNEL_GRAD, Outcome, Transport

LATE_NS = 20_000  # a shorter wait at the start of a step is the cost of asking, not of waiting


class Engine:
    """One rank's engine over one group of ranks. All ranks must call it in the same order (SPMD)."""

    def __init__(
        self,
        transport: Transport,
        units: Sequence[Unit],
        config: CommFuseConfig,
        *,
        device: torch.device,
        replicas: ReplicaGroup | None,
        vote: Callable[[bool], bool] = bool,
    ) -> None:
        """vote: collective over the engine's ranks; True on all of them if its argument is True on one."""
        self.transport = transport
        transport.layers = [unit.name for unit in units]
        self.units = list(units)
        self.config = config
        self.probe: Probe = transport.probe
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.step = 0  # begun; also the epoch of the published parameters
        self.device = device
        for unit in self.units:
            unit.new_anchor(device)
        self.ordering = ordering = ordering_of(transport.device)
        self.buffers = BufferPool(device, ordering, self.probe, limit=config.inbox_bytes)
        self.breakage = Breakage(transport)
        self.programs = Programs(transport, config)
        self.gradients = GradientStream(transport, self.buffers, replicas, self.breakage, ordering)
        self.parameters = ParameterStream(transport, self.units, config, self.programs, device)
        beside = replicas.size if replicas is not None else 0
        binder = Binder(transport, self.programs, self.parameters, replicas=beside, replay=config.replay)
        self._backward = Backward(self, binder)
        self.exchange = self._backward.exchange
        self.ports = self.gradients.ports
        self.on_recovery: Callable[[], None] = lambda: None  # the framework's part, after a step that was broken off
        self.parameters.while_waiting = self.gradients.make_progress
        self.parameters.heed = self.breakage.heed_absence
        if transport.device is None:
            progress.register(self.gradients.make_progress)
        self._sequences: dict[int, list[Key]] = {}  # recorded orders, by mode
        self._mode = 0  # of the step: 1: gradients are computed, 2: it was begun in a backward
        self._overtaken = False  # backwards may come of forwards in earlier steps
        self._active = False  # between begin_step and the end of the pass it belongs to
        self.in_forward = False  # of the root: its forward runs
        self.vote = vote
        self.calls: Steps | None = None
        self.armed: weakref.ref[EndOfBackward] | None = None  # dead if that backward was broken off
        self._broken = ""  # the text alone: a kept exception keeps its frames, and with them shared memory, for ever
        self._gemms: Gemms | None = None
        if transport.device is not None and config.kernels != "blas":
            self._gemms = Gemms(Chooser(config.kernels), transport.device)

    def step_with(self, calls: Steps, vote: Callable[[bool], bool]) -> Callable[[], None]:
        """From now on steps are those of `calls` as well: on a transport among ranks of different engines (tensor parallelism
        under data parallelism). They begin, break off and recover together. vote: of that transport's ranks. Returns what takes
        it back.

        [Note: Order of two transports] A step is over on both before a rank waits on one. First all hear how it ended on the
        engine's, then they tell that on the other, so that everybody knows of everybody; then both recover, or none. But
        where nobody broke it off, and ranks of `calls` find that they have begun unequally many, that one recovers alone."""
        alone = self.vote
        self.calls, self.vote = calls, lambda own: vote(alone(own))
        calls.together, self.breakage.together = [self.breakage], [calls]

        def part() -> None:
            self.calls, self.vote = None, alone
            calls.together, self.breakage.together = [], []

        return part

    # ---- steps -------------------------------------------------------------------------------------------------------
    def begin_step(self) -> None:
        """The root's forward begins: publish this version of the parameters. Ignored inside a backward (recomputation)."""
        if in_backward():
            return
        watch(self)
        self.next_step()

    def next_step(self) -> None:
        """`begin_step`, also inside a backward."""
        if self._broken:
            raise CommFuseError(f"communication broke down in an earlier step and cannot go on: {self._broken}")
        with untransformed():
            self.parameters.require_values(self.vote)
        try:
            with untransformed():
                self._end_step()
                if in_backward() and self.breakage.lost:  # of the forward, too
                    self.breakage.cause = self.breakage.why()
                    self.breakage.check()
                while self.breakage.owed:
                    with self._for_good():
                        self._begin_step()
                    self.breakage.break_owed()
                    self._end_step()
                with self._for_good():
                    self._begin_step()
        except BrokenStepError:  # the step before was lost, this one can be begun
            raise
        except CommFuseError as error:
            self._broken = str(error)
            raise
        except BaseException as error:  # a Ctrl-C, in a wait
            if not self._broken:
                self.breakage.not_begun(error)
            raise

    def _end_step(self) -> None:
        """Leave the step before. An exception may come in between: it can be called again."""
        self.ensure_exposed()
        where = Where("(start of step)", self.step, "all")
        self.breakage.leave(unfinished=self.unfinished)
        calls = None if self.breakage.lost else self.calls  # asked again after a refusal: their next step has begun
        if calls is not None:
            calls.leave()
        if self.transport.recovery is None and not self.gradients.idle:
            self.gradients.discard()
        for index in self._backward.accumulating:  # the last backward was broken off between two calls of a layer
            if not self.breakage.onto:  # else it is refused to go on with what is there
                self.units[index].accumulated = None
        self._backward.accumulating.clear()
        record = self.parameters.stop(where, self._outcome())
        if record:
            self._sequences[self._mode] = record
        if self.breakage.unsettled and self.transport.recovery is not None:  # peers that wait for room here hear of it, too
            self.transport.recovery.discard(CHANNEL_GRAD)
        begun = self.probe.mark()
        start = now_ns()
        if self.parameters.shared:
            self.transport.wait_finished(self.step, where, meanwhile=self.move_on)
        waited = now_ns()
        self.probe.waited("(start of step)", begun)
        if self.world_size > 1 and waited - start > LATE_NS and self.transport.device is None:
            self.probe.exposed("(start of step)", start, waited)
        lost = self.transport.recovery is not None and self.breakage.agree()
        if calls is not None:  # only now: they tell what this rank has just heard
            lost = calls.end(self.breakage.of_all())
        if lost and calls is not None and calls.unequal:
            calls.recover_alone()
        elif lost:
            self._recover(where)
        if self.transport.recovery is None and self.breakage.unsettled and self.breakage.lose_gradients():
            raise self.breakage.refusal()
        self.breakage.refuse()

    @property
    def broken_off(self) -> bool:
        """The step is known to be lost, and the framework may be in the middle of it."""
        return bool(self._broken or self.breakage.cause or self.unfinished)

    @property
    def unfinished(self) -> bool:
        """A backward was begun that did not come to its end."""
        return self.armed is not None or not self.gradients.idle

    @property
    def in_own_backward(self) -> bool:
        """A backward of this engine's layers is under way."""
        return self.armed is not None and self.armed() is not None

    def clear_gradients(self) -> None:
        """The user has asked the framework to clear its gradients: after a broken step, what such a call leaves goes, too."""
        self.breakage.clear(unfinished=self.unfinished)

    def check_gradients(self) -> None:
        """The optimizer is about to use what has been accumulated. Raises BrokenStepError if that is known to be incomplete."""
        if self.breakage.spoilt or self.unfinished:
            raise self.breakage.refusal()

    def move_on(self) -> None:
        """Plain collectives under way, as far as they go without waiting."""
        for port in self.ports:  # a peer may need their room in this rank's inbox
            if port.under_way:
                port.progress()

    def _outcome(self) -> Outcome:
        calls = sum(port.calls for port in self.ports)
        return self.breakage.outcome(-1 if any(port.in_doubt for port in self.ports) else calls)

    def _recover(self, where: Where) -> None:
        """All ranks have left a step that was broken off on some of them, and all of them do this."""
        recovery = self.transport.recovery
        assert recovery is not None
        recovery.discard(CHANNEL_GRAD)  # plain collectives under way need the room
        same = self.breakage.same_calls()
        for port in self.ports:
            port.recover(complete=same)
        with self._for_good():
            self.gradients.reset(evaluating=not (self._mode or self.breakage.backward))
        with resetting(self), self._for_good(Exception):
            self.on_recovery()
        self.buffers.forget_taken()
        self.parameters.recover()
        recovery.recover(self.step, where)
        if self.calls is not None:
            self.calls.recover()
        # An exception has come in a wait up to here, and all of it is done again, or it comes no more.
        for unit in self.units:
            unit.scatters = 0
        self.armed = None
        mixed = self.breakage.lose_gradients()
        parted = self.breakage.parted()
        if self.calls is not None:
            self.calls.begin(self.calls.step + 1)
        if parted is not None:
            raise parted
        if mixed:
            raise self.breakage.refusal()

    @contextlib.contextmanager
    def _for_good(self, kind: type[BaseException] = BaseException) -> Iterator[None]:
        """What an exception leaves in here cannot be mended: some of the parameters are published, others are not."""
        try:
            yield
        except kind as error:
            self._broken = self._broken or f"{type(error).__name__}: {error}"
            self.breakage.give_up(self._broken)
            raise

    def _begin_step(self) -> None:
        self.armed = None
        settled = self.breakage.settled and torch.is_grad_enabled()  # a validation may stand before one more backward
        self._overtaken = (self._overtaken or self._mode > 0) and not (in_backward() or settled)
        self.step += 1
        self.breakage.begin(self.step)
        begun = self.probe.mark() if self.probe.sink is not None else None
        start = now_ns()
        self._mode = 2 if in_backward() else int(torch.is_grad_enabled())
        for unit in self.units:
            unit.pending_backwards = 0
        self.buffers.settle()
        self.parameters.start(self.step, self._sequences.get(self._mode, []))
        for unit in self.units:
            other = False
            for slot in unit.slots:
                other = slot.published() or other
            if other:
                unit.new_anchor(self.device)
        self.probe.span_since(COMPUTE, "publish", start, begun, kind="publish")
        self._active = True

    def ensure_exposed(self) -> None:
        """First step: layouts are fixed now, when dtypes are final and meta parameters have been materialised."""
        if not self.parameters.exposed:
            with torch.inference_mode(False):  # an evaluation may come first: its memory must serve training, too
                self.parameters.expose()

    def ensure_step(self, unit: Unit) -> None:
        """A layer runs outside the root's forward (a submodule called by itself): that starts a step too.

        If a step is under way, whose backward has perhaps been left out, its parameters serve as long as they are those of now.
        [Note: Values, not versions] They are compared by value: what is written through `param.data`, a view of DeepSpeed's
        flat buffers or a pointer counts as no new version of the tensor. The ranks decide together, since what has changed may
        lie in the shard of one of them. This costs such a call a read of its own shard and a message; the root's forward none.
        Who votes waits for peers that are elsewhere in the program until these give up, as with a collective of the framework.
        """
        replaced = False
        for slot in unit.slots:
            replaced = replaced or slot.replaced
        if graph_task() != -1:  # a recomputation: what it computes again was computed with what was published
            if self._overtaken:
                self.arm()
            return
        if self.in_forward:
            if replaced:
                raise other_parameters(unit.name)
            return
        with untransformed():
            # Also of a step that is over here: a peer may not know that it was broken off, and vote.
            begin = not self._active or bool(self.breakage.cause)
            if not unit.replicated and (not begin or self.transport.recovery is not None):
                begin = self.vote(begin or replaced or self.parameters.differs(unit))
            if begin:
                self.begin_step()

    def enter_forward(self) -> None:
        """The root's forward runs: the step that has just begun serves all layers called in it."""
        self.in_forward = True

    def leave_forward(self) -> None:
        """The root's forward has returned or raised."""
        self.in_forward = False

    def interrupted(self, error: BaseException, *, tell: bool) -> None:
        """Ctrl-C has raised. A step that is under way is lost, and peers hear of it: torch does not call hooks for that."""
        self.in_forward = False
        if self._active and tell:
            self.breakage.interrupted(error)
        elif self._active:
            self.breakage.in_forward("(Ctrl-C)", error)

    def end_forward(self, outputs_require_grad: bool) -> None:
        """The root's forward has returned; without a backward to come the step ends here."""
        if not outputs_require_grad:
            self._active = False

    # ---- parameters --------------------------------------------------------------------------------------------------
    def keeps(self, unit: Unit) -> bool:
        """Whether slices gathered now are held for the unit's backward (a recomputation's always are)."""
        return in_backward() or unit.policy.keep_after_forward

    def whole_products(self, unit: Unit) -> WholeProducts | None:
        """The unit's products in one kernel each, if the device and the unit allow them. Of a replicated one: wgrad."""
        if self._gemms is None or not unit.by_rows or len(unit.slots[0].shape) != 2:
            return None
        assert self.transport.device is not None
        return WholeProducts(self, unit, self._gemms, self.transport.device)

    def kernel_explainer(self) -> Callable[[], Sequence[Row]]:
        """Says what computes each product, on a device, and why. Does not keep the engine alive."""
        return self._gemms.chooser.explain if self._gemms is not None else tuple

    def expect_backward(self, unit: Unit) -> None:
        """The gather that follows is part of a forward that autograd records: an `exchange` will come for it."""
        unit.expects_backward = graph_task() == -1
        if unit.replicated:  # nothing is gathered
            self.ready(unit)

    def ready(self, unit: Unit) -> None:
        """A forward is about to read the unit: a step runs, and its parameters are those of now."""
        self.ensure_step(unit)
        if unit.expects_backward:
            unit.expects_backward = False
            unit.pending_backwards += 1

    def gather(self, unit: Unit, consume: Consume) -> None:
        """Forward: consume(slice, pieces) for every slice of the unit, own first. Pieces are valid during the call only."""
        self.ready(unit)
        try:
            self.parameters.gather(unit, consume, keep=not self.transport.in_place and self.keeps(unit))
            if HELD.pending:
                deliver_held()
        except BaseException as error:
            self.breakage.in_forward(unit.name, error)
            raise
        for port in self.ports:
            if port.under_way:
                self.move_on()

    def read(self, unit: Unit, consume: Consume) -> None:
        """As `gather`, beside the unit's own forward: nothing is held for a backward."""
        self.ensure_step(unit)
        self.parameters.gather(unit, consume, keep=False)

    def expect_more(self, unit: Unit) -> None:
        """What was read is used in a forward that autograd records: an `exchange` will come for that, too."""
        if not in_backward():
            unit.pending_backwards += 1

    # ---- gradients ---------------------------------------------------------------------------------------------------
    def arm(self) -> None:
        """A backward pass is under way: it computes with the parameters of now, and `finish_backward` runs at its end."""
        if not self.in_own_backward:
            self._backward.settings.clear()  # what the framework wants may be another thing than in the backward before
            if self._overtaken:
                self._backward.renew()
            self.armed = at_end_of_backward(self._end_backward)
            self.breakage.begin_backward()

    def _end_backward(self, complete: bool) -> None:
        if complete:
            self.finish_backward()
        elif self.transport.device is None:
            self.breakage.leave(unfinished=True)
            with contextlib.suppress(CommFuseError):
                self.transport.progress()  # peers may wait for partials whose notices wait for company here

    def finish_backward(self) -> None:
        """End of a backward pass: everything owed is sent, all sums are finished and delivered."""
        with self.guarded("(end of backward)"):
            self._backward.finish()
            if HELD.pending:  # behind `drain` the step counts as gone through
                deliver_held()
            begun = now_ns()
            self.gradients.drain()
            if self.transport.device is None:
                self.probe.ended(begun, now_ns())
        self.armed = None
        self._active = False
        self.breakage.complete = True

    @contextlib.contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """An exception in here breaks the step off, also behind the end of its backward."""
        try:
            yield
        except BaseException as error:
            self.breakage.by(what, error)
            raise

    def settle(self) -> None:
        """Finish the sums of all layers passed so far, and have the current stream see them. To be called before blocking in
        anything that does not poll us, and by whoever reads gradients before the end of the backward."""
        with self.guarded("(before the end of backward)"):
            self.gradients.drain()

    def settle_replicas(self) -> None:
        """`settle`, and be sure that the replicas are still with this rank."""
        self.settle()
        with self.guarded("(replicas)"):
            self.gradients.meet_replicas()

    @property
    def has_accumulated(self) -> bool:
        """Gradients of earlier microbatches wait here unreduced."""
        return bool([unit for unit in self.units if unit.accumulated is not None])

    def drop_accumulated(self) -> None:
        """Forget them, and what replicas have not been told of."""
        for unit in self.units:
            unit.accumulated = unit.replica_partial = None

    def reduce_accumulated(self) -> None:
        """Reduce whatever was accumulated without being reduced, and finish all sums. Collective; outside a backward."""
        with self.guarded("(accumulated gradients)"):
            for unit in self.units:
                self._backward.scatter_accumulated(unit)
            self.gradients.drain()

    def close(self) -> None:
        """Say goodbye and let go of all memory, also of views: whoever still holds the engine holds none.

        Autograd may: after a backward that raised, its thread keeps nodes that were ready until its next backward."""
        self.transport.membership.when_lost.clear()  # at an end a peer may be gone already, which is no loss
        with contextlib.suppress(CommFuseError):
            # Else the peers' close() goes on serving this rank for a while.
            self.parameters.stop(Where("(close)", self.step), self._outcome())
        unwatch(self)
        progress.unregister(self.gradients.make_progress)
        self.transport.close()
        self.parameters.forget_all()
        self._backward.forget_all()
        self.gradients.forget_all()
        self.buffers.clear()
