"""The engine over stream-ordered waits: the random programs of test_engine.py on a simulated device that finds every race.

Torch's own operations count as work of the stream that is current (`Watched`), so that a GEMM that reads a slice before its
wait, a buffer that is written again under a reader, or a gradient that is read before its sum are errors whatever the order in
which things happened to run. Side streams run in an order drawn from a seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commfuse_dp.device.base import Event
from commfuse_dp.engine.gradients import GradientStream
from commfuse_dp.engine.memory.buffers import BufferPool
from commfuse_dp.engine.ordering import StreamOrdering
from commfuse_dp.engine.parameters import ParameterStream
from commfuse_dp.engine.whole import _ReadTable
from commfuse_dp.engine.window import Held
from commfuse_dp.errors import ConfigError
from commfuse_dp.kernels.table import SliceTable
from commfuse_dp.transport.base import ExchangeFn, Transport
from tests.simulated.test_engine import Step, base_case, cases, run_program
from tests.support import fake_device
from tests.support.fake_device import FakeWorld, Race, Stuck
from tests.support.fake_symmetric import open_fake
from tests.support.watched import Watched


def run_on_device(case: dict[str, Any], **settings: Any) -> None:
    n = case["world_size"]
    world = FakeWorld(n, seed=case["seed"], deferred=False, stands=True)

    def open_transport(rank: int, exchange: ExchangeFn) -> Transport:
        return open_fake(world, rank, exchange, inbox_bytes=case["bytes"], deadline_s=20.0, **settings)

    @contextmanager
    def watching(transport: Transport) -> Iterator[None]:
        with Watched(world.devices[transport.rank]):
            if case["seed"] % 2:  # measuring changes nothing
                transport.probe.watch()
            yield
            transport.probe.settle()

    run_program(case, open_transport, watching)


@pytest.fixture
def watched_buffers(monkeypatch):
    """Every buffer of the engine's pool is looked at by the simulation, not only those that are copied to or from."""
    make = BufferPool._make

    def watched(self: BufferPool, nbytes: int) -> Any:
        buffer, event = make(self, nbytes)
        if isinstance(self._ordering, StreamOrdering):
            self._ordering._device.world.keep(buffer)  # type: ignore[attr-defined]
        return buffer, event

    monkeypatch.setattr(BufferPool, "_make", watched)


IGNORED = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture]


def programs() -> st.SearchStrategy[dict[str, Any]]:
    """kernels: auto: whole layers as one product (whole.py), blas: slice by slice."""
    return st.builds(
        lambda case, kernels: {**case, "bytes": 1 << 16, "kernels": kernels}, cases(), st.sampled_from(["auto", "blas"])
    )


@settings(max_examples=6, suppress_health_check=IGNORED)
@given(programs())
def test_random_programs_on_a_device(watched_buffers, case):
    run_on_device(case)


@pytest.mark.slow
@settings(max_examples=55, suppress_health_check=IGNORED)
@given(programs())
def test_more_random_programs_on_a_device(watched_buffers, case):
    run_on_device(case)


def chained(case: dict[str, Any]) -> dict[str, Any]:
    """ZeRO-1/2 among three and more ranks; inboxes hold one slice (of at most the whole matrix), or two."""
    return {**case, "layout": "replicated", "bias": False, "world_size": 3 + case["seed"] % 3, "bytes": min(case["bytes"], 600)}


@settings(max_examples=5, suppress_health_check=IGNORED)
@given(cases().map(chained))
def test_chains_need_room_for_one_slice_only(watched_buffers, case):
    """See [Note: Order of a chain] in routes/steps.py."""
    run_on_device(case)


@pytest.mark.slow
@settings(max_examples=35, suppress_health_check=IGNORED)
@given(cases().map(chained))
def test_more_chains_need_room_for_one_slice_only(watched_buffers, case):
    run_on_device(case)


def test_ranks_that_share_a_gpu():
    """Kernels must not wait there themselves: the stream does, for all slices, before the kernel."""
    run_on_device(base_case(bytes=1 << 16), kernels_may_wait=False)


# ---- the simulation catches what these tests are for -------------------------------------------------------------------
def _old_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window buffer comes back with an event that has long passed: it is written again under its reader."""
    give = BufferPool.give

    def hasty(self: BufferPool, buffer: torch.Tensor, mark: Event | None = None) -> None:
        give(self, buffer, mark)
        free = self._free[buffer.numel()]
        vars(self).setdefault("first", free[-1][1])
        free[-1] = (buffer, vars(self)["first"])

    monkeypatch.setattr(BufferPool, "give", hasty)


def _old_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel waits for the words of the pull before."""
    of = _ReadTable.of

    def hasty(self: _ReadTable, held: list[Held]) -> tuple[SliceTable, int]:
        table, epoch = of(self, held)
        return table, epoch - 1

    monkeypatch.setattr(_ReadTable, "of", hasty)


def _old_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel reads where the slices lay in the step before."""
    repoint = SliceTable.repoint
    monkeypatch.setattr(SliceTable, "repoint", lambda self, data, *more: repoint(self, [e.data for e in self.entries], *more))


def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum reads the own partial without waiting for the stream that computes it."""

    @contextmanager
    def reducing(self: StreamOrdering) -> Iterator[None]:
        self._joined = False
        with self._device.on(self._reduce):
            yield

    monkeypatch.setattr(StreamOrdering, "reducing", reducing)


def _no_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients are read by a stream that does not wait for the sums."""
    monkeypatch.setattr(StreamOrdering, "join", lambda self: None)


@pytest.mark.parametrize("kernels", ["auto", "blas"])
@pytest.mark.parametrize("mistake", [None, _old_event, _old_words, _no_wait, _no_join])
def test_a_mistake_is_a_race(monkeypatch, mistake, kernels):
    own_buffer, deliver = GradientStream._own_buffer, GradientStream._deliver

    def watched(self: GradientStream, scatter: Any) -> torch.Tensor:
        buffer = own_buffer(self, scatter)
        self._transport.device.world.keep(buffer)  # type: ignore[union-attr]
        return buffer

    def delivered(self: GradientStream, scatter: Any, total: torch.Tensor) -> None:
        deliver(self, scatter, total)
        world, stream = self._transport.device.world, self._transport.device.current_stream()  # type: ignore[union-attr]
        for slot in scatter.unit.slots:
            if slot.grad is not None:
                world.keep(slot.grad)
                world.access(stream, slot.grad, write=True, what="deliver")

    monkeypatch.setattr(GradientStream, "_own_buffer", watched)
    monkeypatch.setattr(GradientStream, "_deliver", delivered)
    case = base_case(bytes=1 << 12, kernels=kernels)  # a window of a few slices, whose buffers go round
    if mistake is None or (mistake is _old_words and kernels == "blas"):
        run_on_device(case)
        return
    mistake(monkeypatch)
    monkeypatch.setattr(fake_device, "STANDS", 0.0)  # a host that stands may hide it
    # What a kernel reads before it has come is a race when the copy runs, but before that it may be a wrong number.
    with pytest.raises(AssertionError if mistake is _old_words else Race):
        run_on_device(case)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [False, True])
def test_hosts_that_stand_do_not_wait_for_each_other(monkeypatch, mistake):
    """See [Note: The host may stand] in device/base.py. Mistake: slices are asked for before own parameters are published."""
    start = ParameterStream.start

    def hasty(self: ParameterStream, epoch: int, sequence: list[Any]) -> None:
        self._epoch, window = epoch, self._window
        if window is not None:
            window.start(epoch, sequence)
        self._window = None
        start(self, epoch, sequence)
        self._window = window

    if mistake:
        monkeypatch.setattr(fake_device, "PATIENCE_S", 1.0)
        monkeypatch.setattr(ParameterStream, "start", hasty)
    for seed in range(4):  # of the odd ones every call stands: work runs in the order of the calls
        monkeypatch.setattr(fake_device, "STANDS", 1.0 if seed % 2 else 0.5)
        with pytest.raises(Stuck) if mistake else nullcontext():
            run_on_device(base_case(bytes=1 << 16, seed=seed))


def test_an_old_table_is_wrong(monkeypatch):
    """Bytes that are long there, of another slice: no race, but numbers that differ."""
    _old_table(monkeypatch)
    monkeypatch.setattr(fake_device, "STANDS", 0.0)
    with pytest.raises(AssertionError):
        run_on_device(base_case(bytes=1 << 12))


def test_slices_that_are_not_used_after_all():
    run_on_device(base_case(bytes=1 << 16, steps=[Step([0, 1, 2, 3]), Step([0, 3, 3]), Step([0]), Step([0, 1, 2, 3])]))


def test_an_inbox_that_is_too_small_is_refused_with_the_size_that_it_needs():
    wanted = r"layer 'layer\d'.*inbox_bytes must be at least twice as large.*Set inbox_bytes to \d+"
    with pytest.raises(ConfigError, match=wanted):
        run_on_device(base_case(bytes=264))
