"""Wrong settings and wrong use: a clear error with the fix, on every rank, and nothing left behind."""

from __future__ import annotations

import functools
import mmap
import os
import socket
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

import commfuse_dp
from commfuse_dp import CommFuseConfig, CommFuseError, ConfigError, MismatchError, TransportError
from commfuse_dp.engine.room import most_bytes
from tests.parity.fsdp2 import pair
from tests.support.leftovers import assert_nothing_left, leftovers
from tests.support.versions import NEEDS_RESET


def still_trains(net: nn.Module, rank: int, world_size: int) -> None:
    """Stock FSDP2 is untouched after a refused apply()."""
    pair.assert_gradients_of_one_step(net, pair.build(), rank, world_size)


# ---- settings: no process group needed ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"prefetch_byte": 1}, ["'prefetch_byte'", "did you mean 'prefetch_bytes'", "Allowed:"]),
        ({"slice_per_rank": 2}, ["did you mean 'slices_per_rank'"]),
        ({"zzz": 2}, ["'zzz'", "Allowed:", "deadline_s"]),
        ({"transport": "carrier-pigeon"}, ["transport='carrier-pigeon'", "'shm'", "'tcp'", "'p2p'"]),
        ({"fuse": True}, ["fuse=True", "'auto'", "'always'", "'never'"]),
        ({"prefetch_bytes": 0}, ["prefetch_bytes=0", "greater than or equal to 1"]),
        ({"slices_per_rank": 0}, ["slices_per_rank=0"]),
        ({"deadline_s": 0}, ["deadline_s=0", "greater than or equal to 0.01"]),
        ({"deadline_s": float("inf")}, ["deadline_s=inf", "less than or equal to 1000000"]),
        ({"inbox_bytes": 1 << 62}, ["inbox_bytes=", "less than or equal to"]),
        ({"inbox_bytes": "much"}, ["inbox_bytes='much'"]),
    ],
)
def test_wrong_settings_name_the_key_the_value_and_what_is_allowed(settings, wanted):
    with pytest.raises(ConfigError) as error:
        CommFuseConfig(**settings)
    for part in wanted:
        assert part in str(error.value)
    assert isinstance(error.value, (CommFuseError, ValueError))


def test_settings_cannot_be_changed_later():
    with pytest.raises(Exception, match="frozen"):
        CommFuseConfig().order = "ring"  # type: ignore[misc]


# ---- use ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("function", ["apply", "remove", "claim"])
@pytest.mark.parametrize("given", [None, "model", [nn.Linear(2, 2)]], ids=["None", "text", "list"])
def test_what_is_no_model_is_named(function, given):
    with pytest.raises(ConfigError, match=rf"commfuse_dp\.{function}\(\) needs a model.*got a {type(given).__name__}$"):
        getattr(commfuse_dp, function)(given)


def misuse(rank: int, world_size: int) -> list[str]:
    texts = []

    def refused(call, *args) -> None:
        with pytest.raises(ConfigError) as error:
            call(*args)
        texts.append(str(error.value))

    before = leftovers()
    refused(commfuse_dp.apply, pair.Net())
    net = pair.build()
    refused(commfuse_dp.remove, net)
    refused(commfuse_dp.apply, net, {"fuse": "auto"})
    with pair.applied(net):
        refused(commfuse_dp.apply, net)
    refused(commfuse_dp.remove, net)
    with pair.applied(net.blocks[0]):
        refused(commfuse_dp.apply, net)
    still_trains(net, rank, world_size)
    del net
    assert_nothing_left(before)
    return texts


def test_apply_and_remove_out_of_order(workers):
    workers(2).run(misuse)  # gloo opens connections at first use: counted from the second call on
    for texts in workers(2).run(misuse):
        unsharded, early_remove, no_config, twice, second_remove, submodule = texts
        assert "fully_shard" in unsharded and "apply" in unsharded
        assert "apply() was not called" in early_remove
        assert "CommFuseConfig" in no_config and "dict" in no_config
        assert "twice" in twice and "remove" in twice
        assert "remove() already" in second_remove
        assert "'blocks.0'" in submodule and "remove" in submodule


def submodule(rank: int, world_size: int) -> None:
    """apply() on a part of a model serves that part alone; the rest stays stock."""
    stock, net = pair.build(), pair.build()
    with pair.applied(net.blocks[1]) as report:
        assert {row.name for row in report.rows} == {name for name, _ in net.blocks[1].named_parameters()}
        for step in range(3):
            pair.assert_gradients_of_one_step(net, stock, rank, world_size, step)
        assert report.probe.counters.grad_bytes_sent > 0


def test_apply_on_a_submodule(workers):
    workers(2).run(submodule)


def different(rank: int, world_size: int, what: str) -> str:
    before = leftovers()
    net = pair.build(3 if what != "layers" else 3 + (rank == 1))
    if what == "frozen" and rank == 1:
        net.head.weight.requires_grad_(False)
    settings = {"order": "ring" if rank == 1 and what == "order" else "pairwise"}
    if what == "transport":
        settings["transport"] = "tcp" if rank == 1 else "shm"
    with pytest.raises(MismatchError) as error:
        commfuse_dp.apply(net, pair.config(**settings))
    text = str(error.value)
    del net, error  # the error's traceback refers to the engine
    assert_nothing_left(before)
    return text


@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ("layers", ["parameter head.weight", "parameter blocks.3.norm.weight"]),
        ("frozen", ["head.weight", "requires_grad=True", "requires_grad=False"]),
        ("order", ["setting order", "'ring'", "'pairwise'"]),
        ("transport", ["setting transport", "'shm'", "'tcp'"]),
    ],
)
def test_ranks_that_differ_are_refused_on_all_ranks(workers, what, wanted):
    workers(2).run(_meet)
    texts = workers(2).run(different, what, timeout=30)
    assert texts[0] == texts[1]
    for part in [*wanted, "rank 0", "rank 1", "same"]:
        assert part in texts[0]


def unlike(rank: int, world_size: int, what: str) -> str:
    """Rank 1 cannot serve what rank 0 can."""
    before = leftovers()
    net = pair.build()
    if rank == 1 and what == "forward":
        net.blocks[1].up.forward = functools.partial(nn.Linear.forward, net.blocks[1].up)
    for block in [*net.blocks, net] if rank == 1 and what == "everything" else [net.blocks[1]] if rank == 1 else []:
        if what != "forward":
            block.set_all_reduce_hook(lambda gradient: None)
    with pytest.raises(MismatchError) as error:
        commfuse_dp.apply(net, pair.config(fuse="never" if what == "collectives" else "auto"))
    text = str(error.value)
    commfuse_dp.apply(net, pair.config(enabled=False))  # what nobody serves may differ
    del net, error
    assert_nothing_left(before)
    return text


@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ("forward", ["cannot serve 'blocks.1.up'", "forward of this Linear was replaced", "can.", "exclude=('blocks.1.up',)"]),
        ("group", ["cannot serve 'blocks.1.norm'", "an all-reduce hook", "can."]),
        ("everything", ["cannot serve 'embedding'", "an all-reduce hook", "can."]),
        ("collectives", ["'hooks' for 'blocks.1.norm' (fuse='never')", "'stock' (an all-reduce hook"]),
    ],
)
def test_what_one_rank_cannot_serve_is_refused_on_all_ranks(workers, what, wanted):
    workers(2).run(_meet)
    texts = workers(2).run(unlike, what, timeout=30)
    assert texts[0] == texts[1]
    for part in [*wanted, "rank 0", "rank 1"]:
        assert part in texts[0], texts[0]


def _meet(rank: int, world_size: int) -> None:
    with pair.applied(pair.build()):
        dist.all_gather_object([None] * world_size, rank)


def too_small(rank: int, world_size: int, settings: dict, transport: str) -> str:
    before = leftovers()
    net = pair.build()
    with pytest.raises(ConfigError) as error, pair.applied(net, transport=transport, **settings):
        pass
    still_trains(net, rank, world_size)
    text = str(error.value)
    del net, error  # the error's traceback refers to the engine
    assert_nothing_left(before)
    return text


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    "settings",
    [
        {"prefetch_bytes": 64, "inbox_bytes": 1 << 20},  # a row of `up` has 96 bytes: no number of slices helps
        {"prefetch_bytes": 512, "slices_per_rank": 1},
        {"inbox_bytes": 512, "slices_per_rank": 2},
    ],
    ids=["one-row-is-too-much", "prefetch_bytes", "inbox_bytes"],
)
def test_a_slice_larger_than_the_window_or_the_inbox(workers, settings, transport):
    workers(2).run(_meet)
    for text in workers(2).run(too_small, settings, transport, timeout=30):
        for part in ("layer", "bytes", *settings):
            assert part in text
        assert "raise prefetch_bytes and inbox_bytes" in text


def cut_finely(rank: int, world_size: int) -> None:
    """The number of slices that the error of `too_small` would give works; left to us, it is found."""
    # By default FSDP2 keeps the root's parameters after forward; what is kept on purpose comes on top of the window.
    stock, net = pair.build(reshard_after_forward=True), pair.build(reshard_after_forward=True)
    with pytest.raises(ConfigError) as error, pair.applied(net, prefetch_bytes=1024, slices_per_rank=1, transport="tcp"):
        pass
    assert "Set slices_per_rank to" in str(error.value)
    for slices in (19, None):
        with pair.applied(net, prefetch_bytes=1024, slices_per_rank=slices, transport="tcp") as report:
            for step in range(2):
                pair.assert_gradients_of_one_step(net, stock, rank, world_size, step)
            assert report.probe.counters.window_bytes_peak <= 2048


def test_more_slices_are_the_fix(workers):
    workers(2).run(cut_finely)


def unsupported_dtype(rank: int, world_size: int) -> str:
    class Odd(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.complex64))
            self.bias = nn.Parameter(torch.zeros(8, dtype=torch.complex64))

    net = pair.Net(1)
    net.odd = nn.Linear(8, 8)
    net.odd.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.complex64))
    net.odd.bias = None
    fully_shard(net.odd)
    pair.shard(net)
    with pair.applied(net) as report:
        (row,) = [row for row in report.rows if row.name == "odd.weight"]
        assert row.path in ("hooks", "stock") and "complex64" in row.reason
        pair.loss_of(net, pair.batch(rank, world_size, 0)).backward()
    with pytest.raises(ConfigError) as error:
        commfuse_dp.apply(net, pair.config(fuse="always"))
    return str(error.value)


def test_an_unsupported_dtype_stays_with_fsdp2_or_is_refused_if_fusion_is_a_must(workers):
    for text in workers(2).run(unsupported_dtype):
        assert "odd.weight" in text and "complex64" in text and "fuse='auto'" in text


def wrong_input(rank: int, world_size: int) -> None:
    """Errors of a fused linear are as clear as torch's own, and the model goes on working afterwards."""
    stock, net = pair.build(), pair.build()
    with pair.applied(net):
        for x in (torch.zeros(3, pair.WIDTH + 1), torch.zeros(3, pair.WIDTH, dtype=torch.float64), torch.zeros(())):
            texts = []
            for model in (stock, net):
                with pytest.raises((RuntimeError, IndexError)) as error:
                    model.blocks[0].up(x) if model is net else nn.Linear(pair.WIDTH, pair.HIDDEN)(x)
                texts.append(str(error.value))
            words = {3 * (pair.WIDTH + 1): [str(pair.WIDTH), str(pair.WIDTH + 1)]}.get(x.numel(), [])
            if x.dtype == torch.float64:
                words = ["dtype", "float64", "float32"]
            assert all(word in texts[1] for word in words), texts
        # Ranks are in step again, as all of them met the error at the same place.
        for step in range(2):
            pair.assert_gradients_of_one_step(net, stock, rank, world_size, step)


def test_input_of_wrong_width_or_dtype(workers):
    workers(2).run(wrong_input)


def alone(rank: int, world_size: int, transport: str) -> None:
    stock, net = pair.build(), pair.build()
    with pair.applied(net, transport=transport) as report:
        for step in range(2):
            pair.assert_gradients_of_one_step(net, stock, rank, world_size, step)
        counters = report.probe.counters
        assert counters.param_bytes_received == counters.grad_bytes_received == counters.exposed_ns == 0
        assert report.minimum_bytes_per_step == 0


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_world_size_one_works_without_communication(workers, transport):
    workers(1).run(alone, transport)


# ---- transports ---------------------------------------------------------------------------------------------------------
def elsewhere(rank: int, world_size: int, transport: str) -> str:
    """A rank that is on another host, as far as the transport can see."""
    from commfuse_dp.transport import select

    before = leftovers()
    identity = select.host_identity
    select.host_identity = lambda: f"{identity()}-{rank}"
    try:
        net = pair.build()
        if transport == "shm":
            with pytest.raises(TransportError) as error:
                commfuse_dp.apply(net, pair.config(transport=transport))
            text = str(error.value)
            del error
        else:
            with pair.applied(net, transport=transport) as report:
                text = f"{report.transport} {report.transport_reason}"
    finally:
        select.host_identity = identity
    still_trains(net, rank, world_size)
    del net
    assert_nothing_left(before)
    return text


def test_shared_memory_across_hosts_is_refused_and_auto_takes_tcp(workers):
    workers(2).run(_meet)
    for text in workers(2).run(elsewhere, "shm"):
        assert "2 ranks on 2 hosts" in text and "'tcp'" in text
    for text in workers(2).run(elsewhere, "auto"):
        assert text.startswith("tcp auto") and "2 hosts" in text


def no_memory(rank: int, world_size: int) -> tuple[str, int]:
    before = leftovers()
    net = pair.build()
    inbox = most_bytes(sum(param.numel() for param in net.parameters())) // 64 * 64  # one peer's ring
    pages = -(-inbox // mmap.PAGESIZE) * mmap.PAGESIZE
    with (
        mock.patch("commfuse_dp.transport.shm.transport.available_memory", lambda: 2 * pages + (64 << 20) - 1),
        pytest.raises(TransportError) as error,
    ):
        commfuse_dp.apply(net, pair.config(transport="shm", inbox_bytes=1 << 44))
    still_trains(net, rank, world_size)
    text = str(error.value)
    del net, error  # the error's traceback refers to the engine
    assert_nothing_left(before)
    return text, pages


def test_not_enough_shared_memory(workers):
    """A small model takes what is of use to it, whatever it may take."""
    workers(2).run(_meet)
    for text, pages in workers(2).run(no_memory):
        assert f"ask for {2 * pages} bytes" in text and f"(this one {pages})" in text and "inbox_bytes" in text


def bad_address(rank: int, world_size: int, address: str) -> str:
    before = leftovers()
    os.environ["COMMFUSE_TCP_ADDRESS"] = address
    try:
        net = pair.build()
        with pytest.raises(TransportError) as error:
            commfuse_dp.apply(net, pair.config(transport="tcp", deadline_s=5))
    finally:
        del os.environ["COMMFUSE_TCP_ADDRESS"]
    still_trains(net, rank, world_size)
    text = str(error.value)
    del net, error  # the error's traceback refers to the engine
    assert_nothing_left(before)
    return text


def test_an_address_that_is_not_ours(workers):
    workers(2).run(_meet)
    for text in workers(2).run(bad_address, "192.0.2.7"):  # TEST-NET-1: nobody has it
        assert "192.0.2.7" in text and "COMMFUSE_TCP_ADDRESS" in text


def taken_ports(rank: int, world_size: int) -> None:
    """Ports are free ones, found when they are needed: however many are taken, none is in the way."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        taken = []
        for port in range(probe.getsockname()[1] + 1, probe.getsockname()[1] + 200):
            sock = socket.socket()
            try:
                sock.bind(("127.0.0.1", port))
                sock.listen(1)
            except OSError:
                sock.close()
                continue
            taken.append(sock)
        try:
            net = pair.build()
            with pair.applied(net, transport="tcp"):
                pair.assert_gradients_of_one_step(net, pair.build(), rank, world_size)
        finally:
            for sock in taken:
                sock.close()


def test_a_taken_port_is_no_obstacle(workers):
    workers(2).run(taken_ports)


# ---- what FSDP2 refuses, too ------------------------------------------------------------------------------------------------
class Tied(nn.Module):
    """One weight in two linears, of two groups, of which `served` says whether CommFuse would take them."""

    def __init__(self, served: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4, bias=False))
        self.second = nn.Sequential(nn.Linear(4, 4, bias=False) if served else nn.Bilinear(4, 4, 4, bias=False))
        self.third = nn.Linear(4, 4, bias=False)
        if served:
            self.second[0].weight = self.first[0].weight
        else:
            self.third.weight = self.first[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.first(x))


def tied_over_groups(rank: int, world_size: int, served: bool) -> list[str]:
    texts = []
    for use in (False, True):
        net = Tied(served)
        for part in (net.first, net.second, net):
            fully_shard(part)
        if use:
            with pytest.raises(ConfigError) as error:
                commfuse_dp.apply(net, pair.config())
            texts.append(str(error.value))
            commfuse_dp.apply(net, pair.config(enabled=False))  # leaves it to FSDP2
        with pytest.raises(ValueError, match="shared with"):  # nothing has been changed
            net(torch.ones(2, 4))
    return texts


@NEEDS_RESET  # FSDP2 of torch 2.11 unties such weights while it shards them, and says nothing
@pytest.mark.parametrize("served", [True, False])
def test_a_weight_tied_over_two_groups_is_refused_as_by_fsdp2(workers, served):
    for texts in workers(2).run(tied_over_groups, served):
        wanted = ["'first.0.weight'", "'second.0.weight'" if served else "'third.weight'", "fully_shard([module_a, module_b])"]
        assert len(texts) == 1 and all(part in texts[0] for part in wanted), texts


def applied_meanwhile(rank: int, world_size: int) -> None:
    """FSDP2 fetches ahead as it was told to, when CommFuse comes and when it goes."""
    stock, net = pair.build(), pair.build()
    for model in (stock, net):
        pair.loss_of(model, pair.batch(rank, world_size, 0)).backward()
        model.zero_grad()

    def pending() -> list[object]:
        return [model.unshard(async_op=True) for block in (*net.blocks, net) for model in (block,)]

    for change in (lambda: commfuse_dp.apply(net, pair.config()), lambda: commfuse_dp.remove(net)):
        handles = pending()
        change()
        for handle in handles[:2]:
            handle.wait()
        pair.assert_gradients_of_one_step(net, stock, rank, world_size)
        for handle in handles[2:]:
            handle.wait()
        pair.assert_gradients_of_one_step(net, stock, rank, world_size, 1)


def test_apply_and_remove_while_an_unshard_is_pending(workers):
    workers(2).run(applied_meanwhile)


def excluded_in_vain(rank: int, world_size: int) -> list[str]:
    net, texts = pair.build(), []
    for call in (
        lambda: commfuse_dp.apply(net, pair.config(exclude=("head", "blocks.0.upp"))),
        lambda: commfuse_dp.claim(pair.Net(), pair.config(exclude=("blokcs.*",))),
        lambda: commfuse_dp.apply(net, pair.config(exclude=("head.weight",) if rank else ("head",))),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        texts.append(str(error.value))
    still_trains(net, rank, world_size)
    return texts


def test_an_exclude_that_matches_nothing_names_what_is_near(workers):
    for texts in workers(2).run(excluded_in_vain):
        wanted = [("'blocks.0.upp'", "'blocks.0.up'", "Net"), ("'blokcs.*'", "'blocks"), ("'head.weight'", "'head'")]
        for text, parts in zip(texts, wanted, strict=True):
            assert all(part in text for part in (*parts, "matches no module")), text
        assert "rank 1" in texts[2] or "exclude=" in texts[2]
