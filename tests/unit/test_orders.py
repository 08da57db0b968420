"""Orders: own first, own last, every step a permutation."""

from __future__ import annotations

import pytest

from commfuse_dp.program.orders import ORDERS, gather_owners, scatter_owners


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 64])
def test_orders(order: str, n: int) -> None:
    gather = [gather_owners(r, n, order) for r in range(n)]
    scatter = [scatter_owners(r, n, order) for r in range(n)]
    everyone = set(range(n))
    for r in range(n):
        assert gather[r][0] == r and scatter[r][-1] == r
        assert set(gather[r]) == set(scatter[r]) == everyone
    for t in range(n):
        assert {g[t] for g in gather} == {s[t] for s in scatter} == everyone


def test_stated_orders() -> None:
    assert gather_owners(1, 4, "pairwise") == (1, 2, 3, 0)
    assert gather_owners(1, 4, "ring") == (1, 0, 3, 2)
    assert scatter_owners(1, 4, "pairwise") == (2, 3, 0, 1)
    assert scatter_owners(1, 4, "ring") == (0, 3, 2, 1)


def test_bad_order_and_rank() -> None:
    with pytest.raises(ValueError, match=r"'rign'.*'pairwise', 'ring'"):
        gather_owners(0, 2, "rign")
    with pytest.raises(ValueError, match=r"rank=2.*0 \.\. 1"):
        scatter_owners(2, 2)
