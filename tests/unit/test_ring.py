"""The inbox allocator against an oracle that knows nothing of heads and tails: a set of taken intervals."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_dp.transport.one_sided.ring import ALIGNMENT, Ring, align


@settings(max_examples=150)
@given(blocks=st.integers(1, 20), seed=st.integers(0, 10_000), ordered=st.booleans())
def test_places_never_overlap_and_room_comes_back(blocks: int, seed: int, ordered: bool) -> None:
    capacity, choice = blocks * ALIGNMENT, random.Random(seed)
    ring, live = Ring(capacity), []
    for _ in range(200):
        nbytes = choice.randint(0, capacity)
        offset = ring.reserve(nbytes)
        if offset is None:
            assert live, "an empty ring has room for every message up to its capacity"
        else:
            end = offset + max(align(nbytes), ALIGNMENT)
            assert offset % ALIGNMENT == 0 and end <= capacity
            assert all(end <= start or stop <= offset for start, stop in live), "overlap"
            live.append((offset, end))
            assert ring.send(offset) and not ring.send(offset)
        if live and choice.random() < 0.6:
            gone = live.pop(0 if ordered else choice.randrange(len(live)))
            ring.free(gone[0])
            with pytest.raises(KeyError):
                ring.free(gone[0])
    for offset, _ in live:
        ring.free(offset)
    assert ring.reserve(capacity) == 0


def test_uses_the_whole_ring_in_order() -> None:
    ring = Ring(4 * ALIGNMENT)
    assert [ring.reserve(ALIGNMENT) for _ in range(5)] == [0, 64, 128, 192, None]
    for offset in (0, 64, 128, 192):
        assert ring.send(offset)
    ring.free(64)
    assert ring.reserve(1) is None, "room is taken back in order: 0 is still in use"
    ring.free(0)
    assert [ring.reserve(ALIGNMENT), ring.reserve(ALIGNMENT), ring.reserve(1)] == [0, 64, None]


def test_a_place_is_freed_only_after_it_was_sent() -> None:
    ring = Ring(ALIGNMENT)
    assert ring.reserve(8) == 0
    with pytest.raises(KeyError):
        ring.free(0)
    assert not ring.send(64)


@pytest.mark.parametrize("capacity", [0, 63, 100, -64])
def test_capacity_is_checked(capacity: int) -> None:
    with pytest.raises(ValueError, match=str(capacity)):
        Ring(capacity)
