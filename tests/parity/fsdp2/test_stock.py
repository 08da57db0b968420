"""StockMeter, module hooks and clocks on two processes that train a small FSDP2 model over gloo; one run for all tests."""

from __future__ import annotations

from typing import Any

import pytest

from commfuse_dp.observe import payload_received
from tests.parity.fsdp2.rank_program import BLOCKS, DELAY_S, SHIFT_NS, WIDTH, scenarios
from tests.support.workers import Workers

BLOCK_BYTES, HEAD_BYTES = 4 * WIDTH * WIDTH, 4 * 2 * WIDTH * WIDTH
DELAY_MS = DELAY_S * 1e3


@pytest.fixture(scope="module")
def seen(workers: Workers) -> list[dict[str, Any]]:
    return workers(2).run(scenarios)


def test_collectives_of_a_step_are_counted(seen: list[dict[str, Any]]) -> None:
    """Two steps: every block is gathered in forward and again in backward, the root (the head) once."""
    for rank in seen:
        assert rank["stock"]["collectives"] == {"all-gather": 2 * (2 * BLOCKS + 1), "reduce-scatter": 2 * (BLOCKS + 1)}


def test_bytes_are_those_of_the_algorithm(seen: list[dict[str, Any]]) -> None:
    """All-gather: the other rank's half. Gloo's reduce-scatter is an all-reduce: half to be summed, half of the sums."""
    gathered = (2 * BLOCKS * BLOCK_BYTES + HEAD_BYTES) // 2
    reduced = BLOCKS * BLOCK_BYTES + HEAD_BYTES
    for rank in seen:
        assert rank["stock"]["received"] == [gathered, reduced]
        assert rank["stock"]["sent"] == [gathered, reduced]


def test_layers_are_named(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["stock"]["layers"] == ["blocks.0", "blocks.1", "blocks.2", "root"]


def test_a_slow_rank_shows_as_exposed_time_of_the_other_at_the_layer_after(seen: list[dict[str, Any]]) -> None:
    """Rank 1 sleeps in blocks.1's forward; rank 0 stands in the all-gather of blocks.2 meanwhile."""
    waiting, sleeping = seen[0]["stock"], seen[1]["stock"]
    assert waiting["slow_by_layer"]["blocks.2"] > 0.8 * DELAY_MS
    assert waiting["exposed_slow"] > 0.8 * DELAY_MS
    assert sleeping["exposed_slow"] < waiting["exposed_slow"] - 0.5 * DELAY_MS


def test_everything_is_put_back(seen: list[dict[str, Any]]) -> None:
    assert all(rank["stock"]["restored"] for rank in seen)


def test_an_asynchronous_collective_is_followed_to_its_wait(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        found = rank["asynchronous"]
        assert found["calls"] == {"all-gather": 1}, "a forwarding name is counted once"
        assert found["value"] == 2 * WIDTH
        assert found["exposed_before_wait_ms"] < 90, "the call itself does not wait for the transfer"
    assert seen[1]["asynchronous"]["flight_ms"][0] > 100 + 0.9 * DELAY_MS, "until somebody waited for it"


def test_module_spans_of_forward_and_backward(seen: list[dict[str, Any]]) -> None:
    forward = [f"block {i} forward" for i in range(BLOCKS)]
    backward = [f"block {i} backward" for i in reversed(range(1, BLOCKS))]
    assert [name for name in seen[0]["spans_and_peak"]["compute"] if name != "block 0 backward"] == forward + backward


def test_peak_of_unsharded_weights(seen: list[dict[str, Any]]) -> None:
    """The root stays gathered all through, one block at a time with it; plus what the window says."""
    for rank in seen:
        assert rank["spans_and_peak"]["peak"] >= HEAD_BYTES + BLOCK_BYTES + 1000
        assert rank["spans_and_peak"]["peak"] <= HEAD_BYTES + 2 * BLOCK_BYTES + 1000
        assert rank["spans_and_peak"]["hooks"] == rank["plain_hooks"], "hooks are gone"


def test_spans_come_together_on_rank_0(seen: list[dict[str, Any]]) -> None:
    assert [rank["spans_and_peak"]["gathered"] for rank in seen] == [True, False]
    (first_start, first_end), (second_start, second_end) = seen[0]["spans_and_peak"]["steps"]
    assert first_start < second_end and second_start < first_end, "both ranks took the step at the same time"


def test_clocks_of_one_host_need_no_offset_and_others_are_measured(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["clocks"]["same"] == [0, 0]
        zero, offset = rank["clocks"]["apart"]
        assert zero == 0
        assert abs(offset + SHIFT_NS) < 50_000_000, "rank 1's clock is 5 s ahead"


@pytest.mark.parametrize(
    ("kind", "backend", "world_size", "received"),
    [
        ("all-gather", "gloo", 4, 750),
        ("reduce-scatter", "gloo", 4, 1500),
        ("reduce-scatter", "nccl", 4, 750),
        ("all-reduce", "nccl", 2, 1000),
        ("all-gather", "gloo", 1, 0),
    ],
)
def test_payload_by_algorithm(kind: str, backend: str, world_size: int, received: int) -> None:
    assert payload_received(kind, 1000, world_size, backend=backend) == received
