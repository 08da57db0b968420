"""Places in a ring that both ends work out alike: they never overlap what may still be there."""

from __future__ import annotations

import pytest
import torch

from commfuse_dp.transport.streams.staging import PlaceRing


@pytest.mark.parametrize("seed", range(20))
def test_places_never_overlap_what_is_not_known_to_be_gone(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    capacity = 64 * int(torch.randint(1, 20, (), generator=generator))
    sender, receiver = PlaceRing(capacity, words=7), PlaceRing(capacity, words=7)
    sizes: list[int] = []
    spans: list[tuple[int, int]] = []
    gone = 0
    for _ in range(200):
        if seed % 2 and int(torch.randint(0, 10, (), generator=generator)) == 0:  # as a step that begins does
            sender.rewind()
            receiver.rewind()
        sizes.append(int(torch.randint(0, capacity + 1, (), generator=generator)))
        place = sender.place(sizes[-1])
        assert receiver.place(sizes[-1]) == place and place.number == len(sizes) and place.behind < place.number
        gone = max(gone, place.behind, place.number - 7)
        start, stop = place.offset, place.offset + max(sizes[-1], 1)
        assert start % 64 == 0 and stop <= capacity
        for earlier in range(gone, len(spans)):
            assert spans[earlier][1] <= start or stop <= spans[earlier][0]
        spans.append((start, stop))


def test_what_a_ring_that_begins_anew_skips_is_forgotten() -> None:
    """Else the oldest message of the ring would hide the one that lies where the next one goes."""
    ring = PlaceRing(256, words=256)
    assert [ring.place(64)[1:] for _ in range(5)] == [(0, 0), (64, 0), (128, 0), (192, 0), (0, 1)]
    ring.rewind()
    ring.rewind()
    assert [ring.place(64)[1:] for _ in range(3)] == [(0, 5), (64, 0), (128, 0)]
