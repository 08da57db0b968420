"""Products with all slices of a sequence in one kernel, on the simulated device: tables, words and their order.

The kernels' places are taken by BLAS behind the same tables and words (kernels/by_slices.py), as for whole layers of data
parallelism. The kernels themselves on such tables: tests/conformance/kernels/strided_cells.py."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commfuse_dp.collectives import all_gather, reduce_scatter
from commfuse_dp.collectives.direct import DirectExecution
from commfuse_dp.errors import DeadlineError, MismatchError
from commfuse_dp.kernels import by_slices, choice
from commfuse_dp.kernels.table import SliceTable
from commfuse_dp.ops.sequence.column_parallel import column_parallel
from commfuse_dp.ops.sequence.row_parallel import row_parallel
from commfuse_dp.ops.sequence.whole import WholeSequence
from tests.conformance.sequence import test_sequence_ops as sequence
from tests.simulated.test_programs_on_streams import QUIET, RING, compare, on_streams
from tests.support.fake_device import FakeDevice, Race

USED = Counter[str]()  # products by kernels, by kind
# Three entries, three ranks, several lines a slice; two weights that share a gather.
CASE: dict[str, Any] = {
    **{"n": 3, "sizes": (2, 0, 4), "batch": 3, "dim": 1, "flat": False, "members": 2, "bias": True, "m": 2},
    **{"order": "pairwise", "save": "shard", "told": True, "seed": 5},
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Such a device has them, and they are the faster ones."""

    def by_kernel(self: WholeSequence, op: str, *operands: Any) -> bool:
        USED[op] += 1
        return True

    USED.clear()
    monkeypatch.setattr(choice, "unavailable", lambda device, dtypes: None)
    monkeypatch.setattr(WholeSequence, "_by_kernel", by_kernel)
    yield


@settings(max_examples=8, suppress_health_check=[*QUIET, HealthCheck.function_scoped_fixture], deadline=None)
@given(sequence.cases().filter(lambda case: case["n"] > 1), st.sampled_from([512, RING]))
def test_layers(case: dict[str, Any], ring: int) -> None:
    compare(case, "symmetric", ring)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[*QUIET, HealthCheck.function_scoped_fixture], deadline=None)
@given(sequence.cases().filter(lambda case: case["n"] > 1), st.sampled_from([512, RING]))
def test_more_layers(case: dict[str, Any], ring: int) -> None:
    compare(case, "symmetric", ring)


@pytest.mark.parametrize("save", ["shard", "gathered"])
def test_every_product_has_its_kernel(save: str) -> None:
    compare(CASE | {"save": save}, "symmetric", RING)
    n, members = CASE["n"], CASE["members"]
    # A column product for each weight, and dx of the row; the row's product, and dx of the column; dW of both, unless the input
    # is there.
    assert {"forward": n * (members + 1), "wgrad": n * 2, "dgrad": n * (2 if save == "shard" else 1)} == USED


def test_what_blas_computes_faster_goes_by_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked about once for each product, and no table is made again."""
    asked, tables = Counter[str](), []
    monkeypatch.setattr(WholeSequence, "_by_kernel", lambda self, op, *operands: asked.update([op]))
    make = SliceTable.__init__
    monkeypatch.setattr(SliceTable, "__init__", lambda self, entries: (tables.append(1), make(self, entries))[1])
    weight, back = torch.randn(6, 8), torch.randn(8, 6)

    def body(rank: int, transport: Any) -> torch.Tensor:
        x, w, v = torch.ones(1, 4, 8, requires_grad=True), weight.clone().requires_grad_(), back.clone().requires_grad_()
        for _ in range(3):
            (h,) = column_parallel(x, [w], sizes=(4, 4), transport=transport)
            row_parallel(h, v, sizes=(4, 4), transport=transport).sum().backward()
        return w.grad

    first, second = on_streams("symmetric", 2, body)
    assert torch.allclose(first, 3 * (torch.ones(8, 8) @ back).t() @ torch.ones(8, 8), rtol=1e-5)
    assert torch.equal(first, second)
    assert asked == {"forward": 4, "wgrad": 4, "dgrad": 2} and len(tables) == 2 * 3  # of one width: shared


@pytest.mark.parametrize("share", [False, True])
def test_kernels_wait_only_where_the_ranks_are_all_there_are(share: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """See [Note: Kernels that wait need the whole device]: those that signal wait for nobody. share: a GPU, or a part of the
    program."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 6)
    made = WholeSequence.__init__

    def of_some(self: WholeSequence, transport: Any, asked: Any) -> None:
        if share:
            transport.kernels_may_wait = False
        else:
            transport.membership.numbers = (0, 2, 4)
        made(self, transport, asked)

    monkeypatch.setattr(WholeSequence, "__init__", of_some)
    compare(CASE, "symmetric", RING)
    assert {"wgrad": CASE["n"] * 2} == USED


def test_what_kernels_wait_for_is_measured_as_a_bound() -> None:
    """A rank that begins late holds its peer up in a kernel, which no event sees."""
    late = 5000

    def body(rank: int, transport: Any) -> tuple[int, int]:
        probe, device = transport.probe, transport.device
        x, weight = torch.ones(1, 4, 8), torch.ones(6, 8)
        column_parallel(x, [weight], sizes=(4, 4), transport=transport)
        probe.watch()
        if rank:
            device.delay(late)
        column_parallel(x, [weight], sizes=(4, 4), transport=transport)
        probe.settle()
        probe.unwatch()
        return probe.counters.exposed_ns, probe.counters.exposed_bound_ns

    (exposed, bound), (nothing, _) = on_streams("symmetric", 2, body)
    assert exposed == bound >= late * 0.9 and nothing < late * 0.1


# ---- mistakes are found ----------------------------------------------------------------------------------------------
def _no_wait(patch: pytest.MonkeyPatch) -> None:
    """A kernel reads slices whether they have come or not."""
    patch.setattr(by_slices, "_wait", lambda *arguments: None)


def _first_line_only(patch: pytest.MonkeyPatch) -> None:
    """A slice leaves when its first batch entry is made."""
    produce = WholeSequence.produce
    patch.setattr(WholeSequence, "produce", lambda self, *how: [words[:1] for words in produce(self, *how)])


def _stale_table(patch: pytest.MonkeyPatch) -> None:
    """A kernel reads where slices lay before."""
    patch.setattr(SliceTable, "repoint", lambda self, *where: None)
    patch.setattr(SliceTable, "forget", lambda self: None)


@pytest.mark.parametrize("mistake", [_no_wait, _first_line_only, _stale_table])
def test_a_mistake_is_found(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises((Race, MismatchError)):  # who reads too early may find a wrong answer before the race is seen
        compare(CASE, "symmetric", RING)


# ---- groups, slice by slice --------------------------------------------------------------------------------------------
def _used_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeDevice, "wait_value", lambda self, stream, pad, index, value, exact=False: None)


def _sent_at_once(patch: pytest.MonkeyPatch) -> None:
    """What is made leaves behind nothing."""
    deliver = DirectExecution._deliver

    def hasty(self: DirectExecution, piece: int, message: torch.Tensor, when: Any = None) -> None:
        pad = self._transport.own_words(1)
        deliver(self, piece, message, ((pad, 0, 0),))

    patch.setattr(DirectExecution, "_deliver", hasty)


@pytest.mark.parametrize("mistake", [_used_at_once, _sent_at_once])
def test_a_mistake_in_groups_is_found(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has all that is gathered, and gets all that is made: nothing but waits of its peers orders it behind them."""
    sizes = (8, 0, 0)

    def body(rank: int, transport: Any) -> None:
        transport.own_words(1)  # zeroed, which orders streams
        for _ in range(4):  # memory is watched from the first copy on
            all_gather(torch.ones(sizes[rank], 8), lambda owner, part: part.sum(), sizes=sizes, transport=transport)
            reduce_scatter(lambda owner, out: out.fill_(1), sizes=sizes, shape=(8, 8), transport=transport)

    on_streams("symmetric", 3, body)
    mistake(monkeypatch)
    with pytest.raises(Race):
        on_streams("symmetric", 3, body)


@pytest.mark.parametrize("kernel", [False, True])
def test_what_is_given_back_too_early_is_found(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 gives a place back, and uses it when rank 0 has sent what comes to lie there, two calls later."""
    calls, sent = 4, [threading.Event() for _ in range(6)]
    take, consume_all = DirectExecution._take, DirectExecution._consume_all

    def before_its_use(self: DirectExecution) -> None:
        self._transport.progress()
        assert self._transport.rank == 0 or sent[self._call + 2].wait(20.0)

    def hasty_take(self: DirectExecution, lane: int | None, until: int = -1, most: int = 1 << 62) -> Any:
        found = take(self, lane, until, most)
        self._free((until,))
        before_its_use(self)
        return found

    def hasty_kernel(self: DirectExecution, steps: Any, use: Any) -> None:
        kept: list[Any] = []
        consume_all(self, steps, lambda coming, wait: kept.extend(coming))
        before_its_use(self)
        use(kept, None)

    def body(rank: int, transport: Any) -> None:
        own, sizes = torch.ones(8 if rank == 0 else 0, 8), (8, 0)
        try:
            for call in range(calls):
                if kernel:
                    column_parallel(own[None], [torch.ones(4, 8)], sizes=sizes, transport=transport)
                else:
                    all_gather(own, lambda owner, part: part.sum(), sizes=sizes, transport=transport)
                if rank == 0:
                    sent[call].set()
        finally:
            for event in sent if rank == 0 else ():
                event.set()

    on_streams("symmetric", 2, body, ring=512)
    monkeypatch.setattr(DirectExecution, "_take", hasty_take)
    monkeypatch.setattr(DirectExecution, "_consume_all", hasty_kernel)
    for event in sent:
        event.clear()
    with pytest.raises(Race):
        on_streams("symmetric", 2, body, ring=512)


def test_words_of_one_stream_do_not_speak_for_another() -> None:
    """Calls in turn on two streams that nothing orders: each has words of its own."""

    def body(rank: int, transport: Any) -> None:
        device = transport.device
        streams = [device.current_stream(), device.side_stream("another")]
        device.wait_event(streams[1], device.record(streams[0]))
        words = []
        for call in range(8):
            with device.on(streams[call % 2]):
                out = reduce_scatter(lambda owner, out: out.fill_(1), sizes=(4, 4), shape=(8, 8), transport=transport)
                assert torch.equal(out, torch.full((4, 8), 2.0))
                words.append(transport.own_words(1).data_ptr())
        assert words == words[:2] * 4 and words[0] != words[1]

    on_streams("symmetric", 2, body)


def test_kernels_go_on_when_rings_have_grown() -> None:
    """What was launched before, once more behind a call that needs larger rings: its words are those of before."""

    def body(rank: int, transport: Any) -> None:
        transport.growing, limits = True, []
        for length in (1, 16, 1):
            x, last = torch.ones(1, 2 * length, 6), torch.ones(8, 6)
            y = row_parallel(x, last, sizes=(length, length), transport=transport)
            assert torch.equal(y, torch.full((1, length, 8), 12.0))
            limits.append(transport.message_limit)
        assert limits[0] < limits[1] == limits[2]

    on_streams("symmetric", 2, body, ring=256)
    assert USED["wgrad"] == 6


def test_groups_leave_in_their_order() -> None:
    """Rank 1 owns one slice, the others three: what all get first is complete after what goes to rank 0 and 2 alone."""
    sizes = (3, 1, 3)

    def body(rank: int, transport: Any) -> torch.Tensor:
        return reduce_scatter(
            lambda owner, out: out.fill_(rank + 1), sizes=sizes, shape=(7, 2), slices_per_rank=3, transport=transport
        )

    for rank, total in enumerate(on_streams("symmetric", 3, body)):
        assert torch.equal(total, torch.full((sizes[rank], 2), 6.0))


@pytest.mark.parametrize("calls", [0, 1])
def test_a_peer_that_never_sends_is_named_at_the_deadline(calls: int) -> None:
    """While ranks compare what they call for the first time, or while a kernel waits."""

    def body(rank: int, transport: Any) -> str:
        for _ in range(calls):
            column_parallel(torch.ones(1, 4, 8), [torch.ones(6, 8)], sizes=(4, 4), transport=transport)
        if rank:
            return ""
        transport._watch.deadline_s = 0.5
        with pytest.raises(DeadlineError) as error:
            column_parallel(torch.ones(1, 4, 8), [torch.ones(6, 8)], sizes=(4, 4), transport=transport)
            transport.progress()
        return str(error.value)

    text, _ = on_streams("symmetric", 2, body)
    assert "rank 1" in text and "column_parallel" in text
