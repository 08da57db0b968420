"""What the reports of the communication hooks count."""

from __future__ import annotations

from commfuse_dp.integrations.comm_hooks import FROZEN, HookReport, HookRow

from commfuse_dp.probe import Probe


def report(*rows: HookRow) -> HookReport:
    return HookReport("DDP", rows, world_size=2, transport="shm", reason="auto", probe=Probe())


def test_frozen_parameters_are_left_to_nobody():
    rows = [
        HookRow("adapter", "hooks", "in a DDP bucket", 8),
        HookRow("base", "stock", FROZEN, 1000),
        HookRow("other", "stock", "DDP was told to ignore it", 5),
    ]
    assert "gradients of 8 parameters over its communication hook, 5 left to DDP; 1,000 are frozen" in report(*rows).summary
    assert report(rows[0]).summary.endswith("0 left to DDP")
