"""The engine: one step's way of parameters and gradients, across layers.

                         begin_step                                                       finish_backward
    step      |  publish  |  forward: gather(unit, consume) ...  |  backward: exchange(unit, consume, produce) ...  |  optimizer
    window                 pulls ahead along the recorded order   keeps what the turn needs again
    gradients                                                      sent slice by slice, summed while compute goes on

`gather` and `exchange` are the two callbacks of the design: own slice first, own slice last. The engine knows layers only as
units (plan.py); how a slice is computed is the caller's business (ops/).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

import torch

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine.buffers import BufferPool
from commfuse_dp.engine.gradients import GradientStream, ReplicaGroup
from commfuse_dp.engine.plan import Piece, Unit, UnitSlice
from commfuse_dp.engine.window import Key, Window
from commfuse_dp.errors import CommFuseError, ConfigError, Where
from commfuse_dp.probe import COMPUTE, Probe, now_ns
from commfuse_dp.schedule.orders import gather_owners, scatter_owners
from commfuse_dp.transport.base import Transfer, Transport

log = logging.getLogger(__name__)

Consume = Callable[[UnitSlice, "list[Piece]"], None]
Produce = Callable[[UnitSlice, "list[Piece]"], None]


def in_backward() -> bool:
    """Called from inside an autograd backward pass (a forward there is a recomputation)."""
    return torch._C._current_graph_task_id() != -1


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
    ) -> None:
        self.transport = transport
        self.units = list(units)
        self.config = config
        self.probe: Probe = transport.probe
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.step = 0  # begun forward passes; also the epoch of the published parameters
        self.device = device
        self._pool = BufferPool(device)
        self.gradients = GradientStream(transport, self._pool, self.probe, replicas)
        self._window: Window | None = None
        self._slices: dict[Key, UnitSlice] = {}
        self._sequences: dict[bool, list[Key]] = {}  # recorded orders, by whether gradients are computed
        self._mode = False
        self._gather_order = gather_owners(self.rank, self.world_size, config.order)
        self._scatter_order = scatter_owners(self.rank, self.world_size, config.order)
        self._active = False  # between begin_step and the end of the pass it belongs to
        self._armed = False  # the end-of-backward callback of the running backward is registered
        self._in_place = transport.in_place
        self._exposed = False
        self._broken: BaseException | None = None
        self._accumulating: set[int] = set()

    # ---- steps -------------------------------------------------------------------------------------------------------
    def begin_step(self) -> None:
        """The root's forward begins: publish this version of the parameters. Ignored inside a backward (recomputation)."""
        if in_backward():
            return
        if self._broken is not None:
            raise CommFuseError(
                f"communication broke down in an earlier step and cannot go on: {self._broken}"
            ) from self._broken
        try:
            self._begin_step()
        except CommFuseError as error:
            self._broken = error
            raise

    def _begin_step(self) -> None:
        self.ensure_exposed()
        where = Where("(start of step)", self.step, "all")
        if not self.gradients.idle:  # the last backward was broken off by an exception
            self.gradients.abandon()
        self._armed = False
        self._close_epoch(where)
        start = now_ns()
        self.transport.wait_finished(self.step, where)
        waited = now_ns()
        if waited - start > 20_000:
            self.probe.exposed("(start of step)", start, waited)
        self.step += 1
        self._mode = torch.is_grad_enabled()
        sequence = self._sequences.get(self._mode, [])
        if self._window is not None:
            self._window.start(self.step, sequence)  # asked for now, served as soon as the owners have published
        for unit in self._publication_order(sequence):
            self._publish(unit)
            unit.pending_backwards = 0
        self.probe.span(COMPUTE, "publish", waited, now_ns(), kind="publish")
        self._active = True

    def _close_epoch(self, where: Where) -> None:
        if self._window is not None:
            record = self._window.stop(where)
            if record and self.step > 0:
                self._sequences[self._mode] = record
        if self.step > 0:
            self.transport.finish(self.step)

    def _publication_order(self, sequence: list[Key]) -> list[Unit]:
        if not sequence:
            return self.units
        first_used = list(dict.fromkeys(key[0] for key in sequence))
        rest = set(range(len(self.units))).difference(first_used)
        return [self.units[index] for index in (*first_used, *sorted(rest))]

    def ensure_exposed(self) -> None:
        if not self._exposed:
            self._expose()

    def _expose(self) -> None:
        """First step: layouts are fixed now, when dtypes are final and meta parameters have been materialised."""
        limit = min(self.config.prefetch_bytes, self.config.inbox_bytes, self.transport.message_limit)
        for unit in self.units:
            unit.bind(self.world_size, comfortable=max(1, limit // 2))
        for unit in self.units:
            wide = max(unit.dtype.itemsize, (unit.policy.reduce_dtype or unit.dtype).itemsize)  # partials may travel in it
            largest = unit.params.largest_slice * wide // unit.dtype.itemsize
            if largest > limit and self.world_size > 1:
                need = -(-largest * unit.slices_per_rank // limit)
                raise ConfigError(
                    f"a slice of layer {unit.name!r} has {largest} bytes, but prefetch_bytes={self.config.prefetch_bytes} and "
                    f"inbox_bytes={self.config.inbox_bytes} allow at most {limit}. Set slices_per_rank to {need} or more "
                    f"(now {unit.slices_per_rank}), or raise prefetch_bytes and inbox_bytes to {largest} or more."
                )
        self.transport.expose([unit.params.segment_bytes for unit in self.units])
        for unit in self.units:
            for owned in unit.params.slices:
                for item in owned:
                    self._slices[(unit.index, item.owner, item.index)] = item
        if not self._in_place and self.world_size > 1:
            self._window = Window(self.transport, self._pool, self.config.prefetch_bytes, self.probe, self._locate)
        self._exposed = True

    def _locate(self, key: Key) -> tuple[int, int]:
        item = self._slices[key]
        return item.offset, item.nbytes

    @torch.no_grad()
    def _publish(self, unit: Unit) -> None:
        """Copy (and cast) this rank's shards into the published segment; own slices are read from there too."""
        segment = self.transport.segment(unit.index)
        for item in unit.params.slices[self.rank]:
            for piece in unit.params.pieces(item, segment[item.offset : item.offset + item.nbytes]):
                local = unit.slots[piece.part].local()
                if piece.part == 0:
                    low = unit.params.slices[self.rank][0].start
                    local = local[piece.row_start - low : piece.row_start - low + piece.tensor.shape[0]]
                if local.shape != piece.tensor.shape:
                    raise CommFuseError(
                        f"parameter {unit.slots[piece.part].name!r} has a local shard of {tuple(local.shape)} where "
                        f"{tuple(piece.tensor.shape)} was expected: its sharding changed after apply(). Call "
                        "commfuse_dp.remove(model) before changing it and apply() again afterwards."
                    )
                piece.tensor.copy_(local)
        self.transport.publish(unit.index, self.step)

    def ensure_step(self) -> None:
        """A layer runs outside the root's forward (a submodule called by itself): that starts a step too."""
        if not self._active and not in_backward():
            self.begin_step()

    def end_forward(self, outputs_require_grad: bool) -> None:
        """The root's forward has returned; without a backward to come the step ends here."""
        if not outputs_require_grad:
            self._active = False

    # ---- parameters --------------------------------------------------------------------------------------------------
    def expect_backward(self, unit: Unit) -> None:
        """The gather that follows is part of a forward that autograd records: an `exchange` will come for it."""
        self.ensure_step()
        if not in_backward():
            unit.pending_backwards += 1

    def gather(self, unit: Unit, consume: Consume) -> None:
        """Forward: consume(slice, pieces) for every slice of the unit, own first. Pieces are valid during the call only."""
        self.ensure_step()
        recompute = in_backward()
        keep = recompute or unit.policy.keep_after_forward
        order = [item for owner in self._gather_order for item in unit.params.slices[owner]]
        self._announce(unit, order)
        for item in order:
            self._consume(unit, item, consume, pin=keep)

    def exchange(
        self, unit: Unit, consume: Consume | None, produce: Produce | None, *, dtype: torch.dtype, include: tuple[bool, ...]
    ) -> None:
        """Backward: slices owed to others first, own last. For each: produce its partial gradient, which leaves at once,
        then consume its parameters.

        dtype: of the partial gradients; include: which parts get one. consume None: the parameters are not needed.
        """
        self.arm()
        unit.pending_backwards = max(0, unit.pending_backwards - 1)
        params = [item for owner in self._scatter_order for item in unit.params.slices[owner]] if consume is not None else []
        if params:
            self._announce(unit, params)
        if produce is None:
            for item in params:
                self._consume(unit, item, consume, pin=False)
        else:
            sink = self._open_sink(unit, dtype, include)
            for owner in self._scatter_order:
                # With m > 1 the owner's slices of both kinds alternate: send one, then use the link's time for a dgrad.
                mine = deque(item for item in params if item.owner == owner)
                for item in sink.slices(owner):
                    sink.fill(item, produce)
                    if mine:
                        self._consume(unit, mine.popleft(), consume, pin=False)
                while mine:
                    self._consume(unit, mine.popleft(), consume, pin=False)
        if self._window is not None:
            self._window.unpin(unit.index)
        self.gradients.poll()

    def _announce(self, unit: Unit, order: Sequence[UnitSlice]) -> None:
        if self._window is not None:
            self._window.announce([(unit.index, item.owner, item.index) for item in order if item.owner != self.rank])

    def _consume(self, unit: Unit, item: UnitSlice, consume: Consume | None, *, pin: bool) -> None:
        assert consume is not None
        if item.owner == self.rank:
            segment = self.transport.segment(unit.index)
            data = segment[item.offset : item.offset + item.nbytes]
            consume(item, unit.params.pieces(item, data))
            return
        if self._window is None:
            transfer = self.transport.pull(item.owner, unit.index, self.step, start=item.offset, nbytes=item.nbytes)
            consume(item, unit.params.pieces(item, self._await(unit, item, transfer)))
            return
        key = (unit.index, item.owner, item.index)
        data = self._await(unit, item, self._window.take(key))
        consume(item, unit.params.pieces(item, data))
        self._window.done(key, pin=pin)

    def _await(self, unit: Unit, item: UnitSlice, transfer: Transfer) -> torch.Tensor:
        if not transfer.done():
            start = now_ns()
            gradients = self.gradients
            self.transport.wait_until(
                lambda: transfer.done() or (gradients.poll() and transfer.done()),
                peer=item.owner,
                where=Where(unit.name, self.step, str(item), item.nbytes),
                doing="a parameter slice",
            )
            self.probe.exposed(unit.name, start, now_ns())
        return transfer.wait()

    # ---- gradients ---------------------------------------------------------------------------------------------------
    def _open_sink(self, unit: Unit, dtype: torch.dtype, include: tuple[bool, ...]) -> _Sink:
        reduce = unit.policy.reduce_grads
        if reduce and unit.pending_backwards > 0:
            reduce = False  # the module was called several times: its partials are added up here, and sent with the last
            self._accumulating.add(unit.index)
        return _Sink(self, unit, dtype, include, reduce=reduce)

    def take_scratch(self, nbytes: int) -> torch.Tensor:
        return self._pool.take(nbytes)

    def give_scratch(self, buffer: torch.Tensor) -> None:
        self._pool.give(buffer)

    def _scatter_accumulated(self, unit: Unit) -> None:
        """Reduce what was accumulated locally, without a new partial: the call that should have brought it did not come."""
        if unit.accumulated is None:
            return
        kept, unit.accumulated = unit.accumulated, None
        sink = _Sink(self, unit, kept[0].dtype, tuple(slot.requires_grad for slot in unit.slots), reduce=True)

        def produce(item: UnitSlice, pieces: list[Piece]) -> None:
            for piece in pieces:
                piece.tensor.copy_(kept[piece.part][piece.row_start : piece.row_start + piece.tensor.shape[0]])

        for owner in self._scatter_order:
            for item in sink.slices(owner):
                sink.fill(item, produce)

    def arm(self) -> None:
        """Make sure that `finish_backward` runs at the end of the backward pass that is under way."""
        if not self._armed:
            self._armed = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish_backward)

    def finish_backward(self) -> None:
        """End of a backward pass: everything owed is sent, all sums are finished and delivered."""
        self._armed = False
        for index in sorted(self._accumulating):
            unit = self.units[index]
            if unit.policy.reduce_grads:
                self._scatter_accumulated(unit)
        self._accumulating.clear()
        self.gradients.drain()
        self._active = False

    def close(self) -> None:
        if self._window is not None and self._broken is None:
            self._window.stop(Where("(close)", self.step))
        self.transport.close()
        self._pool.clear()


class _Sink:
    """Where the partial gradients of one backward call go: to their owners, or into the local accumulation."""

    __slots__ = ("_accumulated", "_computed", "_engine", "_include", "_scatter", "_unit", "dtype")

    def __init__(self, engine: Engine, unit: Unit, computed: torch.dtype, include: tuple[bool, ...], *, reduce: bool) -> None:
        self._engine = engine
        self._unit = unit
        self._computed = computed  # dtype that `produce` computes in
        self._include = include
        if not reduce and unit.accumulated is None:
            wide = unit.policy.reduce_dtype or computed
            unit.accumulated = [torch.zeros(shape, dtype=wide, device=engine.device) for shape in unit.whole_shapes()]
        self._accumulated = unit.accumulated
        self.dtype = computed if self._accumulated is None else self._accumulated[0].dtype  # of what travels or is kept
        self._scatter = engine.gradients.begin(unit, self.dtype, include, engine.step) if reduce else None
        if reduce:
            unit.accumulated = None  # it travels with this reduction

    def slices(self, owner: int) -> tuple[UnitSlice, ...]:
        return self._unit.geometry(self.dtype, self._include).slices[owner]

    def fill(self, item: UnitSlice, produce: Produce) -> None:
        """Have the partial of one slice computed and send it (or add it up)."""
        if self._scatter is None:
            self._produce_beside(item, produce, lambda earlier, new: earlier.add_(new))
            return
        buffer = self._engine.gradients.reserve(self._scatter, item)
        target = self._scatter.geometry.pieces(item, buffer)
        if self._accumulated is None:
            produce(item, target)
        else:
            outs = iter(target)
            self._produce_beside(item, produce, lambda earlier, new: torch.add(earlier, new, out=next(outs).tensor))
        self._engine.gradients.send(self._scatter, item, buffer)

    def _produce_beside(self, item: UnitSlice, produce: Produce, combine: Callable[..., object]) -> None:
        """Compute the partial in a buffer of its own, then combine it with what earlier microbatches accumulated."""
        assert self._accumulated is not None
        geometry = self._unit.geometry(self._computed, self._include)
        twin = geometry.slices[item.owner][item.index]
        scratch = self._engine.take_scratch(twin.nbytes)
        pieces = geometry.pieces(twin, scratch)
        produce(twin, pieces)
        for piece in pieces:
            rows = slice(piece.row_start, piece.row_start + piece.tensor.shape[0])
            combine(self._accumulated[piece.part][rows], piece.tensor)
        self._engine.give_scratch(scratch)
