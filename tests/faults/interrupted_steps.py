"""Steps served by CommFuse, one of which is interrupted at a numbered place of our own code, and what came of it.

A cycle is what a user's loop does that catches the exception and goes on:

    step k         one attempt; interrupted on some ranks, at a place each
    step k + 1     until it succeeds: a rank that went through with step k alone raises once before
    step k + 2     must succeed

Ranks then compare what they have left behind.

    python -m tests.faults.interrupted_steps --count 500 --seed 3 transport=tcp      a table of what came of each
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from commfuse_dp import BrokenStepError
from commfuse_dp.errors import DeadlineError
from tests.faults.interrupted_rigs import RIGS, SWALLOWED, WRONG
from tests.support.interrupting import handler_of_the_process, raise_anyway

RECOVERED, NAMED, MISSED, COMPLETE = "recovered", "raised, named", "not reached", "complete"
HUNG, LEAKED, OTHER = "HUNG", "LEAKED", "OTHER"
DEFECTS = (HUNG, WRONG, LEAKED, SWALLOWED, OTHER)


class Plan(NamedTuple):
    """What is interrupted: fractions of the places of a step, by rank; None: this rank is not."""

    fractions: tuple[float | None, ...]


class Cycle(NamedTuple):
    """What came of a plan."""

    plan: Plan
    outcome: str
    places: tuple[str, ...]  # by rank
    told: tuple[str, ...]  # by rank: what each attempt ended with


def plans(seed: int, count: int, world_size: int) -> list[Plan]:
    """Alternately one rank and all of them, at places drawn over the whole step."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        everyone = number % 3 == 2
        victim = draw.randrange(world_size)
        found.append(Plan(tuple(draw.random() if everyone or rank == victim else None for rank in range(world_size))))
    return found


def judge(plan: Plan, places: Sequence[str], told: Sequence[Sequence[str]], left: Sequence[str]) -> str:
    """The outcome of a cycle, by what all ranks tell."""
    everything = [text for one in told for text in one]
    if any(text.startswith(DeadlineError.__name__) for text in everything):
        return HUNG
    if any(WRONG in text for text in everything):
        return WRONG
    if all(one[-2:] == ["ok", "ok"] for one in told):
        if any(left):
            return LEAKED
        if any(SWALLOWED in text for text in everything):
            return SWALLOWED
        if not any(places):
            return MISSED
        allowed = ("ok", KeyboardInterrupt.__name__, BrokenStepError.__name__)
        if not all(text.startswith(allowed) for text in everything):
            return OTHER
        return RECOVERED if any(BrokenStepError.__name__ in text for text in everything) or "ok" not in told[0][0] else COMPLETE
    bad = [one for one in told if one[-1] != "ok"]
    if len(bad) == len(told) and all("KeyboardInterrupt" in one[-1] for one in told):
        return NAMED
    return OTHER


def run(
    rank: int,
    world_size: int,
    kind: str,
    chosen: Sequence[Plan],
    settings: dict[str, Any],
    anyway: bool = False,
    meet: bool = False,
) -> list[Cycle]:
    """On each rank. kind: of RIGS. anyway: exceptions are raised, whatever handler there is."""
    handle = raise_anyway if anyway else handler_of_the_process
    found = []
    with interruptible():
        rig = RIGS[kind](rank, world_size, settings)
        for number, plan in enumerate(chosen):
            try:
                place, told = rig.cycle(number, plan.fractions[rank], handle, meet=meet)
            except KeyboardInterrupt:  # it came between two attempts
                place, told = "?", [f"{OTHER}: interrupted between attempts"]
            good = told[-2:] == ["ok", "ok"]
            everyone: list[Any] = [None] * world_size
            dist.all_gather_object(everyone, (place, told))
            all_good = good and all(one[-2:] == ["ok", "ok"] for _, one in everyone)
            left: list[Any] = [""] * world_size
            if all_good:
                dist.all_gather_object(left, rig.left_behind())
            outcome = judge(plan, [one for one, _ in everyone], [one for _, one in everyone], left)
            more = [f"left: {one}" if one else "" for one in left]
            told_all = tuple(" | ".join([*one, *filter(None, [extra])]) for (_, one), extra in zip(everyone, more, strict=True))
            found.append(Cycle(plan, outcome, tuple(one for one, _ in everyone), told_all))
            if not all_good or any(left):
                rig.end()
                rig.serve()
        rig.end()
    return found


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Workers ignore Ctrl-C, which is the session's business: here they have what every program begins with."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def table(cycles: Sequence[Cycle]) -> str:
    """Outcomes and how often, then each defect once with its place."""
    lines = [f"{outcome}: {count}" for outcome, count in sorted(Counter(cycle.outcome for cycle in cycles).items())]
    seen: Counter[tuple[str, str]] = Counter()
    example: dict[tuple[str, str], Cycle] = {}
    for cycle in cycles:
        if cycle.outcome in DEFECTS:
            for place in cycle.places:
                if place:
                    seen[cycle.outcome, place] += 1
                    example.setdefault((cycle.outcome, place), cycle)
    for (outcome, place), count in sorted(seen.items()):
        lines.append(f"  {outcome} {count}x {place}")
        lines += [f"      rank {rank}: {text[:420]}" for rank, text in enumerate(example[outcome, place].told)]
    return "\n".join(lines)


def main() -> None:
    import argparse

    from tests.support.workers import Workers

    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=RIGS, default="fsdp2")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--anyway", action="store_true")
    parser.add_argument("--meet", action="store_true")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--patience", type=float, default=300.0)
    parser.add_argument("settings", nargs="*", help="key=value of CommFuseConfig")
    options = parser.parse_args()
    settings: dict[str, Any] = {"transport": "shm", "deadline_s": 4.0, "inbox_bytes": 1 << 20, "prefetch_bytes": 1 << 20}
    for text in options.settings:
        key, _, value = text.partition("=")
        if key == "exclude":
            settings[key] = (value,)
            continue
        settings[key] = int(value) if value.isdigit() else value == "True" if value in ("True", "False") else value
    pools, found = Workers(), []
    begun = time.monotonic()
    chosen = plans(options.seed, options.count, options.ranks)
    try:
        for start in range(0, len(chosen), options.batch):
            batch = chosen[start : start + options.batch]
            found += pools(options.ranks).run(
                run, options.kind, batch, settings, options.anyway, options.meet, timeout=options.patience
            )[0]
    finally:
        pools.close()
        print(f"{len(found)} cycles in {time.monotonic() - begun:.1f} s, seed {options.seed}, {settings}")
        print(table(found))


if __name__ == "__main__":
    main()
