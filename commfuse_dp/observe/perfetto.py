"""Traces in the Chrome trace event format (JSON), which ui.perfetto.dev and chrome://tracing open.

One process per variant and rank, one track per lane. Spans of a lane that overlap without one lying in the other (two
receives in flight) cannot share a track in this format: they go to further tracks of the same lane, as few as possible.
Format: "Trace Event Format", complete events (`ph: X`), times in microseconds, the outer of nested spans first.

Times are rounded to eighths of a microsecond, which a double holds exactly: a reader that converts them back to nanoseconds
then finds that spans nest and touch as they did.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from commfuse_dp.observe.intervals import pack
from commfuse_dp.observe.spans import STEP, RankSpans, Span
from commfuse_dp.probe import COMPUTE, RECEIVE, SEND, WAIT

LANES = (STEP, COMPUTE, WAIT, SEND, RECEIVE)
_TRACKS_PER_LANE = 100
_GRID_NS = 125


def trace_events(variants: Mapping[str, Sequence[RankSpans]]) -> list[dict[str, Any]]:
    """All events; the earliest span of each variant is its time 0, so that variants lie above each other, not hours apart."""
    events: list[dict[str, Any]] = []
    pid = 0
    for variant, ranks in variants.items():
        origin = min((span.start_ns for rank in ranks for span in rank.spans), default=0)
        for rank in ranks:
            pid += 1
            events += _metadata("process_name", pid, 0, f"{variant} rank {rank.rank}")
            events += [{"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}]
            events += _tracks(pid, rank.spans, origin)
    return events


def write_trace(
    path: str | Path, variants: Mapping[str, Sequence[RankSpans]], *, about: Mapping[str, Any] | None = None
) -> None:
    """Write the trace atomically. `about` (conditions, versions) is kept in the file under otherData."""
    path = Path(path)
    document = {
        "traceEvents": trace_events(variants),
        "displayTimeUnit": "ms",
        "otherData": {key: str(value) for key, value in (about or {}).items()},
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(document, separators=(",", ":")))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _tracks(pid: int, spans: Iterable[Span], origin: int) -> list[dict[str, Any]]:
    by_lane: dict[str, list[Span]] = {}
    for span in spans:
        by_lane.setdefault(span.lane, []).append(span)
    order = [*(lane for lane in LANES if lane in by_lane), *sorted(set(by_lane) - set(LANES))]
    events: list[dict[str, Any]] = []
    for position, lane in enumerate(order):
        rows = _rows(by_lane[lane])
        for row in sorted(set(rows)):
            tid = 1 + position * _TRACKS_PER_LANE + row
            events += _metadata("thread_name", pid, tid, lane if row == 0 else f"{lane} {row + 1}")
            events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
        inside = []
        for span, row in zip(by_lane[lane], rows, strict=True):
            start_us, end_us = (round((t - origin) / _GRID_NS) / 8 for t in (span.start_ns, span.end_ns))
            inside.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": lane,
                    "pid": pid,
                    "tid": 1 + position * _TRACKS_PER_LANE + row,
                    "ts": start_us,
                    "dur": end_us - start_us,
                    "args": span.arguments,
                }
            )
        events += sorted(inside, key=lambda event: (event["ts"], -event["dur"]))
    return events


def _rows(spans: Sequence[Span]) -> list[int]:
    """Track of each span: nested spans share one, overlapping ones do not."""
    order = sorted(range(len(spans)), key=lambda i: (spans[i].start_ns, -spans[i].end_ns))
    outer: list[int] = []  # spans that need a row; the others lie in one of these
    inside: dict[int, int] = {}
    open_spans: list[int] = []
    for index in order:
        while open_spans and spans[open_spans[-1]].end_ns <= spans[index].start_ns:
            open_spans.pop()
        if open_spans and spans[index].end_ns <= spans[open_spans[-1]].end_ns:
            inside[index] = open_spans[-1]
        else:
            outer.append(index)
        open_spans.append(index)
    row_of = dict(zip(outer, pack((spans[i].start_ns, spans[i].end_ns) for i in outer), strict=True))
    for index in order:
        if index in inside:
            row_of[index] = row_of[inside[index]]
    return [row_of[index] for index in range(len(spans))]


def _metadata(kind: str, pid: int, tid: int, name: str) -> list[dict[str, Any]]:
    return [{"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}]
