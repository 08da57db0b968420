"""A plugin for pytest: writes down how each test ended, leaves out what an earlier process has run, starts workers warm."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_FOLDER = Path(os.environ["PEERS_FOLDER"])


def pytest_configure(config: Any) -> None:
    if os.environ["PEERS_SUITE"] == "deepspeed":
        multiprocessing.get_context("forkserver").set_forkserver_preload(
            ["commfuse_peers_ops", "commfuse_dp.integrations.fsdp2"]
        )


def pytest_collectstart(collector: Any) -> None:
    """DeepSpeed's fixtures that run on several ranks are classes, marked as older versions of pytest mark fixtures."""
    if not isinstance(collector, pytest.Module) or os.environ["PEERS_SUITE"] != "deepspeed":
        return
    for name, kind in list(vars(collector.obj).items()):
        if isinstance(kind, type) and getattr(kind, "is_dist_fixture", False) and isinstance(kind.world_size, int):
            setattr(collector.obj, f"launch_{name}", pytest.fixture(name=name)(_launching(kind)))


def _launching(kind: Any) -> Callable[[Any], None]:
    def launch(request: Any) -> None:
        kind()(request)

    return launch


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    wanted = json.loads((_FOLDER / "wanted.json").read_text())  # None: all
    done = {json.loads(line)["test"] for line in _lines("outcomes.jsonl")}
    keep = [item for item in items if _name(item.nodeid) not in done and (wanted is None or _name(item.nodeid) in wanted)]
    config.hook.pytest_deselected(items=[item for item in items if item not in keep])
    items[:] = keep


def pytest_runtest_logstart(nodeid: str) -> None:
    (_FOLDER / "current").write_text(_name(nodeid))


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        text = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr or "")
        line = {"test": _name(report.nodeid), "outcome": report.outcome, "when": report.when, "text": text}
        with (_FOLDER / "outcomes.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def _name(nodeid: str) -> str:
    """Without the folder, which depends on where the checkout's pytest root is."""
    path, bracket, parameters = nodeid.partition("[")
    return path.rpartition("/")[2] + bracket + parameters


def _lines(name: str) -> list[str]:
    path = _FOLDER / name
    return path.read_text().splitlines() if path.exists() else []
