"""Ring attention over thread ranks, against unsharded attention in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_dp.collectives.agreement import BRIEF
from commfuse_dp.errors import MismatchError
from commfuse_dp.ops import ring_attention
from commfuse_dp.program.operations import Problem
from commfuse_dp.program.verify import minimum_rows
from tests.conformance.collectives.test_ulysses import BATCH, WIDTH, assert_exact, exact, run, whole
from tests.support.inproc import Faults, InprocWorld
from tests.support.threads import run_ranks


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(1, 4))
    return {
        "sizes": draw(st.lists(st.integers(0, 5), min_size=n, max_size=n).filter(any)),
        "heads": draw(st.sampled_from([(3, 3), (3, 1), (4, 2)])),
        "causal": draw(st.booleans()),
        "m": draw(st.one_of(st.none(), st.integers(1, 3))),
        "order": draw(st.sampled_from(["pairwise", "ring"])),
        "layout": draw(st.sampled_from(["bshd", "bhsd", "sbhd"])),
        "dtype": draw(st.sampled_from([torch.float64, torch.float32])),
        "seed": draw(st.integers(0, 999)),
    }


@settings(max_examples=15)
@given(cases())
def test_against_unsharded_attention(case: dict[str, Any]) -> None:
    tensors = whole(sum(case["sizes"]), *case["heads"], case["dtype"], case["seed"])
    results, _ = run(
        tensors,
        case["sizes"],
        case["layout"],
        function=ring_attention,
        causal=case["causal"],
        slices_per_rank=case["m"],
        order=case["order"],
        faults=Faults(seed=case["seed"], max_delay=3),
        inbox_bytes=1 << 11,
    )
    assert_exact(results, exact(tensors, case["causal"]), case["layout"])


def test_bytes_are_the_minimum_and_bits_repeat() -> None:
    sizes, groups = [3, 4, 2], 2
    tensors = whole(9, 4, groups, torch.float32)
    first, moved = run(tensors, sizes, function=ring_attention, causal=True)
    second, _ = run(tensors, sizes, function=ring_attention, causal=True)
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    rows = 3 * minimum_rows(Problem("all_gather", tuple(sizes)))  # k and v twice, their gradients once
    agreement = 3 * 2 * BRIEF.size
    assert sum(m.bytes for m in moved) - agreement == rows * BATCH * 2 * groups * WIDTH * 4


def test_ranks_that_do_not_fit_are_told_so() -> None:
    world = InprocWorld(2)

    def body(rank: int, exchange: Any) -> None:
        q = torch.zeros(1, 4 + rank, 3, 4)
        with pytest.raises(MismatchError, match=r"sizes=\(4, 4\)"):
            ring_attention(q, q, q, causal=True, transport=world.transport(rank))

    run_ranks(2, body)


def test_arguments_that_cannot_be() -> None:
    q, k = torch.zeros(1, 4, 3, 4), torch.zeros(1, 4, 2, 4)
    with pytest.raises(ValueError, match="multiple of the number of key heads"):
        ring_attention(q, k, k, causal=True)
    with pytest.raises(ValueError, match="sliding windows"):
        ring_attention(q, q, q, causal=True, window_size=2)
