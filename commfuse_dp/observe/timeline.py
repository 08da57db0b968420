"""The picture: what every rank did in one step, lane by lane, variants above each other on one time axis.

The compute lane shows the phases of the step with the waits cut out of them, so it is made in the same way for every variant:
a phase lasts from its begin to its end, and whatever of it was spent blocked on a transfer is not compute.
matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commfuse_dp.observe.intervals import Interval, clip, head_and_tail, intersect, merge, subtract, total
from commfuse_dp.observe.spans import PHASES, STEP, RankSpans
from commfuse_dp.probe import RECEIVE, SEND, WAIT

# Okabe and Ito's palette: told apart with any colour vision, and in grey by lightness together with the lane's own row.
COLOURS = {
    "forward": "#0072B2",
    "backward": "#56B4E9",
    "optimizer": "#999999",
    SEND: "#009E73",
    RECEIVE: "#E69F00",
    WAIT: "#D55E00",
}
LANE_NAMES = ("compute", "send", "receive", "wait")
_INK, _FAINT = "#222222", "#DDDDDD"


@dataclass(frozen=True)
class StepView:
    """One step of one variant, times in ns from the first rank's start of the step."""

    title: str
    number: int
    duration_ns: int
    lanes: list[dict[str, list[Interval]]]  # a rank each: phases, send, receive, wait
    heads_ns: list[int]  # a rank each
    tails_ns: list[int]
    behind_ns: list[tuple[int, int]]  # of head and tail, the part in which another rank was still computing what comes before
    exposed_ns: int  # mean of the ranks
    note: str = ""  # about the transfers: written into the send and receive lanes if they are empty, else beside the title

    @property
    def head_ns(self) -> int:
        """Mean of the ranks."""
        return sum(self.heads_ns) // len(self.heads_ns)

    @property
    def tail_ns(self) -> int:
        """Mean of the ranks."""
        return sum(self.tails_ns) // len(self.tails_ns)


def view_step(
    title: str, ranks: Sequence[RankSpans], number: int | None = None, *, typical_ns: int | None = None, note: str = ""
) -> StepView:
    """Cut one step out of gathered spans: step `number`, else the one whose duration is nearest to `typical_ns`, else the one
    of median duration. Raises ValueError if there is none.
    """
    steps = [rank.steps() for rank in ranks]
    common = sorted(set.intersection(*(set(s) for s in steps))) if steps else []
    if not common or (number is not None and number not in common):
        raise ValueError(f"{title}: step {'any' if number is None else number} was not recorded on all ranks (have {common}).")

    def window(step: int) -> Interval:
        return min(s[step][0] for s in steps), max(s[step][1] for s in steps)

    if number is None:
        lengths = {step: window(step)[1] - window(step)[0] for step in common}
        if typical_ns is None:
            typical_ns = sorted(lengths.values())[len(lengths) // 2]
        number = min(common, key=lambda step: abs(lengths[step] - typical_ns))
    start, end = window(number)
    lanes, ends, exposed = [], [], []
    for rank, own in zip(ranks, (step[number] for step in steps), strict=True):
        # Within the rank's own step: the frame of all ranks also shows the end of a slower rank's step before.
        waits = clip(merge(rank.lane(WAIT)), *own)
        busy = {name: clip(spans, *own) for name, spans in _busy(rank).items()}
        ends.append(head_and_tail([*busy["forward"], *busy["backward"]], waits))
        exposed.append(total(waits))
        shown = {**busy, **{lane: clip(merge(rank.lane(lane)), *own) for lane in (SEND, RECEIVE)}, WAIT: waits}
        lanes.append({lane: [(a - start, b - start) for a, b in spans] for lane, spans in shown.items()})
    behind = []
    for index, (head, tail) in enumerate(ends):
        others = [rank for other, rank in enumerate(ranks) if other != index]
        # Before its own step a rank is in the one before; before its own tail it computes what is waited for here.
        before = [span for rank in others for spans in _busy(rank).values() for span in clip(spans, 0, rank.steps()[number][0])]
        within = [
            span
            for rank in others
            for name in ("forward", "backward")
            for span in clip(_busy(rank)[name], *rank.steps()[number])
        ]
        behind.append((total(intersect(head, before)), total(intersect(tail, within))))
    heads, tails = ([total(pair[side]) for pair in ends] for side in (0, 1))
    return StepView(title, number, end - start, lanes, heads, tails, behind, sum(exposed) // len(ranks), note)


def _busy(rank: RankSpans) -> dict[str, list[Interval]]:
    """When the rank was in each phase and not blocked."""
    waits = merge(rank.lane(WAIT))
    phases = {name: [(s.start_ns, s.end_ns) for s in rank.spans if s.lane == STEP and s.name == name] for name in PHASES}
    return {name: subtract(spans, waits) for name, spans in phases.items()}


def draw_timeline(path: str | Path, views: Sequence[StepView], *, title: str, conditions: str, max_ranks: int = 2) -> None:
    """Write a PNG (by the suffix of `path`; atomically). The first view is the one that others are compared with."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    path = Path(path)
    shown_ranks = max(1, min(max_ranks, max(len(view.lanes) for view in views)))
    figure = Figure(figsize=(11.0, 1.5 + len(views) * (0.75 + 1.1 * shown_ranks)), dpi=160)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(views), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(view.duration_ns for view in views) / 1e6
    for view, axis in zip(views, axes, strict=True):
        _draw_view(axis, view, shown_ranks)
    for view, axis in zip(views[1:], axes[1:], strict=True):
        _draw_saving(axis, view, views[0])
    axes[0].set_xlim(-0.004 * longest, longest * 1.012)
    left_out = max(len(view.lanes) for view in views) - shown_ranks
    more = f" ({left_out} more rank{'s' if left_out > 1 else ''} not shown)" if left_out > 0 else ""
    axes[-1].set_xlabel(f"milliseconds since the step began{more}", fontsize=11, color=_INK)
    names = {WAIT: "wait: compute blocked on a transfer"}
    legend = [Patch(color=colour, label=names.get(lane, lane)) for lane, colour in COLOURS.items()]
    figure.legend(handles=legend, loc="lower center", ncol=len(legend), fontsize=9.5, frameon=False, handlelength=1.1)
    figure.suptitle(title, x=0.012, y=0.985, ha="left", fontsize=14, fontweight="bold", color=_INK)
    figure.text(0.012, 1 - 0.50 / figure.get_figheight(), conditions, ha="left", va="center", fontsize=9.5, color="#555555")
    height = figure.get_figheight()
    figure.subplots_adjust(left=0.115, right=0.975, top=1 - 1.05 / height, bottom=0.85 / height, hspace=0.30)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        figure.savefig(temporary, facecolor="white")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _draw_view(axis: Any, view: StepView, shown_ranks: int) -> None:
    rows = len(LANE_NAMES)
    pitch = rows + 0.7
    ticks, labels = [], []
    for rank, lanes in enumerate(view.lanes[:shown_ranks]):
        for row, lane in enumerate(LANE_NAMES):
            y = rank * pitch + row
            ticks.append(y + 0.5)
            labels.append(lane)
            axis.broken_barh([(0, view.duration_ns / 1e6)], (y + 0.06, 0.88), facecolors="#F2F2F2", linewidth=0, zorder=0)
            for kind in PHASES if lane == "compute" else (lane,):
                bars = [(a / 1e6, (b - a) / 1e6) for a, b in lanes.get(kind, [])]
                axis.broken_barh(bars, (y + 0.06, 0.88), facecolors=COLOURS[kind], linewidth=0, zorder=2)
        axis.text(
            -0.083, rank * pitch + rows / 2, f"rank {rank}", transform=axis.get_yaxis_transform(), rotation=90,
            ha="center", va="center", fontsize=10.5, fontweight="bold", color=_INK,
        )  # fmt: skip
        if view.note and not _transfers(lanes):
            axis.text(
                view.duration_ns / 2e6, rank * pitch + 2, view.note, ha="center", va="center", fontsize=9, style="italic",
                color="#555555",
            )  # fmt: skip
        _name_head_and_tail(axis, view, rank, rank * pitch + rows + 0.33)
    axis.set_yticks(ticks, labels, fontsize=9.5, color=_INK)
    axis.tick_params(axis="y", length=0, pad=3)
    axis.tick_params(axis="x", labelsize=10, colors=_INK, labelbottom=True)
    axis.set_ylim(shown_ranks * pitch, 0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(_FAINT)
    axis.grid(axis="x", color=_FAINT, linewidth=0.6, zorder=1)
    axis.set_axisbelow(True)
    share = 100 * view.exposed_ns / view.duration_ns if view.duration_ns else 0.0
    title = axis.set_title(view.title, loc="left", fontsize=12, fontweight="bold", color=_INK, pad=5)
    if view.note and any(_transfers(lanes) for lanes in view.lanes[:shown_ranks]):
        axis.annotate(
            view.note, xy=(1, 0), xycoords=title, xytext=(6, 2.5), textcoords="offset points", fontsize=8, style="italic",
            color="#555555", annotation_clip=False,
        )  # fmt: skip
    axis.set_title(
        f"step {_ms(view.duration_ns)}   exposed communication {_ms(view.exposed_ns)} ({share:.1f} %)   "
        f"head {_ms(view.head_ns)}   tail {_ms(view.tail_ns)}",
        loc="right", fontsize=10, color=_INK, pad=5,
    )  # fmt: skip


def _transfers(lanes: dict[str, list[Interval]]) -> bool:
    return bool(lanes.get(SEND) or lanes.get(RECEIVE))


def _name_head_and_tail(axis: Any, view: StepView, rank: int, y: float) -> None:
    """The words under a rank's lanes, where its step begins or ends with waiting."""
    waits = view.lanes[rank][WAIT]
    lengths = (view.heads_ns[rank], view.tails_ns[rank])
    for name, length, behind, side in zip(("head", "tail"), lengths, view.behind_ns[rank], ("left", "right"), strict=True):
        if waits and length > 0.004 * view.duration_ns:
            at = waits[0][0] if side == "left" else waits[-1][1]
            late = ""
            if behind > length / 2:
                late = ", " if behind > 0.95 * length else f", {_ms(behind)} of it "
                late += "for a rank that is behind"
            axis.text(
                at / 1e6, y, f"{name} {_ms(length)}{late}", ha=side, va="center", fontsize=9, fontweight="bold",
                color=COLOURS[WAIT],
            )  # fmt: skip


def _draw_saving(axis: Any, view: StepView, reference: StepView) -> None:
    """The time that this variant's step is shorter (or longer) than the reference, where there is room for it."""
    mine, theirs = view.duration_ns / 1e6, reference.duration_ns / 1e6
    axis.axvline(mine, color=_INK, linewidth=1.2, zorder=3)
    if theirs - mine < 0.08 * theirs:
        return
    middle = sum(axis.get_ylim()) / 2
    axis.annotate(
        "", xy=(mine, middle), xytext=(theirs, middle), arrowprops={"arrowstyle": "<->", "color": _INK, "linewidth": 1.2}
    )
    axis.text(
        (mine + theirs) / 2, middle - 0.25, f"{theirs - mine:.0f} ms\nsaved", ha="center", va="bottom", fontsize=10.5,
        fontweight="bold", color=_INK,
    )  # fmt: skip


def _ms(ns: int) -> str:
    value = ns / 1e6
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
