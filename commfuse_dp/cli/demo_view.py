"""What the demo shows: live progress while it trains, and the table at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from commfuse_dp.cli.demo_results import COMMFUSE, COMPUTE_ONLY, FSDP2
from commfuse_dp.cli.demo_settings import DemoSettings

NAMES = {FSDP2: "FSDP2 (stock)", COMMFUSE: "CommFuse", COMPUTE_ONLY: "compute only"}
_RECENT = 8  # steps in a running median
_SPARKS = "▁▂▃▄▅▆▇█"


class Progression:
    """Live progress: a table that renews itself on a terminal, else a line now and then. A context manager."""

    def __init__(self, console: Console, settings: DemoSettings) -> None:
        self.console = console
        self.settings = settings
        self._recent: dict[str, deque[dict[str, Any]]] = {name: deque(maxlen=_RECENT) for name in NAMES}
        self._bar = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(bar_width=36), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._task = self._bar.add_task("starting the ranks", total=2 * settings.steps)
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
            if event["variant"] in (FSDP2, COMMFUSE):
                self._bar.update(self._task, advance=1, description="training")
            if self._live is None and event["step"] % self.settings.block == 0 and event["variant"] != COMPUTE_ONLY:
                cells = self._cells(event["variant"])
                self.console.print(
                    f"{cells[0]:<14} step {cells[1]:>3}  loss {cells[2]}  {cells[3]} tokens/s  {cells[4]} ms a step, "
                    f"{cells[5]} ms exposed communication",
                    highlight=False,
                    soft_wrap=True,
                )

    def _say(self, text: str) -> None:
        self._bar.update(self._task, description=text)
        if self._live is None:
            self.console.print(text)

    def _cells(self, name: str) -> tuple[str, ...]:
        recent = self._recent[name]
        if not recent:
            return (NAMES[name], "-", "-", "-", "-", "-")
        last, wall = recent[-1], median(e["wall_ms"] for e in recent)
        if name == COMPUTE_ONLY:
            return (NAMES[name], str(last["step"]), "", "", f"{wall:.0f}", "")
        tokens = self.settings.tokens / wall * 1e3
        exposed = median(e["exposed_ms"] for e in recent)
        return (NAMES[name], str(last["step"]), f"{last['loss']:.4f}", f"{tokens:.0f}", f"{wall:.0f}", f"{exposed:.1f}")

    def _render(self) -> Group:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for head in ("", "step", "loss", "tokens/s", "ms a step", "exposed ms"):
            table.add_column(head, justify="right" if head else "left")
        for name in NAMES:
            table.add_row(*self._cells(name))
        return Group(self._bar, table)


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
        f"differ by {summary['loss_max_abs_diff']:.0e} at most in {summary['steps_compared']} steps",
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
    row(
        "bytes into a rank", _mib(moved[FSDP2]), _mib(moved[COMMFUSE]),
        f"a step; textbook minimum {_mib(minimum)}",
    )  # fmt: skip
    peak = summary["peak_unsharded_bytes"]
    in_place = "peers' memory is read in place" if summary["transport"] == "shm" else "peak held by a rank"
    row("unsharded weights", _mib(peak[FSDP2]), _mib(peak[COMMFUSE]), in_place)
    return table


def _curve_ends(losses: Sequence[float]) -> str:
    return f"{losses[0]:.3f} → {losses[-1]:.3f}"


def _exposed(exposed: float | None, step: float) -> str:
    return "not measured" if exposed is None else f"{exposed:.1f} ms ({100 * exposed / step:.1f} %)"


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
