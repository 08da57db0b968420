"""The trace file: structure that Perfetto's importer demands, checked without our own packing code."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_dp.observe import RankSpans, Span, trace_events, write_trace
from commfuse_dp.observe.spans import STEP

LANES = ("compute", "send", "receive", "wait", STEP)
SPAN = st.builds(
    lambda lane, start, length: Span(lane, f"{lane} {start}", start, start + length, {"bytes": length}),
    st.sampled_from(LANES),
    st.integers(0, 20_000),
    st.integers(1, 6_000),
)


def nanoseconds(event: dict) -> tuple[int, int]:
    """Start and end as a reader gets them that cuts the double off after the nanoseconds, which is what Perfetto does."""
    start = int(event["ts"] * 1000.0)
    return start, start + int(event["dur"] * 1000.0)


def nested_or_apart(a: dict, b: dict) -> bool:
    (a0, a1), (b0, b1) = nanoseconds(a), nanoseconds(b)
    return a1 <= b0 or b1 <= a0 or (a0 <= b0 and b1 <= a1) or (b0 <= a0 and a1 <= b1)


@settings(max_examples=60)
@given(st.lists(st.lists(SPAN, max_size=14), min_size=1, max_size=3))
def test_spans_of_a_track_nest_or_lie_apart_and_none_is_lost(ranks: list[list[Span]]) -> None:
    events = trace_events({"stock": [RankSpans(r, spans) for r, spans in enumerate(ranks)]})
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == sum(map(len, ranks))
    tracks: dict[tuple[int, int], list[dict]] = {}
    for event in complete:
        tracks.setdefault((event["pid"], event["tid"]), []).append(event)
        assert event["ts"] >= 0 and event["dur"] >= 0
    for inside in tracks.values():
        assert len({e["cat"] for e in inside}) == 1, "a track belongs to one lane"
        assert inside == sorted(inside, key=lambda e: (e["ts"], -e["dur"])), "in time, the outer one first"
        for i, a in enumerate(inside):
            assert all(nested_or_apart(a, b) for b in inside[i + 1 :])


def test_one_process_per_variant_and_rank_one_named_track_per_lane(tmp_path: Path) -> None:
    spans = [
        Span("compute", "block", 1_000_000, 3_000_000, {}),
        Span("compute", "linear", 1_500_000, 2_000_000, {}),
        Span("receive", "a", 1_000_000, 2_000_000, {"bytes": 7}),
        Span("receive", "b", 1_500_000, 2_500_000, {}),
    ]
    later = [Span("compute", "block", 9_000_000_000, 9_001_000_000, {})]
    path = tmp_path / "trace.json"
    write_trace(
        path, {"FSDP2": [RankSpans(0, spans), RankSpans(1, spans)], "CommFuse": [RankSpans(0, later)]}, about={"seed": 1}
    )
    document = json.loads(path.read_text())
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"], "no temporary file is left"
    assert document["otherData"] == {"seed": "1"}
    named = {(e["pid"], e["name"], e["tid"]): e["args"]["name"] for e in document["traceEvents"] if e["name"].endswith("_name")}
    assert [v for (_, kind, _), v in named.items() if kind == "process_name"] == [
        "FSDP2 rank 0",
        "FSDP2 rank 1",
        "CommFuse rank 0",
    ]
    assert [v for (pid, kind, _), v in named.items() if kind == "thread_name" and pid == 1] == [
        "compute",
        "receive",
        "receive 2",
    ]
    by_name = {e["name"]: e for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == 1}
    assert by_name["block"]["tid"] == by_name["linear"]["tid"], "nested spans share a track"
    assert by_name["a"]["tid"] != by_name["b"]["tid"]
    assert (by_name["linear"]["ts"], by_name["linear"]["dur"]) == (500.0, 500.0), "microseconds from the variant's first span"
    fused = next(e for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == 3)
    assert fused["ts"] == 0.0, "each variant begins at 0"


def test_an_empty_recording_is_a_valid_trace(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.json", {"FSDP2": [RankSpans(0, [])]})
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
