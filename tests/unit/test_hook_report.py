"""What the reports of the communication hooks count."""

from __future__ import annotations

from commfuse_dp.integrations.attach.report import ParameterRow
from commfuse_dp.integrations.comm_hooks import FROZEN, HookReport

from commfuse_dp.probe import Probe


def report(*rows: ParameterRow) -> HookReport:
    return HookReport("DDP", list(rows), world_size=2, transport="shm", transport_reason="auto", probe=Probe())


def test_frozen_parameters_are_left_to_nobody():
    rows = [
        ParameterRow("adapter", "hooks", "in a DDP bucket", 8),
        ParameterRow("base", "stock", FROZEN, 1000),
        ParameterRow("other", "stock", "DDP was told to ignore it", 5),
    ]
    assert "gradients of 8 parameters over its communication hook, 5 left to DDP; 1,000 are frozen" in report(*rows).summary
    assert report(rows[0]).summary.endswith("0 left to DDP")
