"""Transport hierarchical: who stands for whom, messages between any two ranks, losses on either level."""

from __future__ import annotations

import contextlib
import itertools
import threading
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commfuse_dp import collectives
from commfuse_dp.errors import CommFuseError, PeerLostError, TransportError
from commfuse_dp.program.hosts import Hosts, check_hosts
from commfuse_dp.program.orders import gather_owners, hierarchical_gather_owners, hierarchical_scatter_owners, scatter_owners
from commfuse_dp.transport.base import CHANNEL_COLLECTIVE, Tag
from tests.support import single
from tests.support.hosts import open_hierarchical, shuffled_hosts
from tests.support.inproc import Faults, InprocWorld
from tests.support.threads import ExchangeFn, run_ranks

shapes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))


@given(shapes)
def test_every_shard_comes_through_one_gateway_per_host(shape):
    count, per_host, seed = shape
    n = count * per_host
    hosts = Hosts.of(shuffled_hosts(n, per_host, seed))
    for rank, owner in itertools.product(range(n), range(n)):
        gateway = hosts.gateway(rank, owner)
        assert gateway in hosts.siblings(rank) and owner in hosts.rail(gateway)
        assert {hosts.gateway(sibling, owner) for sibling in hosts.siblings(rank)} == {gateway}
        assert hosts.distance(rank, owner) == 0 or hosts.place(rank)[0] != hosts.place(owner)[0]


@given(shapes)
def test_own_first_own_last_and_nobody_twice(shape):
    count, per_host, seed = shape
    n = count * per_host
    members = Hosts.of(shuffled_hosts(n, per_host, seed)).members
    for rank in range(n):
        gather, scatter = hierarchical_gather_owners(rank, members), hierarchical_scatter_owners(rank, members)
        assert sorted(gather) == sorted(scatter) == list(range(n))
        assert gather[0] == scatter[-1] == rank
    for step in range(n):  # a permutation in every step: no rank is turned to by two
        for order in (hierarchical_gather_owners, hierarchical_scatter_owners):
            assert len({order(rank, members)[step] for rank in range(n)}) == n


@pytest.mark.parametrize("n", [1, 4])
def test_one_host_is_the_pairwise_order(n):
    for rank in range(n):
        assert hierarchical_gather_owners(rank, [range(n)]) == gather_owners(rank, n)
        assert hierarchical_scatter_owners(rank, [range(n)]) == scatter_owners(rank, n)


@given(shapes)
def test_all_ranks_of_a_host_produce_for_a_gateway_in_its_order(shape):
    """[Note: One order on every way] in engine/routes/route.py."""
    count, per_host, seed = shape
    n = count * per_host
    hosts = Hosts.of(shuffled_hosts(n, per_host, seed))
    for ranks in hosts.members:
        for gateway in ranks:
            rail = set(hosts.rail(gateway))
            orders = {
                tuple(owner for owner in hierarchical_scatter_owners(rank, hosts.members) if owner in rail) for rank in ranks
            }
            assert len(orders) == 1 and orders.pop()[-1] == gateway


@pytest.mark.parametrize(
    ("identities", "part"), [("aaaa", "all ranks are on one"), ("abcd", "a host of its own"), ("aaab", r"\(0, 1, 2\), \(3,\)")]
)
def test_hosts_that_allow_no_hierarchy(identities, part):
    with pytest.raises(TransportError, match=part):
        check_hosts(identities)


@pytest.mark.parametrize("seed", [0, 1])
def test_collectives_between_all_ranks(seed):
    """Plain collectives send between any two ranks, on whichever level these meet."""
    n = 4
    world = InprocWorld(n, inbox_bytes=4096, deadline_s=20.0, faults=Faults(seed=seed, max_delay=3))
    identities = shuffled_hosts(n, 2, seed)

    def body(rank: int, exchange: ExchangeFn) -> None:
        transport = open_hierarchical(rank, identities, world, exchange, inbox_bytes=4096)
        mine = torch.arange(6, dtype=torch.float64) + 10 * rank
        for order in ("pairwise", "ring"):
            total = collectives.all_reduce(mine.clone(), transport=transport, order=order)
            assert torch.equal(total, sum(torch.arange(6, dtype=torch.float64) + 10 * r for r in range(n)))
        transport.close()

    run_ranks(n, body)


@pytest.mark.parametrize("waiting", [0, 2])
def test_a_rank_that_is_gone_is_named_on_its_own_and_on_the_other_host(waiting):
    n, gone = 4, 1
    world = InprocWorld(n, inbox_bytes=4096, deadline_s=20.0)

    def body(rank: int, exchange: ExchangeFn) -> None:
        transport = open_hierarchical(rank, ["a", "a", "b", "b"], world, exchange, inbox_bytes=4096)
        try:
            if rank == waiting:
                with pytest.raises(PeerLostError, match="rank 1") as caught:
                    single.receive(transport, gone, Tag(CHANNEL_COLLECTIVE))
                assert caught.value.peer == gone
        finally:
            transport.close()

    run_ranks(n, body)


@pytest.mark.parametrize("level", ["own host", "other host"])
def test_a_wait_on_one_level_hears_of_a_loss_on_the_other(level):
    """Rank 0 waits for a rank that lives but will not come, while rank 3 goes."""
    n, waits_for = 4, {"own host": 1, "other host": 2}[level]
    world = InprocWorld(n, inbox_bytes=4096, deadline_s=20.0)
    stays = threading.Event()

    def body(rank: int, exchange: ExchangeFn) -> None:
        transport = open_hierarchical(rank, ["a", "a", "b", "b"], world, exchange, inbox_bytes=4096)
        transport.expose([[8] * n])
        exchange("open")
        try:
            if rank == 3:
                transport._outer._channel.close()  # type: ignore[attr-defined]  # no goodbye: as if it died
                world.kill(rank)
            elif rank == 0:
                try:
                    with pytest.raises(PeerLostError, match="rank 3"):
                        for epoch in (1, 2):
                            transport.publish((0,), epoch)
                            transport.finish(epoch)
                            transport.wait_finished(epoch)
                finally:
                    stays.set()
            else:
                if rank != waits_for:
                    transport.publish((0,), 1)
                    transport.finish(1)
                assert stays.wait(15)
        finally:
            with contextlib.suppress(CommFuseError):
                transport.close()

    run_ranks(n, body)


def test_a_pull_of_what_is_passed_on_hears_of_the_loss_of_its_owner():
    """Rank 0 waits inside its host for the shard of rank 2, which itself has to pass on, and rank 2 goes."""
    n = 4
    world = InprocWorld(n, inbox_bytes=4096, deadline_s=20.0)

    def body(rank: int, exchange: ExchangeFn) -> None:
        transport = open_hierarchical(rank, ["a", "a", "b", "b"], world, exchange, inbox_bytes=4096)
        transport.expose([[8] * n])
        exchange("open")
        try:
            if rank == 2:
                transport._outer._channel.close()  # type: ignore[attr-defined]  # no goodbye: as if it died
            elif rank == 0:
                transport.publish((0,), 1)
                with pytest.raises(PeerLostError, match="rank 2"):
                    single.pull(transport, 2, 0, 1).wait()
        finally:
            exchange("end")
            with contextlib.suppress(CommFuseError):
                transport.close()

    run_ranks(n, body)


def test_shards_of_the_step_before_are_waited_for_between_the_steps():
    """An exception in that wait, a Ctrl-C, is planned for there, and not while a step begins."""
    n = 4
    world = InprocWorld(n, inbox_bytes=4096, deadline_s=20.0)

    def body(rank: int, exchange: ExchangeFn) -> None:
        transport = open_hierarchical(rank, ["a", "a", "b", "b"], world, exchange, inbox_bytes=4096)
        transport.expose([[8] * n])
        outer, late = transport._outer, []
        fetch = outer.fetch
        if rank == 0:
            outer.fetch = lambda *args, **more: late.append(partial(fetch, *args, **more))  # type: ignore[assignment]
        transport.publish((0,), 1)
        transport.finish(1)
        if rank == 0:
            relayed = transport._all_relayed
            transport._all_relayed = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                transport.wait_finished(1)
            transport._all_relayed, outer.fetch = relayed, fetch  # type: ignore[method-assign]
            for asked in late:
                asked()
        transport.wait_finished(1)
        transport.publish((0,), 2)
        transport.finish(2)
        transport.wait_finished(2)
        transport.close()

    def interrupted() -> bool:
        raise KeyboardInterrupt

    run_ranks(n, body)
