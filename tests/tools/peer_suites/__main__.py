"""Other projects' own tests against CommFuse: `python -m tests.tools.peer_suites --pytorch CHECKOUT --deepspeed CHECKOUT`.

Every test file runs twice in processes of its own: with the stock framework, and, as far as it passed, with CommFuse put into
its models: apply() at the first forward of the outermost fully_shard'ed module, and COMMFUSE=1 for DeepSpeed, which does what
the JSON block does. All that stock passes must pass, but for the list in expected.py, whose tests must fail.

[Note: What a row says]
`served`: tests of the file in which CommFuse served at least one parameter; `fused`: those of them in which it computed at
least one layer by slices. A test that passes without being served proves nothing, and is not hidden: programs that never run a
forward are of this kind. Ranks that FSDP2's tests have as threads of one process are processes here, for stock as well.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from tests.tools.peer_suites.expected import EXPECTED
from tests.tools.peer_suites.suites import SUITES, Suite

HERE = Path(__file__).parent
TOO_FEW = re.compile(r"(?:at least|Need) +(?P<fsdp2>\d+)|(?P<deepspeed>\d+) required")


class Broken(Exception):
    """A file that cannot be run at all."""


class Outcome(NamedTuple):
    outcome: str
    """passed, failed, skipped or died (the process ended in the middle of it, or its time was up)"""
    text: str
    devices: int


class Ran(NamedTuple):
    """What a file's tests did in one mode."""

    outcomes: dict[str, Outcome]
    served: set[str]
    fused: set[str]


class Row(NamedTuple):
    file: str
    stock: int
    skipped: int
    served: int
    fused: int
    passed: int
    listed: dict[str, str]
    failed: dict[str, str]
    surprising: list[str]
    """on the list, and passing"""


def main(
    pytorch: Annotated[Path | None, typer.Option(help="A checkout of PyTorch, of the version that is installed.")] = None,
    deepspeed: Annotated[Path | None, typer.Option(help="A checkout of DeepSpeed.")] = None,
    files: Annotated[str, typer.Option(help="Only files whose names match this regular expression.")] = "",
    tests: Annotated[str, typer.Option(help="Only tests that match this, as pytest's -k.")] = "",
    cache: Annotated[Path, typer.Option(help="Keeps what stock passes, by the files' content and versions.")] = Path(
        "build/peer-suites"
    ),
    test_s: Annotated[int, typer.Option(help="Time limit of one test.")] = 200,
    file_s: Annotated[int, typer.Option(help="Time limit of one file.")] = 3600,
    partition_all: Annotated[
        bool, typer.Option(help="ZeRO-3 keeps no parameter whole, where a test does not say which: its models are tiny.")
    ] = False,
    ours_first: Annotated[
        bool,
        typer.Option(help="Half the time: stock runs only what fails with CommFuse, the rest is taken to pass."),
    ] = False,
) -> None:
    """Run the test suites of PyTorch's FSDP2 and of DeepSpeed's ZeRO against CommFuse. Ends with 1 if any test says no."""
    checkouts = {"fsdp2": pytorch, "deepspeed": deepspeed}
    if not any(checkouts.values()):
        raise typer.BadParameter("name a checkout: --pytorch /path/to/pytorch, --deepspeed /path/to/DeepSpeed")
    good = True
    for name, checkout in checkouts.items():
        if checkout is None:
            continue
        suite = SUITES[name]
        if partition_all:
            suite = suite._replace(environment={**suite.environment, "PEERS_PARTITION_ALL": "1"})
        paths = [path for path in suite.files(checkout) if re.search(files, path.name)]
        if not paths:
            raise typer.BadParameter(f"{checkout} has no tests of {name}: looked for {suite.patterns} in {suite.folder}")
        if suite.before:
            _prepare(suite, cache)
        rows = []
        for path in paths:
            try:
                rows.append(_run_file(suite, checkout, path, tests, cache, test_s, file_s, ours_first=ours_first))
            except Broken as error:
                rows.append(Row(path.name, 0, 0, 0, 0, 0, {}, {path.name: str(error)}, []))
            (cache / f"{path.stem}-failed.json").write_text(json.dumps(rows[-1].failed, indent=1))
            _print_row(rows[-1])
        good &= _print_sum(suite, rows, partly=bool(files or tests))
    raise typer.Exit(0 if good else 1)


def _prepare(suite: Suite, cache: Path) -> None:
    os.environ["TORCH_EXTENSIONS_DIR"] = str(cache.resolve() / "extensions")
    path = os.pathsep.join(filter(None, (str(HERE / "site"), os.environ.get("PYTHONPATH"))))
    subprocess.run(
        [sys.executable, "-c", suite.before],
        env={**os.environ, **suite.environment, "COMMFUSE": "0", "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        timeout=1200,
        check=True,
    )


def _run_file(
    suite: Suite, checkout: Path, path: Path, tests: str, cache: Path, test_s: int, file_s: int, *, ours_first: bool
) -> Row:
    known = cache / f"{path.stem}-{_identity(suite, path, tests, test_s)}.json"
    ours: Ran | None = None
    if ours_first:
        ours = _run(suite, "commfuse", checkout, path, tests, None, test_s, file_s)
        lost = {test: outcome.devices for test, outcome in ours.outcomes.items() if outcome.outcome in ("failed", "died")}
        without = _run(suite, "stock", checkout, path, tests, lost, test_s, file_s).outcomes if lost else {}
        stock = {**ours.outcomes, **without}
    elif known.exists():
        stock = {test: Outcome(*outcome) for test, outcome in json.loads(known.read_text()).items()}
    else:
        stock = _run(suite, "stock", checkout, path, tests, None, test_s, file_s).outcomes
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(json.dumps(stock, indent=1))
    passing = {test: outcome.devices for test, outcome in stock.items() if outcome.outcome == "passed"}
    if ours is None:
        ours = _run(suite, "commfuse", checkout, path, tests, passing, test_s, file_s) if passing else Ran({}, set(), set())
    listed, failed, surprising = {}, {}, []
    for test in passing:
        outcome = ours.outcomes.get(test, Outcome("died", "did not run", 0))
        reason = next((why for pattern, why in EXPECTED[suite.name].items() if fnmatch.fnmatchcase(test, pattern)), None)
        if outcome.outcome == "passed":
            if reason is not None:
                surprising.append(test)
        elif reason is not None:
            listed[test] = reason
        else:
            failed[test] = f"{outcome.outcome}: {outcome.text}"
    skipped = sum(outcome.outcome != "passed" for outcome in stock.values())
    passed = len(passing) - len(listed) - len(failed)
    served, fused = len(ours.served & set(passing)), len(ours.fused & set(passing))
    return Row(path.name, len(passing), skipped, served, fused, passed, listed, failed, surprising)


def _identity(suite: Suite, path: Path, tests: str, test_s: int) -> str:
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "deepspeed")]
    harness = b"".join(file.read_bytes() for file in sorted((HERE / "site").glob("*.py")))
    facts = [*versions, str(suite), tests, str(test_s), sys.version]
    return hashlib.sha256(path.read_bytes() + harness + "\n".join(facts).encode()).hexdigest()[:12]


def _run(
    suite: Suite,
    mode: str,
    checkout: Path,
    path: Path,
    tests: str,
    wanted: dict[str, int] | None,
    test_s: int,
    file_s: int,
) -> Ran:
    """wanted: tests and the devices that each needs; None: find out."""
    outcomes: dict[str, Outcome] = {}
    served, fused = set[str](), set[str]()
    for devices in suite.devices:
        if wanted is not None:
            choice = [test for test, needs in wanted.items() if needs == devices]
        elif not outcomes:
            choice = None
        else:
            choice = [test for test, outcome in outcomes.items() if outcome.outcome == "skipped" and _wants(outcome, devices)]
        if choice == []:
            continue
        with tempfile.TemporaryDirectory(prefix="peers-") as folder:
            _run_processes(suite, mode, checkout, path, tests, choice, devices, Path(folder), test_s, time.monotonic() + file_s)
            for line in _records(Path(folder), "outcomes.jsonl"):
                if line["when"] == "teardown" and line["outcome"] != "failed":
                    continue
                outcomes[line["test"]] = Outcome(line["outcome"], line["text"], devices)
            applied = _records(Path(folder), "applied.jsonl")
            served |= {line["test"] for line in applied if set(line["paths"]) - {"stock"}}
            fused |= {line["test"] for line in applied if "fused" in line["paths"]}
    return Ran(outcomes, served, fused)


def _wants(outcome: Outcome, devices: int) -> bool:
    needs = TOO_FEW.search(outcome.text)
    return needs is not None and int(needs["fsdp2"] or needs["deepspeed"]) <= devices


def _run_processes(
    suite: Suite,
    mode: str,
    checkout: Path,
    path: Path,
    tests: str,
    choice: list[str] | None,
    devices: int,
    folder: Path,
    test_s: int,
    deadline: float,
) -> None:
    """pytest over one file, begun anew behind each test that ended its process, until all are through or time is up."""
    (folder / "wanted.json").write_text(json.dumps(choice))
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("COMMFUSE", "PEERS_", "PYTEST"))}
    environment = {
        **plain,
        **suite.environment,
        suite.limit: str(test_s * 3 // 4),  # its message says more than pytest's, so it comes first
        "PYTHONPATH": str(HERE / "site"),
        "PEERS_SUITE": suite.name,
        "PEERS_MODE": mode,
        "PEERS_DEVICES": str(devices),
        "PEERS_FOLDER": str(folder),
        "LOCAL_SIZE": str(devices),  # how many devices DeepSpeed's CPU has
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TMPDIR": str(folder),
    }
    if mode == "commfuse":
        environment["COMMFUSE_DEADLINE_S"] = "60"
        if suite.name == "deepspeed":
            environment["COMMFUSE"] = "1"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "commfuse_peers_record",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
    ]
    command += ["--timeout", str(test_s), "--timeout-method", "thread", "--tb", "short", "--basetemp", str(folder / "base")]
    command += [*(["-k", tests] if tests else []), str(path.resolve())]
    while True:
        with (folder / "output").open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=checkout / suite.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(max(deadline - time.monotonic(), 1.0))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code in (0, 1, 5):  # all ran; 5: none is left
            return
        current = (folder / "current").read_text() if (folder / "current").exists() else ""
        done = {line["test"] for line in _records(folder, "outcomes.jsonl")}
        tail = (folder / "output").read_text(errors="replace")[-3000:]
        if code is None or not current or current in done:
            raise Broken(f"{path.name} ({mode}): pytest ended with {code} outside a test:\n{tail}")
        with (folder / "outcomes.jsonl").open("a") as file:
            file.write(json.dumps({"test": current, "outcome": "died", "when": "call", "text": tail}) + "\n")


def _records(folder: Path, name: str) -> list[dict]:
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _print_row(row: Row) -> None:
    print(
        f"{row.file:<50} stock {row.stock:>3} (not {row.skipped:>3})  served {row.served:>3} fused {row.fused:>3}  "
        f"passed {row.passed:>3}  "
        f"listed {len(row.listed):>2}  FAILED {len(row.failed):>2}  passed though listed {len(row.surprising):>2}",
        flush=True,
    )
    for test, text in row.failed.items():
        print(f"    FAILED {test}\n        {_last(text)}", flush=True)
    for test in row.surprising:
        print(f"    passes, but stands in expected.py: {test}", flush=True)


def _last(text: str) -> str:
    """The line of a traceback that says most: the innermost error of a worker's."""
    errors = re.findall(r"^E? *((?:[\w.]+(?:Error|Exception|Lost|Refused)|Failed)\b.*)$", text, re.MULTILINE)
    wanted = [error for error in errors if not error.startswith("RuntimeError: Process ")]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (wanted or errors or lines or ["no text"])[-1][:300]


def _print_sum(suite: Suite, rows: list[Row], *, partly: bool) -> bool:
    stock, passed = sum(row.stock for row in rows), sum(row.passed for row in rows)
    listed = {test: why for row in rows for test, why in row.listed.items()}
    failed, surprising = sum(len(row.failed) for row in rows), sum(len(row.surprising) for row in rows)
    served, fused = sum(row.served for row in rows), sum(row.fused for row in rows)
    print(f"\n{suite.name}: {stock} tests pass with stock, {served} of them are served, {fused} fused; with CommFuse "
          f"{passed} pass, {len(listed)} fail as listed, {failed} fail, {surprising} pass though listed")  # fmt: skip
    for test, why in listed.items():
        print(f"  listed: {test}: {why}")
    print(flush=True)
    return not failed and not surprising and (partly or stock > 0)


if __name__ == "__main__":
    typer.run(main)
