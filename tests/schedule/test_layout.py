"""Layouts against torch.chunk and against brute force over single elements."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commfuse_dp.schedule.layout import FlatLayout, RowLayout, chunk_bounds, slices_of_sizes


@given(rows=st.integers(0, 300), world_size=st.integers(1, 64))
def test_chunk_bounds_is_torch_chunk(rows: int, world_size: int) -> None:
    chunks = [c.tolist() for c in torch.arange(rows).chunk(world_size)]
    chunks += [[]] * (world_size - len(chunks))
    bounds = chunk_bounds(rows, world_size)
    assert [list(range(*b)) for b in bounds] == chunks


@given(rows=st.integers(0, 300), world_size=st.integers(1, 64), m=st.integers(1, 9))
def test_row_slices_cover_each_shard_once_in_order(rows: int, world_size: int, m: int) -> None:
    layout = RowLayout(rows, world_size, m)
    for owner in range(world_size):
        start, stop = layout.bounds(owner)
        slices = layout.slices(owner)
        assert [row for s in slices for row in range(s.start, s.stop)] == list(range(start, stop))
        assert all(s.owner == owner and s.size > 0 and 0 <= s.index < m for s in slices)
        assert [s.index for s in slices] == sorted({s.index for s in slices})
        if slices:
            assert max(s.size for s in slices) - min(s.size for s in slices) <= 1
            assert max(s.size for s in slices) <= layout.max_slice_rows
            assert len(slices) == min(m, stop - start)
    assert sum(layout.sizes) == rows and max(layout.sizes) == layout.max_rows


def test_known_shards() -> None:
    assert RowLayout(37, 4).sizes == (10, 10, 10, 7)
    assert RowLayout(5, 4).sizes == (2, 2, 1, 0)
    assert RowLayout(5, 4).slices(3) == ()
    assert RowLayout(8, 2, 2) == RowLayout(8, 2, 2) != RowLayout(8, 2, 1)
    assert hash(RowLayout(8, 2, 2)) == hash(RowLayout(8, 2, 2))
    assert [[s.size for s in shard] for shard in slices_of_sizes((3, 0, 5), 2)] == [[2, 1], [], [3, 2]]


@given(rows=st.integers(0, 40), width=st.integers(1, 17), world_size=st.integers(1, 12))
def test_flat_layout_covers_every_element_once(rows: int, width: int, world_size: int) -> None:
    layout = FlatLayout(rows * width, width, world_size)
    padded = layout.partition * world_size
    seen = [0] * (rows * width)
    for owner in range(world_size):
        part = layout.part(owner)
        # The owner's partition holds these flat elements at these offsets; padding is -1.
        partition = [e if e < rows * width else -1 for e in range(owner * layout.partition, (owner + 1) * layout.partition)]
        assert partition.count(-1) == part.padding
        assert [e for e in partition if e >= 0] == list(range(*layout.bounds(owner)))
        pieces = [(row, 0, width, part.rows_offset + i * width) for i, row in enumerate(range(part.row_start, part.row_stop))]
        pieces += [p for p in (part.head, part.tail) if p is not None]
        for row, first, last, offset in pieces:
            assert 0 <= first < last <= width
            for column in range(first, last):
                element = row * width + column
                assert partition[offset + column - first] == element
                seen[element] += 1
        for edge in (part.head, part.tail):
            assert edge is None or edge.column_stop - edge.column_start < width
    assert seen == [1] * (rows * width) and padded >= rows * width
    assert layout.aligned == (layout.partition % width == 0 or rows * width == 0 or world_size == 1)


def test_bad_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="slices_per_rank=0"):
        RowLayout(4, 2, 0)
    with pytest.raises(ValueError, match="no multiple of row_elems=3"):
        FlatLayout(10, 3, 2)
    with pytest.raises(ValueError, match="world_size=0"):
        chunk_bounds(4, 0)
