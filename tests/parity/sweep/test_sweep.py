"""Models of transformers and timm, with and without PEFT, train as with stock FSDP2: `make sweep`, task by task."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from tests.parity.sweep import train, unmade
from tests.parity.sweep.__main__ import as_expected, line, sweep_one
from tests.parity.sweep.cases import TASKS, Case
from tests.parity.sweep.groups import COMPARED, FLOORS, everything, model_types, plain
from tests.parity.sweep.train import WITHOUT, Row, Trained, compare
from tests.support.workers import Workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def pools() -> Iterator[Workers]:
    """Processes of its own: so many models and their packages leave more behind than other tests should see."""
    own = Workers()
    yield own
    own.close()


@pytest.mark.parametrize("task", FLOORS)
def test_models_train_as_with_stock(task, pools):
    rows = [sweep_one(pools, case) for case in everything() if case.task == task]
    print(*map(line, rows), sep="\n")
    bad = [f"{line(row)}\n{row.text}" for row in rows if not as_expected(row)]
    assert not bad, "\n\n".join(bad)
    compared = [row for row in rows if row.verdict not in WITHOUT]
    assert len(compared) >= FLOORS[task], "\n".join(line(row) for row in rows if row not in compared)


def _compared(rank, world_size, values):
    """What is said of three runs, each of one parameter and one loss."""
    runs = [Trained(torch.tensor([1.0], dtype=torch.float64), {"weight": torch.tensor(value).double()}) for value in values]
    return compare(runs[0], runs[1], runs[2] if values[2] != values[0] else runs[0])[1]


@pytest.mark.parametrize(
    ("values", "equal"),
    [
        (([1.0], [1.0], [1.0]), True),
        (([1.0], [1.5], [1.0]), False),
        (([float("inf")], [float("inf")], [float("inf")]), False),
        (([float("inf")], [1.0], [2.0]), False),
        (([2.5], [float("nan")], [2.0]), False),
    ],
)
def test_runs_that_left_all_numbers_are_not_taken_for_equal(pools, values, equal):
    assert [not wrong for wrong in pools(2).run(_compared, values, timeout=300)] == [equal, equal]


def test_only_size_is_luck_and_only_where_fp32_could_not_judge():
    assert train.is_luck({"fp32": 0.08, "fp64": 1e-10, "bf16": 4.7}, "bf16")
    assert not train.is_luck({"fp32": 1e-6, "bf16": 4.7}, "bf16")
    for wrong_in_kind in (float("inf"), float("nan")):
        assert not train.is_luck({"fp32": 0.08, "fp64": 1e-10, "bf16": wrong_in_kind}, "bf16")


@pytest.mark.parametrize("case", sorted(COMPARED), ids=str)
def test_what_must_be_compared_may_fall_out_in_no_dtype(case):
    assert case in everything()
    row = Row(case, "equal", "", "", {"fp32": 0.0, "bf16": 1.0}, {}, {}, 0.0)
    assert as_expected(row)
    for change in ({"verdict": "no model"}, {"verdict": "stock cannot"}, {"worst": {"fp32": 0.0}}):
        assert not as_expected(row._replace(**change))


def test_every_task_has_a_floor():
    assert {case.task for case in everything()} == set(FLOORS)


def test_every_model_type_is_trained_or_listed_with_its_reason():
    cases = [case for case in everything() if plain(case)]
    assert {case.model for case in cases} == set(model_types())
    trained = {case.model for case in cases if unmade.reason(case) is None}
    last = {case.model: case for case in cases}
    assert all(unmade.reason(last[model]) for model in set(model_types()) - trained)
    assert not unmade.listed() - {str(case) for case in cases}, "listed, and not a case"


@pytest.mark.parametrize(("verdict", "listed"), [("equal", True), ("no model", False), ("stock cannot", False)])
def test_what_is_listed_and_compared_fails_as_does_what_is_neither(verdict, listed):
    cases = [case for case in everything() if plain(case) and case.task not in TASKS]
    case = next(case for case in cases if (unmade.reason(case) is not None) == listed)
    assert not as_expected(Row(case, verdict, "", "", {}, {}, {}, 0.0))
    other = "no model" if listed else "equal"
    assert as_expected(Row(case, other, "", "", {}, {}, {}, 0.0))


def made_on_one(rank: int, world_size: int) -> Row:
    def prepare(case: Case) -> None:
        if rank == 1:
            raise ValueError("no memory")

    with mock.patch.object(train, "prepare", prepare):
        return train.run(rank, world_size, Case("causal", "llama"))


def test_a_model_that_cannot_be_made_on_one_rank_has_a_reason_on_all(pools):
    for row in pools(2).run(made_on_one, timeout=300):
        assert row.verdict == "no model" and "ranks [1]: ValueError: no memory" in row.text
