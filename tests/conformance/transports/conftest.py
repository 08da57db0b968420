from __future__ import annotations

import os
from typing import Any

import pytest

from tests.support.mpi import JOB_VARIABLE, SuiteJob
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
    (
        "mpi",
        "test_death_of_a_rank_is_named_on_all_survivors",
    ): "the launcher ends the whole job when a process dies; tests/parity/mpi kills processes",
    (
        "symmetric",
        "test_pull_before_publish_completes_after_it",
    ): "stream-ordered: a transfer is `done` at once, and the stream waits; test_symmetric has the same in streams",
    (
        "symmetric",
        "test_no_credit_until_release",
    ): "stream-ordered: try_reserve never returns None, the stream that copies waits for credit; see test_symmetric",
    (
        "symmetric",
        "test_same_tag_twice_in_flight_is_refused",
    ): "found by `expect`, before anything is sent; see test_symmetric",
}


@pytest.fixture(params=sorted(CLUSTERS))
def cluster(request: pytest.FixtureRequest) -> Cluster:
    name = request.node.originalname
    reason = SKIPS.get((request.param, name))
    if reason is not None:
        pytest.skip(reason)
    return CLUSTERS[request.param]()


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def _kind(item: pytest.Item) -> str | None:
    return _parameters(item).get("cluster", _parameters(item).get("kind"))


MPI_RANKS = 3  # of the job, at least. make test has MPI in tests/parity/mpi
WORLD = 3
# In larger worlds. p2p: a group for each lane; symmetric: streams as threads.
COSTLY = ("p2p", "symmetric")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _kind(item) == "mpi" or (_kind(item) in COSTLY and _parameters(item).get("world_size", 0) > WORLD):
            item.add_marker(pytest.mark.slow)


_JOB = pytest.StashKey[SuiteJob]()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Cases of kind `mpi` run in an MPI job, all together; here each reports how it went there."""
    if _kind(pyfuncitem) != "mpi" or JOB_VARIABLE in os.environ:
        return None
    session = pyfuncitem.session
    if _JOB not in session.stash:
        cases = [item for item in session.items if _kind(item) == "mpi"]
        ranks = max(MPI_RANKS, *(_parameters(item).get("world_size", 0) for item in cases))
        session.stash[_JOB] = SuiteJob([item.nodeid for item in cases], ranks)
    outcome, text = session.stash[_JOB].outcome(pyfuncitem.nodeid)
    if outcome != "passed":
        pytest.fail(text, pytrace=False)
    return True
