"""The whole sweep: `python -m tests.parity.sweep [--only REGEX]`. A row for each model; ends with 1 if one is unexpected."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Annotated

import typer

from tests.parity.sweep import unmade
from tests.parity.sweep.cases import TASKS, Case
from tests.parity.sweep.expected import reason
from tests.parity.sweep.groups import COMPARED, FLOORS, everything, plain
from tests.parity.sweep.train import WITHOUT, Row, run
from tests.support.workers import WorkerError, Workers


def main(
    only: Annotated[str, typer.Option(help="Only cases whose names match this regular expression.")] = "",
    list_only: Annotated[bool, typer.Option("--list", help="Print the names and end.")] = False,
) -> None:
    """Train every model with stock FSDP2 and with CommFuse on two ranks, and compare."""
    cases = [case for case in everything() if re.search(only, str(case))]
    if list_only:
        print(*cases, sep="\n")
        return
    pools = Workers()
    rows = []
    try:
        for case in cases:
            rows.append(row := sweep_one(pools, case))
            print(line(row), flush=True)
    finally:
        pools.close()
    bad = [row for row in rows if not as_expected(row)]
    print("\n" + ", ".join(f"{verdict}: {count}" for verdict, count in Counter(row.verdict for row in rows).items()))
    for row in bad:
        print(f"\nUNEXPECTED {row.case} [{row.dtype}] {row.verdict}\n{row.text}")
    compared = Counter(row.case.task for row in rows if row.verdict not in WITHOUT)
    lost = [f"{task}: {compared[task]} compared, at least {floor}" for task, floor in FLOORS.items() if compared[task] < floor]
    if lost and not only:
        print("\nToo few: " + "; ".join(lost))
    sys.exit(1 if bad or (lost and not only) else 0)


def sweep_one(pools: Workers, case: Case, how: Callable[[int, int, Case], Row] = run) -> Row:
    """A crash of a worker is a row, too."""
    try:
        return pools(2).run(how, case, timeout=180)[0]
    except WorkerError as error:
        return Row(case, "error", "?", f"worker: {str(error)[:3000]}", {}, {}, {}, 0.0)


def as_expected(row: Row) -> bool:
    if row.case in COMPARED and (row.verdict != "equal" or not row.worst.keys() >= set(row.case.dtypes)):
        return False
    own = row.case.task in TASKS and row.verdict == "stock cannot"  # these are bounded by FLOORS alone
    if plain(row.case) and not own and (row.verdict in WITHOUT) != (unmade.reason(row.case) is not None):
        return False
    return (row.verdict in ("differs", "error")) == (reason(row.case) is not None)


def line(row: Row) -> str:
    paths = " ".join(f"{path} {count}" for path, count in sorted(row.paths.items()))
    worst = " ".join(f"{dtype} {value:.2g}" for dtype, value in row.worst.items())
    text = row.text.partition("\n")[0][:180]
    reasons = "; ".join(f"{count} {why}" for why, count in row.reasons.items())
    head = f"{row.verdict:<12} {row.dtype:<5} {row.case!s:<44} {worst:<24} {paths:<36} {row.seconds:5.1f} s"
    return f"{head}  {text or reasons[:160]}"


if __name__ == "__main__":
    typer.run(main)
