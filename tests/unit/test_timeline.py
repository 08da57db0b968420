"""The timeline: figures of a step from known spans, and a picture that shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commfuse_dp.observe import RankSpans, Span, StepView, draw_timeline, view_step
from commfuse_dp.observe.timeline import COLOURS

MS = 1_000_000


def step_spans(number: int, at: int, *, head: int, middle: int, tail: int) -> list[Span]:
    """head | 100 forward | middle | 200 backward | tail | 10 optimizer, in ms from `at`."""
    spans, t = [], at
    marks = []
    for kind, length in (("w", head), ("f", 100), ("w", middle), ("b", 200), ("w", tail), ("o", 10)):
        marks.append((kind, t, t + length))
        t += length
    for kind, start, end in marks:
        if kind == "w" and end > start:
            spans += [Span(lane, "x", start * MS, end * MS, {}) for lane in ("wait", "receive", "send")]
    forward_end = at + head + 100
    backward_end = forward_end + middle + 200 + tail
    spans += [
        Span("step", "forward", at * MS, forward_end * MS, {}),
        Span("step", "backward", forward_end * MS, backward_end * MS, {}),
        Span("step", "optimizer", backward_end * MS, t * MS, {}),
        Span("step", f"step {number}", at * MS, t * MS, {"step": number}),
    ]
    return spans


def two_ranks(skew: int = 0) -> list[RankSpans]:
    first = step_spans(1, 1000, head=20, middle=30, tail=40) + step_spans(2, 1400, head=2, middle=3, tail=4)
    second = step_spans(1, 1000 + skew, head=10, middle=30, tail=40) + step_spans(2, 1400 + skew, head=2, middle=3, tail=4)
    return [RankSpans(0, first), RankSpans(1, second)]


def test_figures_of_a_step() -> None:
    view = view_step("FSDP2", two_ranks(), number=1)
    assert view.duration_ns == 400 * MS
    assert (view.head_ns, view.tail_ns) == (15 * MS, 40 * MS)
    assert view.exposed_ns == 85 * MS
    lanes = view.lanes[0]
    assert lanes["forward"] == [(20 * MS, 120 * MS)], "the wait is cut out of the phase"
    assert lanes["backward"] == [(150 * MS, 350 * MS)]
    assert lanes["optimizer"] == [(390 * MS, 400 * MS)]
    assert lanes["wait"] == [(0, 20 * MS), (120 * MS, 150 * MS), (350 * MS, 390 * MS)]


def test_waiting_for_a_rank_that_is_behind_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    early = step_spans(1, 1000, head=30, middle=0, tail=80)
    # Its step before ends at 1012; its own begins with a short head.
    late = [*step_spans(0, 600, head=0, middle=0, tail=102), *step_spans(1, 1012, head=60, middle=0, tail=15)]
    view = view_step("x", [RankSpans(0, early), RankSpans(1, late)], number=1)
    assert view.heads_ns == [30 * MS, 60 * MS]
    assert view.tails_ns == [80 * MS, 15 * MS]
    # Rank 0 waits in 1000..1030 and 1330..1410. Rank 1 is in the optimizer of its step before in 1002..1012, computes until
    # 1372 and waits until 1387. That rank 0 computes forward while rank 1 waits at its head does not put it behind.
    assert view.behind_ns == [(10 * MS, 42 * MS), (0, 0)]
    seen = texts(tmp_path, monkeypatch, [view])
    assert [text for text in seen if text.startswith(("head 3", "head 6", "tail 8", "tail 1"))] == [
        "head 30 ms",
        "tail 80 ms, 42 ms of it for a rank that is behind",
        "head 60 ms",
        "tail 15 ms",
    ]


def test_a_rank_that_is_behind_shows_nothing_of_its_step_before() -> None:
    view = view_step("FSDP2", two_ranks(skew=15), number=2)
    assert view.lanes[1]["optimizer"] == [((15 + 2 + 100 + 3 + 200 + 4) * MS, (15 + 319) * MS)]
    assert view.lanes[1]["wait"][0] == (15 * MS, 17 * MS)


def test_the_typical_or_else_the_median_step_is_taken_if_none_is_named() -> None:
    spans = []
    for number, head in ((1, 500), (2, 7), (3, 1)):
        spans += step_spans(number, 1000 * number, head=head, middle=0, tail=0)
    assert view_step("x", [RankSpans(0, spans)]).number == 2
    assert view_step("x", [RankSpans(0, spans)], typical_ns=311 * MS).number == 3
    assert view_step("x", [RankSpans(0, spans)], typical_ns=900 * MS).number == 1


def test_a_step_that_was_not_recorded_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"step 9 was not recorded on all ranks \(have \[1, 2\]\)"):
        view_step("x", two_ranks(), number=9)
    with pytest.raises(ValueError, match="was not recorded"):
        view_step("x", [RankSpans(0, [])])


def test_the_picture_shows_every_lane_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    views = [view_step("FSDP2", two_ranks(), number=1), view_step("CommFuse", two_ranks(), number=2)]
    path = tmp_path / "timeline.png"
    draw_timeline(path, views, title="One step", conditions="made up")
    assert [p.name for p in tmp_path.iterdir()] == ["timeline.png"]
    pixels = (image.imread(path)[..., :3] * 255).round().astype(int)
    assert pixels.shape[1] == 1760
    upper = pixels[: pixels.shape[0] // 2].reshape(-1, 3)
    for lane, colour in COLOURS.items():
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (abs(upper - wanted).max(axis=1) <= 2).sum() > 50, f"no {lane} in the upper half"


def test_more_ranks_than_fit_are_left_out_of_the_picture_only(tmp_path: Path) -> None:
    ranks = [RankSpans(r, step_spans(1, 0, head=1, middle=1, tail=1)) for r in range(5)]
    view = view_step("x", ranks)
    assert len(view.lanes) == 5
    draw_timeline(tmp_path / "t.png", [view], title="t", conditions="c", max_ranks=1)
    assert (tmp_path / "t.png").stat().st_size > 10_000


def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, views: list[StepView], **options: int) -> list[str]:
    """Everything written into the picture."""
    figure_module = pytest.importorskip("matplotlib.figure")
    seen: list[str] = []
    save = figure_module.Figure.savefig

    def spy(figure: Any, *args: Any, **kwargs: Any) -> None:
        found = figure.findobj(match=lambda artist: hasattr(artist, "get_text"))
        seen.extend(text for artist in found if (text := artist.get_text()))
        save(figure, *args, **kwargs)

    monkeypatch.setattr(figure_module.Figure, "savefig", spy)
    draw_timeline(tmp_path / "t.png", views, title="t", conditions="c", **options)
    return seen


def test_a_note_fills_empty_lanes_and_stands_beside_the_title_of_full_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = view_step("x", two_ranks(), number=1, note="in place")
    bare = [RankSpans(r.rank, [s for s in r.spans if s.lane not in ("send", "receive")]) for r in two_ranks()]
    empty = view_step("x", bare, number=1, note="in place")
    assert texts(tmp_path, monkeypatch, [full]).count("in place") == 1
    assert texts(tmp_path, monkeypatch, [empty]).count("in place") == 2, "once a rank"
    assert "in place" not in texts(tmp_path, monkeypatch, [replace(full, note="")])


def test_head_and_tail_are_named_where_they_are_and_the_saving_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = view_step("stock", two_ranks(), number=1)
    fast = view_step("fused", [RankSpans(0, step_spans(1, 0, head=0, middle=3, tail=0))])
    seen = texts(tmp_path, monkeypatch, [slow, fast], max_ranks=1)
    assert [text for text in seen if text.startswith(("head", "tail"))] == ["head 20 ms", "tail 40 ms"]
    assert "87 ms\nsaved" in seen
    assert "milliseconds since the step began (1 more rank not shown)" in seen
