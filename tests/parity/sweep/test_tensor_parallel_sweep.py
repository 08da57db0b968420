"""Every decoder of transformers with a plan of tensor parallelism trains as with stock; what nothing is served of is listed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.parity.sweep.__main__ import line, sweep_one
from tests.parity.sweep.cases import Case
from tests.parity.sweep.tensor_parallel import STOCK_CANNOT, TASK, UNMADE, UNSERVED, planned, run
from tests.parity.sweep.tensor_parallel import as_expected as expected
from tests.support.workers import Workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PARTS = 4


@pytest.fixture(scope="module")
def pools() -> Iterator[Workers]:
    """Processes of its own: so many models leave more behind than other tests should see."""
    own = Workers()
    yield own
    own.close()


@pytest.mark.parametrize("part", range(PARTS))
def test_decoders_train_as_with_stock(part: int, pools: Any) -> None:
    rows = [sweep_one(pools, Case(TASK, model), run) for model in planned()[part::PARTS]]
    print(*map(line, rows), sep="\n")
    bad = [f"{line(row)}\n{row.text}" for row in rows if not expected(row)]
    assert not bad, "\n\n".join(bad)


def test_what_is_listed_is_planned() -> None:
    assert not ({*STOCK_CANNOT, *UNMADE, *UNSERVED} - set(planned()))
