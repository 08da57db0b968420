"""Models of transformers and timm, with and without PEFT, train as with stock FSDP2: some for all of `make sweep`."""

from __future__ import annotations

import pytest

from tests.parity.sweep.__main__ import as_expected, line, sweep_one
from tests.parity.sweep.groups import REPRESENTATIVES, everything

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("group", REPRESENTATIVES)
def test_models_train_as_with_stock(group, workers):
    rows = [sweep_one(workers, case) for case in REPRESENTATIVES[group]]
    print(*map(line, rows), sep="\n")
    bad = [f"{line(row)}\n{row.text}" for row in rows if not as_expected(row)]
    assert not bad, "\n\n".join(bad)
    silent = [line(row) for row in rows if row.verdict in ("no model", "stock cannot")]
    assert not silent, "\n".join(silent)


def test_representatives_are_part_of_the_whole():
    whole = set(everything())
    assert [case for cases in REPRESENTATIVES.values() for case in cases if case not in whole] == []
