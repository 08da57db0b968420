"""The paper's table (arXiv 2604.24013): tensor-parallel layers over a link, CommFuse beside what it is compared with there.

    python benchmarks/tensor_parallel.py --op mlp --link 0.56x                      forward, as the paper measured
    python benchmarks/tensor_parallel.py --op mlp --link 0.56x --pass both          and backward
    python benchmarks/tensor_parallel.py --op mlp --tokens 2048 --sweep sequence    five lengths of the sequence, 16 : 1
    python benchmarks/tensor_parallel.py --op attention --variants compute,vanilla,commfuse-row,commfuse
    python benchmarks/tensor_parallel.py --op mlp --world-size 4 --sleep 30         more ranks than cores: compute sleeps
    python benchmarks/tensor_parallel.py --op llama --world-size 4 --dp 2 --sleep 15 --link 1.0x
                                                                                    a training step, TP 2 x DP 2
    python benchmarks/tensor_parallel.py --op llama --plan replicated --link 1.0x   without sequence parallelism, TP 2
    python benchmarks/tensor_parallel.py --op llama --plan mixtral --link 1gbit     a Mixtral of transformers, TP 2

`--link 0.56x`: a link on which vanilla's communication takes 0.56 of compute alone, both measured before. All variants
run over one transport (tcp) in one run, alternating; `dtensor` is what a user has today: PyTorch's styles over gloo, whose
reduce-scatter is an all-reduce. fp32, one batch entry. What the variants do: benchmarks/tp/variants.py.

`--sleep GFLOPS`: products and attention take the time of a device of that speed, and no core (benchmarks/sleeping.py).
`--op llama`: unmodified PyTorch (benchmarks/tp/llama.py); `--link 1.0x` is then a link on which the bytes that dtensor sends
take as long as its compute; compute runs in processes of its own.

Exposed is what the compute thread was seen to wait; `over compute` needs no such measurement and holds for dtensor, too.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import re
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make `benchmarks` importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report
from benchmarks.case import BenchmarkError, CaseResult
from benchmarks.launch import run_case
from benchmarks.tp.llama import PLANS
from benchmarks.tp.llama import VARIANTS as LLAMA
from benchmarks.tp.models import OPS, collective_bytes, least_bytes
from benchmarks.tp.worker import TpCase
from commfuse_dp.errors import CommFuseError, ConfigError
from commfuse_dp.launch import netns
from commfuse_dp.launch.ranks import python_module

FORWARD = ("compute", "vanilla", "slicing-2", "slicing-4", "slicing-8", "commfuse", "dtensor")
BOTH = ("compute", "vanilla", "commfuse", "dtensor")
KNOWN = (*FORWARD, "commfuse-row", "commfuse-gathered")
SWEEP = (0.25, 0.5, 1, 2, 4)
RESULTS = Path(__file__).resolve().parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    command = "python " + shlex.join(["benchmarks/tensor_parallel.py", *(sys.argv[1:] if argv is None else argv)])
    try:
        record = run(arguments, command)
    except (BenchmarkError, CommFuseError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: ranks and namespaces are removed, nothing is stored", file=sys.stderr)
        return 130
    print(markdown(record))
    return 0


def run(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    base = _case(arguments)
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "conditions": report.conditions(command),
        "settings": asdict(base),
        "cases": [],
    }
    scales = SWEEP if arguments.sweep == "sequence" else (1,)
    for scale in scales:
        case = replace(base, tokens=int(base.tokens * scale))
        title = f"{case.op}, {case.passes}, {case.tokens} tokens, {case.world_size} ranks, link {arguments.link}"
        _say(f"== {title}")
        rate = _rate(arguments, case)
        record["cases"].append({"title": title, **_measure(case, rate, arguments)})
        _store(record, arguments.json)
    return record


def _rate(arguments: argparse.Namespace, base: TpCase) -> str | None:
    """The link's rate, as netns takes it; None: no link."""
    if arguments.link == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)x", arguments.link)
    if match is None:
        netns.parse_rate(arguments.link)
        return str(arguments.link)
    if float(match[1]) <= 0:
        raise ConfigError(f"--link {arguments.link}: the factor must be above 0.")
    at_once = collective_bytes(base.shape, base.world_size)
    if base.op != "llama" and at_once <= arguments.burst:
        raise ConfigError(
            f"--link {arguments.link}: with {base.tokens} tokens a collective sends {at_once} bytes, which the link's bucket "
            f"of {arguments.burst} takes at once, whatever its rate. Give more --tokens or --width, or less --burst (at least "
            f"{netns.MIN_BURST})."
        )
    _say("measuring compute alone, to choose the link's rate")
    result = _launch(replace(base, variants=("compute",)), None, arguments)
    seconds = statistics.median(report.step_seconds(result.variants[0], base.steps))
    wanted = float(match[1]) * seconds  # of communication
    if base.op == "llama":
        _say("counting what dtensor sends")
        result = _launch(replace(base, variants=("dtensor",), rounds=1), None, arguments)
        summary = report.summarize(result, steps=base.steps, link_bytes_per_s=None)
        return f"{round(8 * summary['variants']['dtensor']['bytes_per_step'] / wanted)}bit"
    rate = 8 * least_bytes(base.op, base.shape, base.world_size, base.passes, "vanilla") / wanted
    _say("measuring vanilla's communication on such a link")  # a link's bucket fills up between two collectives
    with _world(base.world_size, f"{round(rate)}bit", arguments) as world:
        result = _launch(replace(base, variants=("vanilla",), rounds=2), world, arguments)
    summary = report.summarize(result, steps=base.steps, link_bytes_per_s=None)
    return f"{round(rate * summary['variants']['vanilla']['exposed_ms']['p50'] / 1e3 / wanted)}bit"


def _world(world_size: int, rate: str, arguments: argparse.Namespace) -> contextlib.AbstractContextManager[netns.ShapedWorld]:
    return netns.shaped_world(world_size, rate, burst=arguments.burst, congestion=arguments.congestion)


def _measure(case: TpCase, rate: str | None, arguments: argparse.Namespace) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        world = goodput = None
        if rate is not None:
            world = stack.enter_context(_world(case.world_size, rate, arguments))
            goodput = world.measure_rate()
        result = _launch(case, world, arguments)
    summary = report.summarize(result, steps=case.steps, link_bytes_per_s=goodput)
    times = {record.name: report.step_seconds(record, case.steps) for record in result.variants}
    for name, row in summary["variants"].items():
        least = least_bytes(case.op, case.shape, case.world_size, case.passes, name)
        row["least_bytes"] = least
        row["bytes_over_least"] = row["bytes_per_step"] / least if least and row["bytes_per_step"] is not None else None
        for reference in ("compute", "vanilla", "dtensor"):
            if reference in times:
                pairs = zip(times[name], times[reference], strict=True)
                row[f"step_over_{reference}"] = report.spread([own / other for own, other in pairs])
    link = None
    if world is not None:
        link = {"rate_gbit": (world.rate or 0) / 1e9, "burst": world.burst, "congestion": world.congestion}
    return {"link": link, "summary": summary}


def _launch(case: TpCase, world: netns.ShapedWorld | None, arguments: argparse.Namespace) -> CaseResult:
    if case.op == "llama" and "compute" in case.variants and len(case.variants) > 1:
        # DTensor finds a mesh's groups by its ranks and names: in one process the fake ones would serve the others, too.
        apart = [tuple(name for name in case.variants if (name == "compute") is alone) for alone in (True, False)]
        alone, others = (_launch(replace(case, variants=names), world, arguments) for names in apart)
        others.variants[:0] = alone.variants
        return others
    program = python_module("benchmarks.tp.worker")
    return run_case(case, world, timeout_s=arguments.timeout, say=_say, program=program)  # type: ignore[arg-type]


def _store(record: dict[str, Any], target: Path | None) -> None:
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(record, indent=1) + "\n")
        target.with_suffix(".md").write_text(markdown(record))


def markdown(record: dict[str, Any]) -> str:
    about, settings = record["conditions"], record["settings"]
    lines = [
        f"# Tensor parallelism: {record['date']}",
        "",
        f"{about['device']}, {about['cores']} cores; torch {about['torch']}, Python {about['python']}, kernel {about['kernel']}"
        f"; commit {about['commit']}; load average at start {about['load_average_at_start']:.2f}.",
        "",
        f"    {about['command']}",
        "",
        f"Width {settings['width']}, hidden {settings['hidden']}, {settings['heads']} heads, {_more(settings)}fp32, one thread "
        f"a rank, transport {settings['transport']}; {settings['rounds']} rounds of {settings['steps']} passes, variants "
        "alternating in rotated order; the slowest rank's time; p50 (p20-p80). Ratios are paired by round.",
    ]
    reference = "dtensor" if settings["op"] == "llama" else "vanilla"
    for case in record["cases"]:
        summary, link = case["summary"], case["link"]
        lines += ["", f"## {case['title']}", ""]
        if link:
            lines += [
                f"Link {link['rate_gbit']:.3f} Gbit/s, goodput {summary['link_goodput_gbit']:.3f} both ways at once, "
                f"bucket {link['burst'] >> 10} KB, TCP with {link['congestion']}"
                + (f": {summary['wire_ms']:.0f} ms for vanilla's bytes, less a bucket." if summary["wire_ms"] else "."),
                "",
            ]
        lines += [
            f"| variant | ms | over compute | over {reference} | exposed ms | bytes over least | MB sent | ms slept |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for name, row in summary["variants"].items():
            share = row["bytes_over_least"]
            cells = [
                name,
                report.spread_text(row["step_ms"]),
                report.spread_text(row.get("step_over_compute"), 3),
                report.spread_text(row.get(f"step_over_{reference}"), 3),
                report.spread_text(row["exposed_ms"], 1),
                "" if share is None else f"{share:.2f}",
                "" if row["bytes_per_step"] is None else f"{row['bytes_per_step'] / 1e6:.1f}",
                "" if row["notes"].get("slept_ms") is None else f"{row['notes']['slept_ms']:.0f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
        lines += [f"\nWarning: {text}" for text in summary["warnings"]]
    return "\n".join(lines) + "\n"


def _more(settings: dict[str, Any]) -> str:
    parts = []
    if settings["op"] == "llama":
        tp = settings["world_size"] // settings["dp"]
        parts.append(f"{settings['layers']} layers, vocabulary {settings['vocabulary']}, TP {tp} x DP {settings['dp']}")
    if settings["sleep_gflops"]:
        parts.append(
            f"**compute replaced by sleeping** ({settings['sleep_gflops']:g} GFLOP/s; over compute: over what was slept)"
        )
    return "".join(f"{part}, " for part in parts)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=OPS, default="mlp")
    parser.add_argument("--pass", dest="passes", choices=("forward", "both"), default="forward")
    parser.add_argument("--congestion", help="TCP's congestion control on the link, e.g. reno (default: cubic, or reno)")
    parser.add_argument("--burst", type=int, default=netns.DEFAULT_BURST, help="bytes of the link's token bucket (%(default)s)")
    parser.add_argument("--link", default="0.56x", help="none, a rate (1gbit), or <number>x compute (%(default)s)")
    parser.add_argument("--variants", help=f"of {', '.join(KNOWN)} (default: those that fit --pass)")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--sweep", choices=("sequence",), help=f"tokens x {', '.join(map(str, SWEEP))}")
    parser.add_argument("--tokens", type=int, default=1024, help="of the whole sequence (%(default)s)")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dp", type=int, default=1, help="of op llama: data-parallel ranks; the others are tensor parallel")
    parser.add_argument("--layers", type=int, default=2, help="of op llama (%(default)s)")
    parser.add_argument(
        "--plan", choices=PLANS, default="sequence", help="of op llama: with sequence parallelism, or without; a Mixtral"
    )
    parser.add_argument("--vocabulary", type=int, default=2048, help="of op llama (%(default)s)")
    parser.add_argument("--sleep", dest="sleep_gflops", type=float, metavar="GFLOPS", help="sleep in place of computing")
    parser.add_argument("--slices-per-rank", type=int, help="of CommFuse (its own choice)")
    parser.add_argument("--transport", choices=("tcp", "shm"), default="tcp")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="store FILE, and .md beside it")
    parser.add_argument("--timeout", type=float, default=1200.0)
    return parser.parse_args(argv)


def _case(arguments: argparse.Namespace) -> TpCase:
    if arguments.op == "llama":
        arguments.passes = "both"
        _check_llama(arguments)
    elif arguments.dp != 1:
        raise ConfigError(f"--dp {arguments.dp}: only --op llama has data parallelism.")
    elif arguments.plan != PLANS[0]:
        raise ConfigError(f"--plan {arguments.plan}: only --op llama has plans of PyTorch's styles.")
    known = LLAMA if arguments.op == "llama" else KNOWN
    usual = LLAMA if arguments.op == "llama" else FORWARD if arguments.passes == "forward" else BOTH
    if arguments.plan == "mixtral":
        known = usual = ("dtensor", "commfuse")  # transformers' collectives cannot be left out
        if arguments.dp != 1 or arguments.link.endswith("x"):
            raise ConfigError("--plan mixtral: has no --dp, and --link takes a rate, or none: compute alone is not measured.")
    names = arguments.variants or ",".join(usual)
    variants = tuple(name for name in names.split(",") if name)
    if not variants or any(name not in known for name in variants) or len(set(variants)) < len(variants):
        raise ConfigError(f"--variants {names!r}: give each at most once, of {', '.join(known)}.")
    if arguments.passes == "both" and any(name.startswith("slicing") for name in variants):
        raise ConfigError("--pass both: data slicing is measured forward only, as in the paper. Leave it out of --variants.")
    if arguments.sleep_gflops is not None and arguments.sleep_gflops <= 0:
        raise ConfigError(f"--sleep {arguments.sleep_gflops:g}: must be above 0.")
    for name in ("world_size", "tokens", "width", "hidden", "heads", "steps", "rounds", "warmup"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be at least 1.")
    n = arguments.world_size
    for name in ("tokens", "hidden", "heads"):
        if getattr(arguments, name) % (n * (8 if name == "tokens" else 1)):
            raise ConfigError(f"--{name} {getattr(arguments, name)}: must be divisible by the ranks, tokens by 8 x the ranks.")
    if arguments.width % arguments.heads:
        raise ConfigError(f"--width {arguments.width}: must be divisible by --heads {arguments.heads}.")
    if arguments.sweep and arguments.tokens % (32 * n):
        raise ConfigError(f"--tokens {arguments.tokens}: a sweep needs a multiple of {32 * n}.")
    fields = {name: getattr(arguments, name) for name in TpCase.__dataclass_fields__ if hasattr(arguments, name)}
    return TpCase(**{**fields, "variants": variants})


def _check_llama(arguments: argparse.Namespace) -> None:
    n, dp = arguments.world_size, arguments.dp
    if dp < 1 or n % dp or n // dp < 2:
        raise ConfigError(f"--dp {dp}: must divide --world-size {n} and leave two or more ranks to tensor parallelism.")
    if (
        arguments.heads % 2
        or arguments.heads // 2 % (n // dp)
        or arguments.hidden % (n // dp)
        or arguments.vocabulary % (n // dp)
    ):
        raise ConfigError(
            f"--op llama: half of --heads {arguments.heads} (keys and values), --hidden {arguments.hidden} and --vocabulary "
            f"{arguments.vocabulary} must be divisible by the {n // dp} tensor-parallel ranks."
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
