"""Models of transformers and timm, with and without PEFT, train as with stock FSDP2: `make sweep`, task by task."""

from __future__ import annotations

import pytest

from tests.parity.sweep.__main__ import as_expected, line, sweep_one
from tests.parity.sweep.groups import COMPARED, FLOORS, everything
from tests.parity.sweep.train import Row

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("task", FLOORS)
def test_models_train_as_with_stock(task, workers):
    rows = [sweep_one(workers, case) for case in everything() if case.task == task]
    print(*map(line, rows), sep="\n")
    bad = [f"{line(row)}\n{row.text}" for row in rows if not as_expected(row)]
    assert not bad, "\n\n".join(bad)
    compared = [row for row in rows if row.verdict not in ("no model", "stock cannot")]
    assert len(compared) >= FLOORS[task], "\n".join(line(row) for row in rows if row not in compared)


@pytest.mark.parametrize("case", sorted(COMPARED), ids=str)
def test_what_must_be_compared_may_fall_out_in_no_dtype(case):
    assert case in everything()
    row = Row(case, "equal", "", "", {"fp32": 0.0, "bf16": 1.0}, {}, {}, 0.0)
    assert as_expected(row)
    for change in ({"verdict": "no model"}, {"verdict": "stock cannot"}, {"worst": {"fp32": 0.0}}):
        assert not as_expected(row._replace(**change))


def test_every_task_has_a_floor():
    assert {case.task for case in everything()} == set(FLOORS)
