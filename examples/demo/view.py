"""What the demo shows: live progress while it trains, and the table at the end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from types import TracebackType
from typing import Any

from commfuse_dp.examples.demo.results import COMMFUSE, COMPUTE_ONLY, FSDP2
from commfuse_dp.examples.demo.settings import DemoSettings
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

NAMES = {FSDP2: "FSDP2 (stock)", COMMFUSE: "CommFuse", COMPUTE_ONLY: "compute only"}
_RECENT = 8  # steps in a running median
_SILENCE_S = 20.0  # a log in which nothing happens for longer makes its reader think that it hangs
_SPARKS = "▁▂▃▄▅▆▇█"


class Progression:
    """Live progress: a table that renews itself on a terminal, else a line per turn. A context manager."""

    def __init__(self, console: Console, settings: DemoSettings) -> None:
        self.console = console
        self.settings = settings
        self._recent: dict[str, deque[dict[str, Any]]] = {name: deque(maxlen=_RECENT) for name in NAMES}
        self._losses: dict[str, list[float]] = {name: [] for name in NAMES}
        self._headed = False
        self._silent_since = time.monotonic()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("step {task.completed:.0f} of {task.total:.0f}"),
            TextColumn("{task.fields[elapsed]}"),  # rich's own column stops with the last step, before recording
            TextColumn(f"of at most {_minutes(settings.budget_s)}", style="dim"),
        )
        self._task = self._bar.add_task("starting the ranks", total=settings.steps, elapsed="0:00")
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render) if console.is_terminal else None

    def __enter__(self) -> Progression:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def take(self, event: dict[str, Any]) -> None:
        if event["event"] == "stage":
            self._say(event["text"])
        elif event["event"] == "step":
            self._recent[event["variant"]].append(event)
            self._losses[event["variant"]].append(event["loss"])
            both = min(len(self._losses[FSDP2]), len(self._losses[COMMFUSE]))
            self._bar.update(self._task, completed=both, description="training")
            if self._live is None and time.monotonic() > self._silent_since + _SILENCE_S:
                self._say(f"{NAMES[event['variant']]}: step {event['step']} trained")
        elif event["event"] == "turn" and self._live is None:
            self._log(event["steps"])

    def _say(self, text: str) -> None:
        self._bar.update(self._task, description=text)
        if self._live is None:
            self._print(f"{self._elapsed()}  {text}")

    def _print(self, line: str) -> None:
        self._silent_since = time.monotonic()
        self.console.print(line, highlight=False, soft_wrap=True)

    def _elapsed(self) -> str:
        return f"{_minutes(time.monotonic() - self.settings.started_at_s):>5}"

    def _log(self, done: int) -> None:
        """One line for the turn that has ended; before the first one the heads of its columns."""
        both = [NAMES[name] for name in (FSDP2, COMMFUSE)]
        if not self._headed:
            self._headed = True
            columns = f"{'loss':>7} {'tokens/s':>8} {'ms/step':>8} {'exposed':>8}"
            for line in (
                f"{'':14} | {both[0]:<34} | {both[1]:<34} | {NAMES[COMPUTE_ONLY]}",
                f" time  step    | {columns} | {columns} | {'ms/step':>7}",
            ):
                self._print(line)
        cells = {name: self._cells(name) for name in NAMES}
        pair = " | ".join(f"{c[0]:>7} {c[1]:>8} {c[2]:>8} {c[3]:>8}" for c in (cells[FSDP2], cells[COMMFUSE]))
        line = f"{self._elapsed()}  {done:>3}/{self.settings.steps:<3} | {pair} | {cells[COMPUTE_ONLY][2]:>7}"
        self._print(line)

    def _cells(self, name: str) -> tuple[str, str, str, str]:
        """Loss, tokens a second, ms a step, exposed ms: the last loss, else medians of the last steps."""
        recent = self._recent[name]
        if not recent:
            return ("-", "-", "-", "-")
        wall = median(e["wall_ms"] for e in recent)
        if name == COMPUTE_ONLY:  # its ranks train apart: a loss of its own, of no interest
            return ("", "", f"{wall:.0f}", "")
        tokens = self.settings.tokens / wall * 1e3
        exposed = median(e["exposed_ms"] for e in recent)
        return (f"{recent[-1]['loss']:.4f}", f"{tokens:.0f}", f"{wall:.0f}", f"{exposed:.0f}")

    def _render(self) -> Group:
        self._bar.update(self._task, elapsed=self._elapsed().strip())
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for head in ("", "loss", "tokens/s", "ms/step", "exposed ms"):
            table.add_column(head, justify="right" if head else "left", min_width=8)
        table.add_column("loss so far", min_width=16)
        for name in NAMES:
            curve = "" if name == COMPUTE_ONLY else sparkline(self._losses[name])
            table.add_row(NAMES[name], *self._cells(name), curve)
        return Group(self._bar, table)


def _minutes(seconds: float) -> str:
    return f"{max(0, round(seconds)) // 60}:{max(0, round(seconds)) % 60:02d}"


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """The curve in one line of text, at most `width` characters."""
    if not values:
        return ""
    picked = [values[int(i * (len(values) - 1) / max(1, min(width, len(values)) - 1))] for i in range(min(width, len(values)))]
    low, high = min(picked), max(picked)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] for value in picked)


def result_table(summary: dict[str, Any]) -> Table:
    """The outcome at a glance."""
    step, exposed, moved = summary["step_ms"], summary["exposed_ms"], summary["bytes_per_step"]
    minimum, losses, validation = summary["minimum_bytes_per_step"], summary["losses"], summary["validation_loss"]
    table = Table(box=box.ROUNDED, title_justify="left", show_lines=False)
    table.add_column("")
    for name in (FSDP2, COMMFUSE):
        table.add_column(NAMES[name], justify="right", style="bold" if name == COMMFUSE else "")
    table.add_column("what it means", style="dim")

    def row(label: str, stock: str, fused: str, meaning: str) -> None:
        table.add_row(label, stock, fused, meaning)

    row(
        "training loss", sparkline(losses[FSDP2]), sparkline(losses[COMMFUSE]),
        _difference(summary["loss_max_abs_diff"], summary["steps_compared"]),
    )  # fmt: skip
    row("  first → last", _curve_ends(losses[FSDP2]), _curve_ends(losses[COMMFUSE]), "nats a byte")
    row("validation loss", f"{validation[FSDP2]:.4f}", f"{validation[COMMFUSE]:.4f}", "files never trained on")
    ratio = summary["ratio_fsdp2_over_commfuse"]
    row("time a step", f"{step[FSDP2]:.0f} ms", f"{step[COMMFUSE]:.0f} ms", f"{ratio:.2f} x as fast" if ratio >= 1 else
        f"{1 / ratio:.2f} x slower")  # fmt: skip
    row(
        "  / compute alone", f"{step[FSDP2] / step[COMPUTE_ONLY]:.2f} x", f"{step[COMMFUSE] / step[COMPUTE_ONLY]:.2f} x",
        f"which takes {step[COMPUTE_ONLY]:.0f} ms",
    )  # fmt: skip
    tokens = summary["tokens_per_s"]
    row("tokens a second", f"{tokens[FSDP2]:.0f}", f"{tokens[COMMFUSE]:.0f}", "all ranks together")
    row(
        "exposed comm. a step", _exposed(exposed[FSDP2], step[FSDP2]), _exposed(exposed[COMMFUSE], step[COMMFUSE]),
        "compute blocked on a transfer",
    )  # fmt: skip
    row("bytes into a rank", _mib(moved[FSDP2]), _mib(moved[COMMFUSE]), _against_minimum(moved[COMMFUSE], minimum))
    peak = summary["peak_unsharded_bytes"]
    in_place = "peers' memory is read in place" if summary["transport"] == "shm" else "peak held by a rank"
    row("unsharded weights", _mib(peak[FSDP2]), _mib(peak[COMMFUSE]), in_place)
    return table


def _difference(largest: float, steps: int) -> str:
    return f"differ by {largest:.0e} at most in {steps} steps" if largest else f"equal to the last bit in {steps} steps"


def _against_minimum(moved: float, minimum: float) -> str:
    """CommFuse may stay below it: the slices that the end of forward and the start of backward want are fetched once."""
    if minimum and moved < 0.97 * minimum:
        return f"a step; minimum {_mib(minimum)} if nothing is kept"
    return f"a step; minimum {_mib(minimum)}"


def _curve_ends(losses: Sequence[float]) -> str:
    return f"{losses[0]:.3f} → {losses[-1]:.3f}"


def _exposed(exposed: float | None, step: float) -> str:
    return "not measured" if exposed is None else f"{exposed:.1f} ms ({100 * exposed / step:.1f} %)"


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
