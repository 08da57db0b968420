"""`commfuse demo`: stock FSDP2 and CommFuse train the same model on the same text in one run, in alternating blocks."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from commfuse_dp.examples.demo.corpus import write_corpus
from commfuse_dp.examples.demo.load import NOTABLE_LOAD_CORES, OtherLoad
from commfuse_dp.examples.demo.model import build_model
from commfuse_dp.examples.demo.results import summarise, write_json
from commfuse_dp.examples.demo.settings import SETTINGS_VARIABLE, DemoSettings
from commfuse_dp.examples.demo.view import Progression, result_table
from rich.console import Console

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.errors import CommFuseError, ConfigError
from commfuse_dp.launch.ranks import Line, Ranks, python_module
from commfuse_dp.launch.signals import terminate_as_exit
from commfuse_dp.ports import check_port, free_port

WORKER = "commfuse_dp.examples.demo.worker"
LOOPBACK = "127.0.0.1"
_FEWEST_STEPS = 4  # however short the time: a cold one, a warm one, one with spans, one that looks at the weights
_RANK_BYTES = 700 << 20  # of memory that a rank needs, about: torch, and the unsharded model of the floor with its gradients
SCRATCH = "commfuse-demo-"  # and the owner's pid: prefix of the temporary folder


class Place(NamedTuple):
    """Where the ranks run: what to put before their command, their environment, and the interface that carries the traffic."""

    prefixes: list[list[str]]
    environments: list[dict[str, str]]
    interface: str  # empty: one host, nothing to read


def run_demo(
    *,
    steps: int,
    world_size: int,
    transport: str,
    order: str,
    link: str,
    seed: int,
    device: str,
    out: Path,
    port: int,
    minutes: float,
    console: Console,
    shape: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run all of it; returns the summary, which is also written to out/summary.json.

    `shape` overrides fields of DemoSettings (width, layers, ...). Raises CommFuseError with the reason and the fix.
    """
    started_at_s = time.monotonic()
    config = CommFuseConfig.model_validate({"transport": transport, "order": order})
    link = "" if link.strip().lower() in ("", "none") else link
    _check(config, link, device, world_size, port)
    _prepare(out)
    others = OtherLoad()
    _sweep_scratch()
    with tempfile.TemporaryDirectory(prefix=f"{SCRATCH}{os.getpid()}-") as folder, terminate_as_exit():
        scratch = Path(folder)
        corpus = write_corpus(scratch)
        console.print(
            f"text: {corpus.train_bytes / 1e6:.1f} MB of Python source for training ({corpus.train_files} files), "
            f"{corpus.validation_bytes / 1e6:.1f} MB held out ({corpus.validation_files} files), from {corpus.root}",
            soft_wrap=True,
        )
        settings = DemoSettings(
            corpus=folder,
            result=folder,
            steps=steps,
            block=min(4, steps),
            world_size=world_size,
            transport=transport,
            order=order,
            device=device,
            seed=seed,
            threads=max(1, (os.cpu_count() or 1) // world_size),
            started_at_s=started_at_s,
            budget_s=minutes * 60,
            link=link or "none",
            **(shape or {}),
        )
        _check_link_time(settings)
        with _place(world_size, link, port) as place:
            settings = replace(settings, interface=place.interface)
            ready = _watch(settings, place, console)
        raw = json.loads((scratch / "raw.json").read_text())
        summary = summarise(raw, ready, settings, corpus)
        summary["other_load_cores"] = others.cores()
        for name in ("timeline.png", "trace.json"):
            _move(scratch / name, out / name)
    write_json(out / "summary.json", summary)
    _conclude(summary, out, console)
    return summary


def _check(config: CommFuseConfig, link: str, device: str, world_size: int, port: int) -> None:
    if link:
        from commfuse_dp.launch.netns import check_requirements, parse_rate

        parse_rate(link)
        check_requirements()
        if config.transport == "shm":
            raise ConfigError(
                f"transport='shm' with link={link!r}: ranks across a link share no memory. Use --transport auto, tcp or p2p."
            )
        if world_size < 2:
            raise ConfigError(f"world_size={world_size} with link={link!r}: a link needs at least 2 ranks.")
    if device == "cuda":
        import torch

        if torch.cuda.device_count() < world_size:
            raise ConfigError(
                f"device='cuda' with world_size={world_size}: {torch.cuda.device_count()} GPUs are visible, one a rank is "
                "needed. Lower --world-size or use --device cpu."
            )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device == "cpu" and world_size * _RANK_BYTES > memory:
        raise ConfigError(
            f"world_size={world_size}: the ranks need about {world_size * _RANK_BYTES / 2**30:.0f} GiB of memory, this machine "
            f"has {memory / 2**30:.0f} GiB. Lower --world-size."
        )
    if port and not link:
        check_port(port)


def _check_link_time(settings: DemoSettings) -> None:
    """Raises ConfigError if the link is so slow that even the least number of steps takes longer than the whole run may."""
    if settings.link == "none":
        return
    from commfuse_dp.launch.netns import parse_rate

    bits = parse_rate(settings.link)
    assert bits is not None
    with torch.device("meta"):
        nbytes = sum(p.nbytes for p in build_model(settings).parameters())
    # Stock FSDP2 on gloo receives the shards of the others four times a step, CommFuse three times.
    once_s = nbytes * (settings.world_size - 1) / settings.world_size * 8 / bits
    seconds = (4 + 3) * once_s * (_FEWEST_STEPS)
    if seconds > settings.budget_s:
        raise ConfigError(
            f"link {settings.link!r}: the transfers of the fewest steps that can be compared take {seconds / 60:.1f} minutes, "
            f"but the whole run is to take {settings.budget_s / 60:g}. Use a faster link, or --minutes "
            f"{math.ceil(seconds / 60) + 2}."
        )


def _prepare(out: Path) -> None:
    """What would otherwise fail after minutes of training."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(
            f"the results cannot be written to {out} ({error.strerror}). Name a folder that can be with --out."
        ) from None
    if importlib.util.find_spec("matplotlib") is None:
        raise CommFuseError(
            "the demo draws its timeline with matplotlib, which is not installed: pip install 'commfuse_dp[plot]'"
        )


def _sweep_scratch() -> None:
    """Remove the temporary folders of runs that were killed: a killed process cannot do it."""
    for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*-*"):
        owner = folder.name[len(SCRATCH) :].partition("-")[0]
        try:
            os.kill(int(owner), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (ValueError, OSError):
            continue


@contextlib.contextmanager
def _place(world_size: int, link: str, port: int) -> Iterator[Place]:
    if link:
        from commfuse_dp.launch.netns import shaped_world

        with shaped_world(world_size, link) as world:
            own = {"MASTER_PORT": str(port or 29400)}  # every namespace has all ports to itself
            ranks = range(world_size)
            yield Place(
                [world.command_prefix(rank) for rank in ranks],
                [{**world.environment(rank), **own} for rank in ranks],
                world.interface(0),
            )
        return
    common = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port or free_port())}
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        common["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the host's name resolves to
    yield Place([[] for _ in range(world_size)], [common] * world_size, "")


def _watch(settings: DemoSettings, place: Place, console: Console) -> dict[str, Any]:
    """Start the ranks and show their progress until all have ended well; returns the event of readiness."""
    ready: dict[str, Any] = {}
    own = {
        SETTINGS_VARIABLE: settings.to_json(),
        "WORLD_SIZE": str(settings.world_size),
        "OMP_NUM_THREADS": str(settings.threads),
    }
    environments = [{**place.environments[rank], **own, "RANK": str(rank)} for rank in range(settings.world_size)]
    commands = [[*prefix, *python_module(WORKER)] for prefix in place.prefixes]
    with Ranks(commands, environments) as ranks, Progression(console, settings) as progress:
        for line in ranks.lines():
            event = _event(line)
            if event is None:
                console.print(f"rank {line.rank}: {line.text}", markup=False, soft_wrap=True)
            elif event["event"] == "ready":
                ready = event
                console.print(
                    f"model: {event['parameters'] / 1e6:.1f} M parameters on {settings.world_size} ranks; "
                    f"transport {event['transport']} ({event['transport_reason']})",
                    soft_wrap=True,
                )
            else:
                progress.take(event)
    if not ready:
        raise CommFuseError("the ranks ended without having trained.")
    return ready


def _event(line: Line) -> dict[str, Any] | None:
    if line.rank != 0 or not line.text.startswith('{"event":'):
        return None
    try:
        event: dict[str, Any] = json.loads(line.text)
    except json.JSONDecodeError:
        return None
    return event


def _conclude(summary: dict[str, Any], out: Path, console: Console) -> None:
    console.print(result_table(summary))
    console.print(summary["conditions"], style="dim", soft_wrap=True)
    if summary["steps_trained"] < summary["steps_asked"]:
        console.print(
            f"{summary['steps_trained']} of {summary['steps_asked']} steps fitted into the time (--minutes); both variants "
            "trained the same ones.",
            soft_wrap=True,
        )
    busy = summary["other_load_cores"]
    if busy is not None and busy > NOTABLE_LOAD_CORES:
        console.print(
            f"other programs kept {busy:.1f} of {os.cpu_count()} cores busy meanwhile: the timings are disturbed.",
            style="yellow",
            soft_wrap=True,
        )
    console.print(
        f"timeline  {out / 'timeline.png'}\ntrace     {out / 'trace.json'}  (open it at ui.perfetto.dev)", soft_wrap=True
    )
    console.print(f"figures   {out / 'summary.json'}", soft_wrap=True)


def _move(source: Path, target: Path) -> None:
    """Atomic even where the temporary folder is another file system."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copyfile(source, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
