"""Grouped exchanges: over gloo between processes, and the simulated ones, which other tests stand on, against themselves."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_dp.errors import DeadlineError, TransportError, Where
from commfuse_dp.transport import kept
from commfuse_dp.transport.base import GRAD_LANE, PARAM_LANE
from commfuse_dp.transport.grouped.exchange import GroupedExchange, open_grouped
from tests.support.fake_device import FakeWorld, Race, Stuck
from tests.support.fake_grouped import FakeBoard, FakeGroupedExchange, Unmatched
from tests.support.transports import pattern

WHERE = Where(layer="blocks.2.fc", step=8, slice="1/0", nbytes=123)
CPU = torch.device("cpu")


def _size(src: int, number: int) -> int:
    """Uneven; rank 2 has nothing in every second round."""
    return 0 if src == 2 and number % 2 else 1000 + 37 * src + 501 * number


def _rounds(rank: int, world_size: int) -> int:
    """Ring-shifted rounds on both lanes, all posted before the first is waited for, the lanes in different orders."""
    grouped = open_grouped(None, deadline_s=30, device=CPU)
    under_way = []
    for number in range(4):
        for shift in range(1, world_size):
            dst, src = (rank - shift) % world_size, (rank + shift) % world_size
            for lane in (PARAM_LANE, GRAD_LANE):
                out = pattern(lane, rank, dst, number, nbytes=_size(rank, number))
                into = torch.zeros(_size(src, number), dtype=torch.uint8)
                exchanged = grouped.exchange(lane, [(dst, out)], [(src, into)], where=WHERE)
                under_way.append((lane, src, number, into, exchanged))
    checked = 0
    for lane, src, number, into, exchanged in sorted(under_way, key=lambda item: item[0]):
        exchanged.wait()
        assert exchanged.done()
        assert torch.equal(into, pattern(lane, src, rank, number, nbytes=_size(src, number)))
        checked += 1
    # All peers at once, floats of two dimensions.
    others = [peer for peer in range(world_size) if peer != rank]
    tables = {peer: torch.zeros(3, 5) for peer in others}
    outs = {peer: torch.full((3, 5), 10.0 * rank + peer) for peer in others}
    grouped.exchange(GRAD_LANE, list(outs.items()), list(tables.items())).wait(WHERE)
    assert all(table.eq(10.0 * peer + rank).all() for peer, table in tables.items())
    grouped.close()
    grouped.close()
    with pytest.raises(TransportError, match="closed"):
        grouped.exchange(GRAD_LANE, [], [])
    return checked


@pytest.mark.parametrize("world_size", [2, 3])
def test_rounds_over_gloo(workers: Any, world_size: int) -> None:
    assert workers(world_size).run(_rounds, timeout=60) == [8 * (world_size - 1)] * world_size


def _kept_and_refused(rank: int, world_size: int) -> tuple[int, int]:
    peer = 1 - rank
    first = open_grouped(None, deadline_s=20, device=CPU)
    made = sum(kept.made.values())
    with pytest.raises(ValueError, match="no such peer"):
        first.exchange(PARAM_LANE, [(rank, torch.zeros(4))], [])
    with pytest.raises(ValueError, match="twice in one exchange"):
        first.exchange(PARAM_LANE, [(peer, torch.zeros(4)), (peer, torch.zeros(4))], [])
    with pytest.raises(ValueError, match=r"contiguous.*\(4, 4\)"):
        first.exchange(PARAM_LANE, [], [(peer, torch.zeros(4, 4).t())])
    with pytest.raises(ValueError, match="lane 2"):
        first.exchange(2, [], [])
    nothing = first.exchange(PARAM_LANE, [], [(peer, torch.empty(0))])
    assert nothing.done()
    nothing.wait()
    first.close()
    second = open_grouped(None, deadline_s=0.7, device=CPU)
    again = sum(kept.made.values())
    # Nobody sends this; each rank on a lane of its own, as gloo closes the connection of a wait that has timed out.
    start = time.monotonic()
    late = second.exchange((PARAM_LANE, GRAD_LANE)[rank], [], [(peer, torch.zeros(4))], where=WHERE)
    with pytest.raises(DeadlineError, match=rf"rank {peer} .*blocks\.2\.fc.*deadline_s") as caught:
        late.wait()
    assert caught.value.peer == peer and time.monotonic() - start > 0.6
    dist.barrier()
    second.close()
    third = open_grouped(None, deadline_s=20, device=CPU)  # those of `second` have a transfer open: not used again
    assert sum(kept.made.values()) == again + 1
    third.abort()
    third.abort()
    with pytest.raises(TransportError, match="aborted"):
        third.exchange(PARAM_LANE, [], [])
    third.close()
    return made, again


def test_communicators_are_kept_and_bad_calls_refused(workers: Any) -> None:
    for made, again in workers(2).run(_kept_and_refused, timeout=60):
        assert made == again


def test_alone() -> None:
    store = dist.HashStore()
    lanes = {lane: dist.ProcessGroupGloo(dist.PrefixStore(str(lane), store), 0, 1) for lane in (PARAM_LANE, GRAD_LANE)}
    grouped = GroupedExchange(lanes, device=CPU, deadline_s=1.0)
    grouped.exchange(PARAM_LANE, [], []).wait()
    grouped.close()


# ---- the simulated one -------------------------------------------------------------------------------------------------
def _fake(world_size: int, seed: int) -> tuple[FakeWorld, FakeBoard, list[FakeGroupedExchange]]:
    world = FakeWorld(world_size, seed=seed, strict=True)
    board = FakeBoard(world)
    return world, board, [FakeGroupedExchange(board, rank) for rank in range(world_size)]


def _ring(world_size: int, seed: int, *, behind: bool = True, join: bool = True) -> None:
    """Each rank makes a value, passes it on, receives one, twice over the same buffers. behind, join: no mistake."""
    world, _, ends = _fake(world_size, seed)
    out = [torch.zeros(4) for _ in ends]
    into = [torch.zeros(4) for _ in ends]
    seen: list[list[float]] = [[] for _ in ends]
    for end in ends:
        rank, device = end.rank, end.device
        for turn in (1.0, 2.0):
            source = device.side_stream("elsewhere") if not behind else device.current_stream()
            value = 10 * turn + rank
            device.launch(lambda r=rank, v=value: out[r].fill_(v), writes=[out[rank]], stream=source)
            after, before = (rank + 1) % world_size, (rank - 1) % world_size
            exchanged = end.exchange(PARAM_LANE, [(after, out[rank])], [(before, into[rank])])
            if join:
                exchanged.wait()
            device.launch(lambda r=rank: seen[r].append(float(into[r][0])), reads=[into[rank]])
    world.run()
    assert seen == [[10 + (rank - 1) % world_size, 20 + (rank - 1) % world_size] for rank in range(world_size)]


@pytest.mark.parametrize("seed", range(10))
def test_simulated_rounds_in_many_orders(seed: int) -> None:
    _ring(3, seed)


@pytest.mark.parametrize("mistake", [{"behind": False}, {"join": False}])
def test_simulated_exchange_finds_a_missing_wait(mistake: dict[str, bool]) -> None:
    for seed in range(5):
        with pytest.raises(Race):
            _ring(2, seed, **mistake)


def test_simulated_exchange_finds_partners_that_do_not_fit() -> None:
    _, _, ends = _fake(2, 1)
    ends[0].exchange(PARAM_LANE, [(1, torch.zeros(4))], [])
    with pytest.raises(Unmatched, match=r"16 bytes.*receives 20"):
        ends[1].exchange(PARAM_LANE, [], [(0, torch.zeros(5))])


def test_simulated_exchange_stands_until_it_is_aborted() -> None:
    world, _, ends = _fake(2, 1)
    into = torch.zeros(4)
    exchanged = ends[0].exchange(GRAD_LANE, [], [(1, into)], where=WHERE)
    with pytest.raises(Stuck, match=r"exchange on lane gradients .*from \[1\].*blocks\.2\.fc"):
        world.run()
    assert not exchanged.done()
    ends[0].abort()
    world.run()
    assert exchanged.done()
    with pytest.raises(TransportError, match="aborted"):
        ends[0].exchange(GRAD_LANE, [], [])


@pytest.mark.parametrize("seed", range(6))
def test_simulated_sender_that_is_through_says_nothing_about_its_receiver(seed: int) -> None:
    """What the receiver did before its post must not be taken as seen by the sender."""
    world, _, ends = _fake(2, seed)
    shared, data, into = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    first, second = ends[0].device, ends[1].device
    second.launch(lambda: shared.fill_(1), writes=[shared])
    ends[1].exchange(PARAM_LANE, [], [(0, into)])
    ends[0].exchange(PARAM_LANE, [(1, data)], []).wait()
    first.launch(lambda: None, reads=[shared])
    with pytest.raises(Race):
        world.run()
