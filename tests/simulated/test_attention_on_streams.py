"""Attention over ranks on the simulated device, over both stream-ordered transports, against unsharded attention in float64.
Torch's operations are accesses of the current stream, as in test_programs_on_streams.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_dp.errors import MismatchError
from commfuse_dp.ops import ring_attention, ulysses_attention
from commfuse_dp.transport.symmetric.core import Core
from tests.conformance.collectives import test_ring_attention as ring
from tests.conformance.collectives import test_row_attention as row
from tests.conformance.collectives import test_ulysses as ulysses
from tests.simulated.test_programs_on_streams import KINDS, QUIET, RING, on_streams
from tests.support.fake_device import Race

FUNCTIONS = {"ulysses": (ulysses.cases, ulysses_attention), "ring": (ring.cases, ring_attention), "row": (row.cases, None)}


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(st.sampled_from(list(FUNCTIONS)))
    case = draw(FUNCTIONS[name][0]().filter(lambda case: len(case["sizes"]) > 1))
    return {**case, "name": name, "kind": draw(st.sampled_from(KINDS)), "ring": draw(st.sampled_from([512, RING]))}


def compare(case: dict[str, Any]) -> None:
    def over(n: int, body: Callable[[int, Any], Any]) -> tuple[list[Any], None]:
        return on_streams(case["kind"], n, body, seed=case["seed"], ring=case["ring"]), None

    sizes, dtype = case["sizes"], case["dtype"]
    how = {"causal": case["causal"], "slices_per_rank": case["m"], "order": case["order"], "over": over}
    if case["name"] != "row":
        tensors = ulysses.whole(sum(sizes), *case["heads"], dtype, case["seed"])
        results, _ = ulysses.run(tensors, sizes, case["layout"], function=FUNCTIONS[case["name"]][1], **how)
        ulysses.assert_exact(results, ulysses.exact(tensors, case["causal"]), case["layout"])
        return
    model = row.Model(len(sizes), sum(sizes), *case["heads"], dtype, case["seed"])
    results, _ = row.run(model, sizes, dim=case["dim"], **how)
    for found, wanted in zip(row.together(model, results, case["dim"]), model.exact(case["causal"]), strict=True):
        row.assert_close(found, wanted, 1e-12 if dtype == torch.float64 else 1e-6)


@settings(max_examples=8, suppress_health_check=QUIET, deadline=None)
@given(cases())
def test_attention(case: dict[str, Any]) -> None:
    compare(case)


@pytest.mark.slow
@settings(max_examples=80, suppress_health_check=QUIET, deadline=None)
@given(cases())
def test_more_attention(case: dict[str, Any]) -> None:
    compare(case)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_used_before_it_has_come_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has all positions, so that nothing but its own waits orders it behind its peers."""
    case = {"name": name, "kind": "symmetric", "ring": RING, "sizes": [16, 0], "heads": (4, 4), "causal": True, "m": 2}
    case |= {"order": "pairwise", "layout": "bshd", "dim": 1, "dtype": torch.float64, "seed": 0}
    compare(case)
    monkeypatch.setattr("tests.support.fake_device.STANDS", 0.0)  # a host that stands may hide it
    monkeypatch.setattr(Core, "wait_for", lambda self, stream, conditions, places, doing, **more: None)
    with pytest.raises((Race, MismatchError)):  # whoever reads too early may find a wrong answer before the race is seen
        compare(case)
