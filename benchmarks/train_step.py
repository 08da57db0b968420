"""Training steps of CommFuse and stock PyTorch, alternating in the same processes, on one host or over a shaped link.

    python benchmarks/train_step.py                                     one host, all variants
    python benchmarks/train_step.py --link none,4gbit,2gbit,1gbit       one table per link, and a picture over link speeds
    python benchmarks/train_step.py --link 1.5x                         link on which minimum communication = 1.5 x compute
    python benchmarks/train_step.py --suite issue                       the cases that the project's targets are stated for

Links need root and iproute2. Namespaces and ranks are removed also on Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import re
import shlex
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make `benchmarks` importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import picture, report
from benchmarks.case import DEEPSPEED, VARIANTS, BenchmarkError, Case, minimum_bytes
from benchmarks.launch import run_case
from benchmarks.models import MODELS
from commfuse_dp.cli import netns
from commfuse_dp.errors import CommFuseError, ConfigError

Say = Callable[[str], None]
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Plan:
    """One case of a run: `link` is 'none', a rate, or '<number>x' (minimum communication = number x compute)."""

    link: str
    keep: bool = False
    variants: tuple[str, ...] = ()  # () = those asked for

    @property
    def relative(self) -> float | None:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)x", self.link)
        return float(match[1]) if match else None


SUITES = {
    "issue": (
        Plan("none"),
        Plan("1.5x"),
        Plan("1x"),
        Plan("0.5x"),
        Plan("1gbit", keep=True, variants=("compute", "fsdp2", "fsdp2-best", "ddp", "commfuse")),
    ),
    "deepspeed": (
        Plan("none", variants=("compute", "zero3", "zero3-commfuse")),
        Plan("1.5x", variants=("compute", "zero3", "zero3-commfuse")),
        Plan("1x", variants=("compute", "zero3", "zero3-commfuse")),
        *(
            Plan(link, keep=True, variants=("compute", stage, f"{stage}-commfuse", f"{stage}-commfuse-deferred"))
            for link in ("1.5x", "1x")
            for stage in ("zero1", "zero2")
        ),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    say = _say if not arguments.quiet else (lambda text: None)
    command = shlex.join(["python", "benchmarks/train_step.py", *(sys.argv[1:] if argv is None else argv)])
    try:
        with _terminate_cleanly():
            record = run(arguments, command, say)
    except (BenchmarkError, CommFuseError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: ranks and namespaces are removed, nothing is stored", file=sys.stderr)
        return 130
    print(report.markdown(record))
    return 0


def run(arguments: argparse.Namespace, command: str, say: Say) -> dict[str, Any]:
    """All cases of the run; stores the record after every case, so that an interrupted suite keeps what it has."""
    base = _case(arguments)
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "conditions": report.conditions(command),
        "settings": asdict(base),
        "cases": [],
        "picture": None,
    }
    target = _target(arguments, record)
    calibration: Calibration | None = None
    for plan in _plans(arguments):
        case = replace(base, keep=plan.keep, variants=plan.variants or base.variants)
        rate = None if plan.link == "none" else plan.link
        if plan.relative is not None:
            if calibration is None:
                say("measuring compute alone, to choose link rates")
                calibration = _calibrate(base, arguments, say)
            rate = calibration.rate(plan.relative, case)
        title = _title(plan, rate)
        say(f"== {title}")
        record["cases"].append({"title": title, "keep": plan.keep, **_measure(case, rate, arguments, say)})
        _store(record, target)
    if target is not None:
        say(f"stored {target}.json and .md" + (" and .png" if record["picture"] else ""))
    return record


def _measure(case: Case, rate: str | None, arguments: argparse.Namespace, say: Say) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        world = goodput = link = None
        if rate is not None:
            world = stack.enter_context(netns.shaped_world(case.world_size, rate, mtu=arguments.mtu, burst=arguments.burst))
            link = {"rate_gbit": (world.rate or 0) / 1e9, "mtu": world.mtu, "burst": world.burst}
            goodput = world.measure_rate()
            say(f"measured goodput {goodput * 8 / 1e9:.3f} Gbit/s, both ways at once")
        result = run_case(case, world, timeout_s=arguments.timeout, say=say)
        if world is not None and goodput is not None:
            goodput = max(goodput, world.measure_rate())  # a disturbed measurement would flatter every variant
    return {"link": link, "summary": report.summarize(result, steps=case.steps, link_bytes_per_s=goodput)}


@dataclass(frozen=True)
class Calibration:
    """What relative link rates are computed from."""

    compute_s: float
    layer_bytes: int
    root_bytes: int

    def rate(self, factor: float, case: Case) -> str:
        """The link on which the minimum communication of `case` takes factor x compute."""
        least = minimum_bytes(self.layer_bytes, self.root_bytes, case.world_size, keep=case.keep)
        return f"{round(8 * least / (factor * self.compute_s))}bit"


def _calibrate(base: Case, arguments: argparse.Namespace, say: Say) -> Calibration:
    case = replace(base, variants=("compute",), rounds=max(3, base.rounds))
    result = run_case(case, None, timeout_s=arguments.timeout, say=say)
    compute_s = statistics.median(report.step_seconds(result.variants[0], case.steps))
    return Calibration(compute_s, result.layer_bytes, result.root_bytes)


def _title(plan: Plan, rate: str | None) -> str:
    if rate is None:
        title = "one host, no link"
    else:
        bits = netns.parse_rate(rate)
        assert bits is not None
        title = f"link {bits / 1e9:.3g} Gbit/s"
    if plan.relative is not None:
        title += f" (minimum communication = {plan.relative:g} x compute)"
    return title + (", parameters kept after forward" if plan.keep else "")


# ---- storing ---------------------------------------------------------------------------------------------------------
def _target(arguments: argparse.Namespace, record: dict[str, Any]) -> Path | None:
    """Path without suffix: --json names it; --save and --suite put it into results/ as date_theme_device."""
    if arguments.json is not None:
        return arguments.json.with_suffix("")
    if not (arguments.save or arguments.suite):
        return None
    words = re.sub(r"[^a-z0-9]+", "-", record["conditions"]["device"].lower()).strip("-")
    device = f"{words}-{record['conditions']['cores']}c"
    theme = arguments.theme or f"train-step-{arguments.suite or arguments.model}-n{arguments.world_size}"
    return RESULTS / f"{record['date'][:10]}_{theme}_{device}"


def _store(record: dict[str, Any], target: Path | None) -> None:
    if target is None:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    png = target.parent / f"{target.name}.png"
    try:
        record["picture"] = png.name if picture.draw(record["cases"], png) else None
    except ImportError:
        _say("no picture: matplotlib is not installed (pip install 'commfuse_dp[plot]')")
    (target.parent / f"{target.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (target.parent / f"{target.name}.md").write_text(report.markdown(record))


# ---- command line ----------------------------------------------------------------------------------------------------
def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--link", default="none", help="comma-separated: none, a rate (1gbit, 800mbit), or 1.5x (see above)")
    parser.add_argument("--suite", choices=sorted(SUITES), help="a fixed list of cases instead of --link, stored in results/")
    parser.add_argument(
        "--variants",
        default=",".join(VARIANTS),
        help=f"comma-separated, of: {', '.join(VARIANTS + DEEPSPEED)} (default: the first {len(VARIANTS)})",
    )
    parser.add_argument("--steps", type=int, default=3, help="steps of a timed block (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed blocks of every variant (%(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps of every variant (%(default)s)")
    parser.add_argument("--search-rounds", type=int, default=2, help="timed steps of each stock setting tried (%(default)s)")
    parser.add_argument("--model", choices=MODELS, default="linears")
    parser.add_argument("--tokens", type=int, default=512, help="per rank and step (%(default)s)")
    parser.add_argument(
        "--optimizer", choices=("fused", "default"), default="fused", help="AdamW's implementation, for all variants"
    )
    parser.add_argument(
        "--keep", action="store_true", help="parameters stay gathered after forward (reshard_after_forward=False)"
    )
    parser.add_argument("--transport", choices=("auto", "shm", "tcp", "p2p"), default="auto", help="CommFuse's transport")
    parser.add_argument("--order", choices=("pairwise", "ring"), default="pairwise", help="CommFuse's order")
    parser.add_argument("--prefetch-bytes", type=int, help="CommFuse's window (its default)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mtu", type=int, default=netns.DEFAULT_MTU, help="of the shaped link, bytes (%(default)s)")
    parser.add_argument(
        "--burst", type=int, default=netns.DEFAULT_BURST, help="of the shaped link's bucket, bytes (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="store FILE, and .md (and .png for several links) beside it")
    parser.add_argument("--save", action="store_true", help="store in benchmarks/results/ as date_theme_device")
    parser.add_argument("--theme", help="name in the stored file's name")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that one case may take (%(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    arguments = parser.parse_args(argv)
    for name in ("world_size", "steps", "rounds", "search_rounds", "tokens"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(arguments, name)}")
    if arguments.warmup < 1:
        parser.error("--warmup must be at least 1: first steps allocate, and CommFuse records the order of layers in its first")
    return arguments


def _case(arguments: argparse.Namespace) -> Case:
    variants = tuple(name for name in arguments.variants.split(",") if name)
    unknown = [name for name in variants if name not in VARIANTS + DEEPSPEED]
    if unknown or not variants or len(set(variants)) < len(variants):
        raise ConfigError(f"--variants {arguments.variants!r}: give each at most once, of {', '.join(VARIANTS + DEEPSPEED)}.")
    shared = {name: getattr(arguments, name) for name in Case.__dataclass_fields__ if hasattr(arguments, name)}
    return Case(**{**shared, "variants": variants})


def _plans(arguments: argparse.Namespace) -> list[Plan]:
    """Raises ConfigError for a bad link before anything is started, and LinkError if links cannot be made here."""
    if arguments.suite:
        plans = list(SUITES[arguments.suite])
    else:
        plans = [Plan(link.strip().lower(), keep=arguments.keep) for link in arguments.link.split(",") if link.strip()]
    for plan in plans:
        if plan.relative is None:
            netns.parse_rate(plan.link)
        elif plan.relative <= 0 or arguments.world_size < 2:
            raise ConfigError(f"--link {plan.link}: needs a factor above 0 and at least two ranks.")
    if any(plan.link != "none" for plan in plans):
        netns.check_requirements()
    return plans


@contextlib.contextmanager
def _terminate_cleanly() -> Iterator[None]:
    """SIGTERM ends the run like Ctrl-C does: ranks and namespaces are removed on the way out."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
