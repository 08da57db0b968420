"""What reports list and count, and which rank logs them."""

from __future__ import annotations

import itertools
import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
from commfuse_dp.integrations.attach import announce
from commfuse_dp.integrations.attach.report import ParameterRow
from commfuse_dp.integrations.attach.rows import lines_of
from commfuse_dp.integrations.comm_hooks import FROZEN, HookReport
from hypothesis import given
from hypothesis import strategies as st

from commfuse_dp.probe import Probe


def rows_of(*names: str, path: Any = "fused", reason: str = "a linear") -> list[ParameterRow]:
    return [ParameterRow(name, path, reason, 1) for name in names]


def test_layers_that_are_alike_share_a_line() -> None:
    layers = [name for layer in (0, 1, 2, 5) for name in (f"layers.{layer}.up.weight", f"layers.{layer}.norm")]
    experts = [f"layers.{layer}.experts.{expert}.weight" for layer in (3, 4) for expert in range(8)]
    assert lines_of(rows_of("embed2.weight", *layers, *experts, "head.0", "12")) == [
        "  embed2.weight                  fused     a linear",
        "  layers.0-2,5.up.weight         fused     a linear",
        "  layers.0-2,5.norm              fused     a linear",
        "  layers.3-4.experts.0-7.weight  fused     a linear",
        "  head.0                         fused     a linear",
        "  12                             fused     a linear",
    ]
    assert lines_of([]) == []


def test_what_differs_does_not() -> None:
    other = rows_of("layers.1.up", path="hooks") + rows_of("layers.2.up", reason="excluded")
    assert len(lines_of(rows_of("layers.0.up") + other)) == 3
    assert len(lines_of(rows_of("a.0.b.1", "a.1.b.0"))) == 2  # not all combinations


def expanded(line: str) -> set[str]:
    """All names that a line stands for."""
    name = line.split()[0]
    parts = []
    for part in name.split("."):
        if re.fullmatch(r"[\d,-]+", part):
            spans = [span.split("-") for span in part.split(",")]
            parts.append([str(number) for span in spans for number in range(int(span[0]), int(span[-1]) + 1)])
        else:
            parts.append([part])
    return set(map(".".join, itertools.product(*parts)))


@given(st.sets(st.lists(st.sampled_from(["0", "1", "2", "7", "a", "b2"]), min_size=1, max_size=4).map(".".join), max_size=30))
def test_every_name_is_told_once(names: set[str]) -> None:
    told = [name for line in lines_of(rows_of(*sorted(names))) for name in expanded(line)]
    assert sorted(told) == sorted(names)


@pytest.mark.parametrize("first", [True, False])
def test_the_first_rank_logs_the_report(caplog: pytest.LogCaptureFixture, first: bool) -> None:
    with caplog.at_level(logging.DEBUG, "commfuse_dp"):
        announce.log_report("all of it", SimpleNamespace(first=first))  # type: ignore[arg-type]
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (logging.INFO if first else logging.DEBUG, "all of it")
    ]


def test_a_summary_is_for_those_who_see_no_log(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    report = SimpleNamespace(summary="in short")
    with caplog.at_level(logging.INFO, "commfuse_dp"):
        announce.announce_report(report)
    assert not caplog.records and not capsys.readouterr().err
    with caplog.at_level(logging.WARNING, "commfuse_dp"):
        announce.announce_report(report)
    assert not caplog.records and capsys.readouterr().err == "in short\n"


def hook_report(*rows: ParameterRow) -> HookReport:
    return HookReport("DDP", list(rows), world_size=2, transport="shm", transport_reason="auto", probe=Probe())


def test_frozen_parameters_are_left_to_nobody() -> None:
    rows = [
        ParameterRow("adapter", "hooks", "in a DDP bucket", 8),
        ParameterRow("base", "stock", FROZEN, 1000),
        ParameterRow("other", "stock", "DDP was told to ignore it", 5),
    ]
    text = hook_report(*rows).summary
    assert "gradients of 8 parameters over its communication hook, 5 left to DDP; 1,000 are frozen" in text
    assert hook_report(rows[0]).summary.endswith("0 left to DDP")
