"""One rank of the demo: `python -m commfuse_dp.examples.demo.worker`, started by `commfuse demo` with RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT and the settings in the environment. Rank 0 prints events as JSON lines and writes the raw results.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from commfuse_dp.examples.demo.corpus import TRAIN, VALIDATION, Batches
from commfuse_dp.examples.demo.settings import SETTINGS_VARIABLE, DemoSettings
from commfuse_dp.examples.demo.variants import COMMFUSE, COMPUTE_ONLY, FSDP2, Variant, build_variants

from commfuse_dp.errors import CommFuseError
from commfuse_dp.launch.ranks import run_as_rank
from commfuse_dp.observe import draw_timeline, read_interface, view_step, write_trace

RAW, TIMELINE, TRACE = "raw.json", "timeline.png", "trace.json"
TITLES = {FSDP2: "FSDP2 (stock)", COMMFUSE: "FSDP2 + CommFuse"}

IN_PLACE = "in place, shared memory"
UNSEEN = "asynchronous on the device: see torch.profiler"
_DRAWING_S = 3.0  # import of matplotlib, picture, trace


class DemoRank:
    """The run as one rank sees it."""

    def __init__(self, settings: DemoSettings, rank: int) -> None:
        self.settings = settings
        self.rank = rank
        place = {"context": settings.context, "batch": settings.batch, "rank": rank, "world_size": settings.world_size}
        corpus = Path(settings.corpus)
        self.validation = Batches(corpus / VALIDATION, seed=settings.seed + 1, **place)
        self.variants = build_variants(settings, rank, Batches(corpus / TRAIN, seed=settings.seed, **place))
        self.wire: dict[str, list[tuple[int, int]]] = {name: [] for name in self.variants}  # (steps, bytes received)
        self.peaks: dict[str, int] = {}
        self.trained = 0  # steps of each variant, before the recorded ones

    def emit(self, event: str, **values: Any) -> None:
        if self.rank == 0:
            print(json.dumps({"event": event, **values}), flush=True)

    def run(self) -> None:
        self._announce()
        self._train()
        self._record()
        self.emit("stage", text="validating on held-out files")
        losses = {}
        for name in (FSDP2, COMMFUSE):
            with self.variants[name].measuring():
                losses[name] = self.variants[name].validate(self.validation, self.settings.validation_batches)
        self._write(losses)

    def _announce(self) -> None:
        report = self.variants[COMMFUSE].report
        self.emit(
            "ready",
            parameters=sum(p.numel() for p in self.variants[COMPUTE_ONLY].model.parameters()),
            transport=report.transport,
            transport_reason=report.transport_reason,
            minimum_bytes=report.minimum_bytes_per_step,
            report=str(report),
        )

    def _train(self) -> None:
        """Turns of A B c, B A c, ... so that a drift of the machine hits all variants alike.

        After every turn A and B have trained the same number of steps; c, which is only timed, about half of them.
        """
        turns = 0
        cost_s = 0.0  # of one more step of all variants
        while steps := self._affordable(cost_s):
            turn_started = time.monotonic()
            for name in (FSDP2, COMMFUSE) if turns % 2 == 0 else (COMMFUSE, FSDP2):
                self._block(name, steps)
            self._block(COMPUTE_ONLY, max(1, steps // 2))
            cost_s = (time.monotonic() - turn_started) / steps
            self.trained, turns = self.trained + steps, turns + 1
            self.emit("turn", steps=self.trained)

    def _affordable(self, cost_s: float) -> int:
        """Steps of the next turn: what is left to do, as far as the time allows; but one that is warm, whatever the time."""
        settings, done = self.settings, self.trained
        left = settings.steps - done
        if done == 0:
            steps = 1  # what a step costs is not known yet
        else:
            spare_s = settings.ends_at_s - time.monotonic() - self._closing_s()
            steps = min(left, settings.block, max(0, int(spare_s / cost_s)))
            if done < settings.warmup:
                steps = min(steps, settings.warmup - done)
            if done == 1:
                steps = max(steps, min(left, 1))
        return self._agreed(steps)

    def _closing_s(self) -> float:
        """What recording, validation and drawing will take, judged by the last steps."""
        forwards = self.settings.validation_batches / 3  # a forward is about a third of a step
        return _DRAWING_S + self._pair_s() * (self.settings.recorded + 1 + forwards)

    def _pair_s(self) -> float:
        """A step of stock and one of CommFuse, by the last ones."""
        recent = ([r.wall_ms / 1e3 for r in list(self.variants[name].meter.readings)[-4:]] for name in (FSDP2, COMMFUSE))
        return sum(sum(values) / len(values) for values in recent)

    def _agreed(self, number: int) -> int:
        """Collective: what rank 0 says. Clocks and timings differ between ranks, their decisions must not."""
        verdict = torch.tensor([number], dtype=torch.int32, device=self.settings.device)
        dist.broadcast(verdict, 0)
        return int(verdict.item())

    def _block(self, name: str, steps: int) -> None:
        variant = self.variants[name]
        dist.barrier()
        interface = self.settings.interface
        before = read_interface(interface) if interface else None
        with variant.measuring():
            for _ in range(steps):
                variant.step()
                reading = variant.meter.readings[-1]
                self.emit(
                    "step",
                    variant=name,
                    step=len(variant.losses),
                    loss=variant.losses[-1],
                    wall_ms=reading.wall_ms,
                    exposed_ms=reading.exposed_ms,
                )
        dist.barrier()
        if before is not None:
            self.wire[name].append((steps, read_interface(interface).since(before).received))

    def _record(self) -> None:
        """Spans of a few more steps of each variant, into the trace and the picture. They are trained and not timed."""
        self.emit("stage", text="recording the timeline")
        in_time = time.monotonic() + self._closing_s() < self.settings.ends_at_s + self._pair_s()
        steps = self._agreed(self.settings.recorded if in_time else 1)
        gathered = {}
        for name in (FSDP2, COMMFUSE):
            variant = self.variants[name]
            dist.barrier()
            readings = list(variant.meter.readings)
            with variant.measuring():
                self.peaks[name] = variant.record(steps)
            variant.meter.readings.clear()
            variant.meter.readings.extend(readings)
            gathered[name] = variant.recorder.gather()
        out = Path(self.settings.result)
        ranks = {name: spans for name, spans in gathered.items() if spans is not None}
        if not ranks:
            return
        conditions, world_size = self._conditions(), self.settings.world_size
        write_trace(out / TRACE, {TITLES[name]: spans for name, spans in ranks.items()}, about={"conditions": conditions})
        draw_timeline(
            out / TIMELINE,
            [
                view_step(TITLES[name], spans, typical_ns=self._typical_ns(name), note=self._note(name))
                for name, spans in ranks.items()
            ],
            title=f"One training step: stock FSDP2 above, with CommFuse below ({_ranks(world_size)}, same time axis)",
            conditions=conditions,
        )

    def _typical_ns(self, name: str) -> int:
        """What a timed step of this rank took: of the recorded ones the picture shows that which comes nearest."""
        timed = list(self.variants[name].meter.readings)[self.settings.warmup :] or self.variants[name].meter.readings
        return int(median(reading.wall_ns for reading in timed))

    def _note(self, name: str) -> str:
        """What to say of lanes in which no transfer was seen."""
        if self.settings.device != "cpu":
            return UNSEEN
        return IN_PLACE if name == COMMFUSE and self.variants[name].report.transport == "shm" else ""

    def _conditions(self) -> str:
        settings = self.settings
        millions = sum(p.numel() for p in self.variants[COMPUTE_ONLY].model.parameters()) / 1e6
        link = "one host" if settings.link == "none" else f"joined by a {settings.link} link"
        return (
            f"byte-level GPT, {millions:.1f} M parameters, fp32, {settings.batch * settings.context} tokens a rank; "
            f"{_ranks(settings.world_size)} on {os.cpu_count()} cores, {link}, transport "
            f"{self.variants[COMMFUSE].report.transport}; FSDP2 on {dist.get_backend()}, torch {torch.__version__}"
        )

    def _write(self, validation: dict[str, float]) -> None:
        mine = {
            "variants": {name: self._numbers(variant) for name, variant in self.variants.items()},
            "validation": validation,
            "peaks": self.peaks,
        }
        everyone: list[Any] = [None] * self.settings.world_size
        dist.all_gather_object(everyone, mine)
        if self.rank == 0:
            raw = {"ranks": everyone, "conditions": self._conditions(), "trained": self.trained}
            (Path(self.settings.result) / RAW).write_text(json.dumps(raw))

    def _numbers(self, variant: Variant) -> dict[str, Any]:
        readings = list(variant.meter.readings)
        return {
            "losses": variant.losses,
            "wall_ms": [r.wall_ms for r in readings],
            "exposed_ms": [r.exposed_ms for r in readings],
            "received": [r.bytes_received for r in readings],
            "wire": self.wire[variant.name],
        }

    def close(self) -> None:
        import commfuse_dp

        commfuse_dp.remove(self.variants[COMMFUSE].model)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"


def main() -> int:
    settings = DemoSettings.from_json(os.environ[SETTINGS_VARIABLE])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(settings.threads)
    if settings.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    try:
        dist.init_process_group("nccl" if settings.device == "cuda" else "gloo", timeout=timedelta(seconds=120))
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
            raise
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        print(f"error: port taken: somebody else listens on {where}. Name another one with --port.", file=sys.stderr)
        return 1
    try:
        demo = DemoRank(settings, rank)
        demo.run()
        demo.close()
    except CommFuseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    run_as_rank(main)
