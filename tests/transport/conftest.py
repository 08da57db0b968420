from __future__ import annotations

import pytest

from tests.support.transports import CLUSTERS, Cluster

# (kind of transport, test) -> why this kind does not run it. Everything else must pass on every kind.
SKIPS: dict[tuple[str, str], str] = {
    (
        "inproc-delayed",
        "test_double_close_and_use_after_close",
    ): "the goodbye comes after delayed messages; the plain kind covers it",
    (
        "p2p",
        "test_death_of_a_rank_is_named_on_all_survivors",
    ): "gloo's connections end only with their process; test_p2p kills processes",
}


@pytest.fixture(params=sorted(CLUSTERS))
def cluster(request: pytest.FixtureRequest) -> Cluster:
    name = request.node.originalname
    reason = SKIPS.get((request.param, name))
    if reason is not None:
        pytest.skip(reason)
    return CLUSTERS[request.param]()
