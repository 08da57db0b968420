"""Layouts against torch.chunk and against brute force over single elements."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commfuse_dp.program.layout import FlatLayout, chunk_bounds, rectangles, row_slices, slices_of_sizes


@given(rows=st.integers(0, 300), world_size=st.integers(1, 64))
def test_chunk_bounds_is_torch_chunk(rows: int, world_size: int) -> None:
    chunks = [c.tolist() for c in torch.arange(rows).chunk(world_size)]
    chunks += [[]] * (world_size - len(chunks))
    bounds = chunk_bounds(rows, world_size)
    assert [list(range(*b)) for b in bounds] == chunks


@given(rows=st.integers(0, 300), world_size=st.integers(1, 64), m=st.integers(1, 9))
def test_row_slices_cover_each_shard_once_in_order(rows: int, world_size: int, m: int) -> None:
    bounds = chunk_bounds(rows, world_size)
    for owner, slices in enumerate(row_slices(rows, world_size, m)):
        start, stop = bounds[owner]
        assert [row for s in slices for row in range(s.start, s.stop)] == list(range(start, stop))
        assert all(s.owner == owner and s.size > 0 and 0 <= s.index < m for s in slices)
        assert [s.index for s in slices] == sorted({s.index for s in slices})
        if slices:
            assert max(s.size for s in slices) - min(s.size for s in slices) <= 1
            assert max(s.size for s in slices) <= -(-bounds[0][1] // m)
            assert len(slices) == min(m, stop - start)


def test_known_shards() -> None:
    assert [[s.size for s in shard] for shard in row_slices(37, 4)] == [[10], [10], [10], [7]]
    assert [[s.size for s in shard] for shard in row_slices(5, 4)] == [[2], [2], [1], []]
    assert [[s.size for s in shard] for shard in slices_of_sizes((3, 0, 5), 2)] == [[2, 1], [], [3, 2]]


def check_flat(layout: FlatLayout, slices_per_rank: int) -> None:
    """Every element in exactly one rectangle of one slice, at the offset that its owner's range gives it."""
    width = layout.row_elems
    seen = [0] * layout.numel
    for owner, (low, high) in enumerate(layout.bounds):
        own = layout.slices(owner)
        assert [s.index for s in own] == list(range(len(own))) and len(own) <= slices_per_rank
        assert all(s.owner == owner for s in own)
        assert [e for s in own for e in range(s.start, s.stop)] == list(range(low, high))
        for piece in own:
            for rect in rectangles(piece.start, piece.stop, width):
                whole = rect.column_start == 0 and rect.column_stop == width
                assert whole or rect.row_stop == rect.row_start + 1
                cells = itertools.product(range(rect.row_start, rect.row_stop), range(rect.column_start, rect.column_stop))
                for number, (row, column) in enumerate(cells):
                    assert 0 <= column < width
                    assert row * width + column == piece.start + rect.offset + number
                    seen[row * width + column] += 1
                    assert whole or row in layout.split_rows
                assert not whole or not set(range(rect.row_start, rect.row_stop)) & set(layout.split_rows)
    assert seen == [1] * layout.numel


@given(rows=st.integers(0, 40), width=st.integers(1, 17), world_size=st.integers(1, 12), m=st.integers(1, 4))
def test_flat_layout_of_zero_3(rows: int, width: int, world_size: int, m: int) -> None:
    bounds = chunk_bounds(rows * width, world_size)
    partition = -(-rows * width // world_size)
    assert [stop - start for start, stop in bounds] == [
        len([e for e in range(owner * partition, (owner + 1) * partition) if e < rows * width]) for owner in range(world_size)
    ]
    check_flat(FlatLayout(bounds, width, m), m)


@given(rows=st.integers(0, 20), width=st.integers(1, 9), cuts=st.lists(st.floats(0, 1), max_size=5), m=st.integers(1, 4))
def test_flat_layout_of_any_ranges(rows: int, width: int, cuts: list[float], m: int) -> None:
    numel = rows * width
    edges = [0, *sorted(int(numel * cut) for cut in cuts), numel]
    check_flat(FlatLayout(list(itertools.pairwise(edges)), width, m), m)


def test_bad_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="slices_per_rank=0"):
        row_slices(4, 2, 0)
    with pytest.raises(ValueError, match="no multiple of row_elems=3"):
        FlatLayout(chunk_bounds(10, 2), 3)
    with pytest.raises(ValueError, match="follow one another"):
        FlatLayout([(0, 3), (4, 6)], 3)
    with pytest.raises(ValueError, match="world_size=0"):
        chunk_bounds(4, 0)
