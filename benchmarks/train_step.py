"""Training steps of CommFuse and stock PyTorch, alternating in the same processes, on one host or over a shaped link.

    python benchmarks/train_step.py                                     one host, all variants
    python benchmarks/train_step.py --link none,4gbit,2gbit,1gbit       one table per link, and a picture over link speeds
    python benchmarks/train_step.py --link 1.5x                         link on which minimum communication = 1.5 x compute
    python benchmarks/train_step.py --suite issue                       the cases that the project's targets are stated for
    python benchmarks/train_step.py --sleep 40 --world-size 4 --link 1x      compute sleeps: more ranks than cores
    torchrun --nproc-per-node 8 benchmarks/train_step.py --device cuda --model llama3-8b --peak-tflops 989

Links need root and iproute2. Namespaces and ranks are removed also on Ctrl-C. `--sleep GFLOPS`: products take the time of a
device of that speed, and no core (sleeping.py); losses then say nothing.

Under torchrun every process is one rank: nothing is launched, there are no links, rank 0 prints and stores. The variants are
then fsdp2, fsdp2-symm (NCCL's symmetric memory), fsdp2-rs-group (a communicator of its own for reduce-scatter) and commfuse;
the llama3 models train in bf16 with gradients reduced in fp32. What cannot run is left out with its reason. The same code runs
in the tests on CPUs (--device cpu --model llama3-tiny); not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make `benchmarks` importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import job as torchrun
from benchmarks import picture, report
from benchmarks.case import DEEPSPEED, FLAT, JOB_VARIANTS, SEPARATE, VARIANTS, BenchmarkError, Case, minimum_bytes
from benchmarks.launch import run_case
from benchmarks.models import MODELS
from benchmarks.models_llama import SHAPES
from commfuse_dp.errors import CommFuseError, ConfigError
from commfuse_dp.launch import netns
from commfuse_dp.launch.signals import terminate_as_exit

Say = Callable[[str], None]
KNOWN = (*VARIANTS, FLAT, *SEPARATE, *DEEPSPEED)
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
    command = shlex.join(["benchmarks/train_step.py", *(sys.argv[1:] if argv is None else argv)])
    job = None
    try:
        job = torchrun.job_of(os.environ)
        with terminate_as_exit():
            record = (
                run(arguments, f"python {command}", say)
                if job is None
                else run_job(arguments, job, f"torchrun --nproc-per-node ... {command}", say)
            )
    except (BenchmarkError, CommFuseError) as error:
        if job is None or job.rank == 0 or not isinstance(error, ConfigError):  # every rank finds the same wrong arguments
            print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: ranks and namespaces are removed, nothing is stored", file=sys.stderr)
        return 130
    if record is not None:
        print(report.markdown(record))
    return 0


def run(arguments: argparse.Namespace, command: str, say: Say) -> dict[str, Any]:
    """All cases of the run; stores the record after every case, so that an interrupted suite keeps what it has."""
    base = _case(arguments)
    record = _record(base, command)
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


def run_job(arguments: argparse.Namespace, job: torchrun.Job, command: str, say: Say) -> dict[str, Any] | None:
    """This process as one rank of a job; the record on rank 0, stored if asked for."""
    case = _case(arguments, job)
    torchrun.check(case, job, link=arguments.link, suite=arguments.suite, world_size=arguments.world_size)
    apart = None if arguments.apart is None else tuple(name for name in arguments.apart.split(",") if name)
    cases = torchrun.run(case, job, apart, say)
    if job.rank != 0:
        return None
    record = _record(case, command)
    record["cases"] = cases
    devices = cases[0]["job"]["devices"]
    if devices:
        record["conditions"]["accelerators"] = f"{case.world_size} x {' and '.join(devices)}"
    target = _target(arguments, record)
    _store(record, target)
    if target is not None:
        say(f"stored {target}.json and .md")
    return record


def _record(case: Case, command: str) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "conditions": report.conditions(command),
        "settings": asdict(case),
        "cases": [],
        "picture": None,
    }


def _measure(case: Case, rate: str | None, arguments: argparse.Namespace, say: Say) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        world = goodput = link = None
        if rate is not None:
            hosts = case.world_size // case.ranks_per_host
            shape = {name: getattr(arguments, name) for name in ("mtu", "burst", "congestion")}
            world = stack.enter_context(netns.shaped_world(hosts, rate, **shape))
            link = {
                "rate_gbit": (world.rate or 0) / 1e9,
                "mtu": world.mtu,
                "burst": world.burst,
                "congestion": world.congestion,
                "ranks_per_host": case.ranks_per_host,
            }
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
        least = minimum_bytes(
            self.layer_bytes, self.root_bytes, case.world_size, keep=case.keep, ranks_per_host=case.ranks_per_host
        )
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
    about = record["conditions"]
    device = _words(about["accelerators"]) if "accelerators" in about else f"{_words(about['device'])}-{about['cores']}c"
    theme = arguments.theme or f"train-step-{arguments.suite or arguments.model}-n{record['settings']['world_size']}"
    return RESULTS / f"{record['date'][:10]}_{theme}_{device}"


def _words(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _store(record: dict[str, Any], target: Path | None) -> None:
    if target is None:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    png = target.parent / f"{target.name}.png"
    try:  # a job's cases are parts of one
        record["picture"] = png.name if "job" not in record["cases"][0] and picture.draw(record["cases"], png) else None
    except ImportError:
        _say("no picture: matplotlib is not installed (pip install 'commfuse_dp[plot]')")
    (target.parent / f"{target.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (target.parent / f"{target.name}.md").write_text(report.markdown(record))


# ---- command line ----------------------------------------------------------------------------------------------------
def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--world-size", type=int, help="ranks to launch (2); torchrun has its own")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="that share a link, for --link with a rate (%(default)s)")
    parser.add_argument("--link", default="none", help="comma-separated: none, a rate (1gbit, 800mbit), or 1.5x (see above)")
    parser.add_argument("--suite", choices=sorted(SUITES), help="a fixed list of cases instead of --link, stored in results/")
    parser.add_argument(
        "--variants",
        help=f"comma-separated, of: {', '.join(KNOWN)} (default: the first {len(VARIANTS)}; under torchrun "
        f"{', '.join(JOB_VARIANTS)})",
    )
    parser.add_argument("--steps", type=int, default=3, help="steps of a timed block (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed blocks of every variant (%(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps of every variant (%(default)s)")
    parser.add_argument(
        "--search-rounds", type=int, default=2, help="timed steps of each stock setting (%(default)s); 0: untried"
    )
    parser.add_argument("--model", choices=MODELS, default="linears")
    parser.add_argument("--tokens", type=int, help="per rank and step (512); llama3: --sequence x --batch")
    parser.add_argument("--sequence", type=int, help="llama3: tokens of a sequence (8192; tiny: 32)")
    parser.add_argument("--batch", type=int, help="llama3: sequences per rank and step (1)")
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="llama3: bf16 with gradients reduced in fp32 (default)")
    parser.add_argument(
        "--checkpoint-activations", action="store_true", help="llama3: layers compute their activations anew in backward"
    )
    parser.add_argument(
        "--optimizer", choices=("fused", "default"), default="fused", help="AdamW's implementation, for all variants"
    )
    parser.add_argument(
        "--keep", action="store_true", help="parameters stay gathered after forward (reshard_after_forward=False)"
    )
    parser.add_argument(
        "--transport", choices=("auto", "shm", "tcp", "symmetric", "p2p"), default="auto", help="CommFuse's transport"
    )
    parser.add_argument(
        "--order", choices=("auto", "pairwise", "ring", "hierarchical"), default="auto", help="CommFuse's order"
    )
    parser.add_argument("--kernels", choices=("auto", "triton", "blas"), default="auto", help="CommFuse's GEMMs on GPUs")
    parser.add_argument("--prefetch-bytes", type=int, help="CommFuse's window (its default; llama3: two layers)")
    parser.add_argument(
        "--schedule",
        choices=("auto", "alternating", "one-by-one"),
        default="auto",
        help="variants' blocks alternate, or they are built, timed and freed one by one (auto: if not all fit together)",
    )
    parser.add_argument(
        "--apart",
        help="torchrun: variants in processes of their own, each beside fsdp2 (fsdp2-symm, where commfuse may use symmetric "
        "memory: torch allows one backend of it in a process)",
    )
    parser.add_argument("--peak-tflops", type=float, help="llama3: of one device, to report the model FLOPs utilisation")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: under torchrun only")
    parser.add_argument("--sleep", dest="sleep_gflops", type=float, metavar="GFLOPS", help="sleep in place of computing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mtu", type=int, default=netns.DEFAULT_MTU, help="of the shaped link, bytes (%(default)s)")
    parser.add_argument(
        "--burst", type=int, default=netns.DEFAULT_BURST, help="of the shaped link's bucket, bytes (%(default)s)"
    )
    parser.add_argument("--congestion", help="TCP's congestion control on the link, e.g. bbr (default: cubic, or reno)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="store FILE, and .md (and .png for several links) beside it")
    parser.add_argument("--save", action="store_true", help="store in benchmarks/results/ as date_theme_device")
    parser.add_argument("--theme", help="name in the stored file's name")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that one case may take (%(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    arguments = parser.parse_args(argv)
    for name in ("world_size", "ranks_per_host", "steps", "rounds", "search_rounds", "tokens", "sequence", "batch"):
        value = getattr(arguments, name)
        least = 0 if name == "search_rounds" else 1
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    if arguments.warmup < 1:
        parser.error("--warmup must be at least 1: first steps allocate, and CommFuse records the order of layers in its first")
    return arguments


def _case(arguments: argparse.Namespace, job: torchrun.Job | None = None) -> Case:
    """Raises ConfigError for settings that do not go together."""
    names = arguments.variants
    if names is None:
        names = ",".join(VARIANTS if job is None else JOB_VARIANTS)
    variants = tuple(name for name in names.split(",") if name)
    unknown = [name for name in variants if name not in KNOWN]
    if unknown or not variants or len(set(variants)) < len(variants):
        raise ConfigError(f"--variants {names!r}: give each at most once, of {', '.join(KNOWN)}.")
    if job is None and arguments.device == "cuda":
        raise ConfigError(
            "--device cuda needs one process per GPU: start with `torchrun --nproc-per-node <GPUs> benchmarks/train_step.py "
            "--device cuda ...`."
        )
    if (arguments.world_size or 2) % arguments.ranks_per_host:
        raise ConfigError(f"--ranks-per-host {arguments.ranks_per_host}: must divide --world-size {arguments.world_size or 2}.")
    if arguments.sleep_gflops is not None and (arguments.sleep_gflops <= 0 or job is not None):
        raise ConfigError(f"--sleep {arguments.sleep_gflops:g}: must be above 0, and torchrun's ranks compute.")
    if job is None and arguments.apart is not None:
        raise ConfigError("--apart is for torchrun: without it all variants live in the ranks that are launched.")
    shared = {name: getattr(arguments, name) for name in Case.__dataclass_fields__ if hasattr(arguments, name)}
    shared |= {"variants": variants, "job": job is not None}
    shared["world_size"] = job.world_size if job is not None else arguments.world_size or 2
    if arguments.device == "cuda":
        shared["deadline_s"] = 600.0  # kernels are compiled and chosen in the first steps
    return Case(**{**shared, **_sizes(arguments, variants)})


def _sizes(arguments: argparse.Namespace, variants: Sequence[str]) -> dict[str, Any]:
    """Tokens and precision: what the llama3 models take, and what the others take."""
    if arguments.model not in SHAPES:
        for name in ("sequence", "batch", "precision", "checkpoint_activations", "peak_tflops"):
            if getattr(arguments, name):
                raise ConfigError(
                    f"--{name.replace('_', '-')} is for {', '.join(SHAPES)}; --model {arguments.model} takes --tokens."
                )
        return {"tokens": arguments.tokens or 512, "sequence": 0, "batch": 0, "precision": "fp32"}
    if arguments.tokens is not None:
        raise ConfigError(f"--tokens {arguments.tokens}: --model {arguments.model} takes --sequence and --batch.")
    stages = [name for name in variants if name in DEEPSPEED]
    if stages:
        raise ConfigError(f"--variants {','.join(stages)}: DeepSpeed is timed with --model linears and gpt.")
    if arguments.model == "llama3-8b" and arguments.device == "cpu":
        raise ConfigError("--model llama3-8b needs --device cuda; llama3-tiny is the same code in small.")
    if arguments.peak_tflops is not None and not arguments.peak_tflops > 0:
        raise ConfigError(f"--peak-tflops {arguments.peak_tflops:g}: must be above 0 (H100 SXM, bf16, dense: 989).")
    sequence, batch = arguments.sequence or SHAPES[arguments.model].sequence, arguments.batch or 1
    return {"tokens": sequence * batch, "sequence": sequence, "batch": batch, "precision": arguments.precision or "bf16"}


def _plans(arguments: argparse.Namespace) -> list[Plan]:
    """Raises ConfigError for a bad link before anything is started, and LinkError if links cannot be made here."""
    if arguments.suite:
        plans = list(SUITES[arguments.suite])
    else:
        plans = [Plan(link.strip().lower(), keep=arguments.keep) for link in arguments.link.split(",") if link.strip()]
    for plan in plans:
        if plan.relative is None:
            netns.parse_rate(plan.link)
        elif plan.relative <= 0 or arguments.world_size == 1:
            raise ConfigError(f"--link {plan.link}: needs a factor above 0 and at least two ranks.")
    if any(plan.link != "none" for plan in plans):
        netns.check_requirements()
    return plans


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
