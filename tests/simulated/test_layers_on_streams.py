"""Layers of tensor parallelism on the simulated device: what `apply` serves of a model of parallelize_module, alone and below
`fully_shard`, over both stream-ordered transports. Torch's operations are accesses of the current stream, as in
test_programs_on_streams.py; ranks are threads with DTensor's collectives between them."""

from __future__ import annotations

import copy
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from commfuse_dp.integrations.attach import attachment
from commfuse_dp.integrations.attach.attachment import attachment_of
from commfuse_dp.integrations.attach.forwards import TENSOR_ATTACHMENT
from commfuse_dp.integrations.hugging_face_tp import register_attention
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from commfuse_dp.errors import MismatchError
from commfuse_dp.transport.symmetric.core import Core
from tests.parity.tensor_parallel.block import batch, parallelize, whole
from tests.parity.tensor_parallel.test_tensor_layers import alike
from tests.parity.tensor_parallel.test_tensor_parallel import full
from tests.support import fake_nccl, fake_symmetric
from tests.support.fake_device import FakeWorld, Race
from tests.support.fake_grouped import FakeBoard
from tests.support.fake_nccl import open_fake_nccl
from tests.support.fake_symmetric import open_fake
from tests.support.serving import applied
from tests.support.threaded_groups import as_threads
from tests.support.threads import Gathering
from tests.support.versions import NEEDS_THREADS
from tests.support.watched import Watched

pytestmark = NEEDS_THREADS
RING = 1 << 14


class Streams:
    """Opens simulated transports in the place of real ones, over groups of threads."""

    def __init__(self, world: FakeWorld, kind: str) -> None:
        self.world, self.kind, self.opened = world, kind, []
        self._lock = threading.Lock()
        self._groups: dict[tuple[int, ...], Gathering] = {}

    def fail(self, rank: int) -> None:
        """A rank has raised: nobody waits for it."""
        for gathering in self._groups.values():
            gathering.fail()
        for owner, transport in self.opened:
            if owner == rank:
                (fake_symmetric if self.kind == "symmetric" else fake_nccl).die(transport)

    def open_for(self, config: Any, *, group: dist.ProcessGroup, device: torch.device, **more: Any) -> tuple[Any, str]:
        assert more["stream_ordered"], "opened for who waits on the host"
        members, rank = tuple(dist.get_process_group_ranks(group)), dist.get_rank(group)
        with self._lock:
            exchange = self._groups.setdefault(members, Gathering(len(members), 60.0)).of(rank)
        growing = more.get("growing", False)
        ring = 256 if growing else max(RING, 4 * more["least_ring"])
        own = self.world.devices[members[rank]].beside()
        if self.kind == "symmetric":
            devices = exchange(own)
            transport: Any = open_fake(self.world, rank, exchange, inbox_bytes=ring, deadline_s=20.0, members=devices)
        else:
            board = exchange(FakeBoard(self.world, members))[0]
            board.devices[rank] = own
            transport = open_fake_nccl(board, rank, exchange, inbox_bytes=ring)
        transport.growing = growing
        self.opened.append((members[rank], transport))
        return transport, "simulated"


def on_streams(kind: str, n: int, body: Callable[[int], Any], *, seed: int) -> list[Any]:
    world = FakeWorld(n, seed=seed, deferred=False, stands=True)
    streams = Streams(world, kind)

    def main(rank: int) -> Any:
        try:
            with Watched(world.devices[rank]):
                return body(rank)
        except BaseException:
            streams.fail(rank)
            raise

    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(attachment, "open_for", streams.open_for)
        return as_threads(n, main, timeout_s=60.0)


def run(model: nn.Module, steps: int, groups: Sequence[int]) -> list[torch.Tensor]:
    """Losses and parameters of training with the mean over the batches of `groups`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses = []
    for step in range(steps):
        for group in groups:
            tokens = batch(10 * step + group, length=12 + 2 * step)
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(0, 1))
            (loss / len(groups)).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(full(param).detach().clone() for param in model.parameters())]


def one_dimension(rank: int, world_size: int, kind: str, n: int, seed: int, settings: dict[str, Any]) -> None:
    source = whole()  # of one process: threads share the random numbers
    exact = run(copy.deepcopy(source), 2, (0,))

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
        model = parallelize(copy.deepcopy(source), mesh)
        with applied(model, **settings) as report:
            assert report.numel_by_path().keys() == {"column", "row", "stock"} and "simulated" in str(report)
            alike(run(model, 2, (0,)), exact, 1e-12)
            limit = attachment_of(model, TENSOR_ATTACHMENT).transport.message_limit
            assert limit > 256 and report.memory.share.ring == limit  # it has grown, and says so

    on_streams(kind, n, body, seed=seed)


def not_waited_for(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.support.fake_device.STANDS", 0.0)  # a host that stands may hide it
        patch.setattr(Core, "wait_for", lambda self, stream, conditions, places, doing, **more: None)
        with pytest.raises((Race, MismatchError)):  # whoever reads too early may find a wrong answer before the race is seen
            one_dimension(rank, world_size, "symmetric", 2, 0, {})


def test_what_is_used_before_it_has_come_is_found(workers: Any) -> None:
    workers(1).run(not_waited_for, timeout=100)


@pytest.mark.parametrize(
    ("kind", "n", "settings"),
    [
        ("symmetric", 2, {}),
        pytest.param("nccl", 3, {"slices_per_rank": 2, "order": "ring"}, marks=pytest.mark.slow),
        pytest.param("symmetric", 4, {"save_activations": "gathered"}, marks=pytest.mark.slow),
    ],
)
def test_tensor_parallel_layers(workers: Any, kind: str, n: int, settings: dict[str, Any]) -> None:
    workers(1).run(one_dimension, kind, n, 0, settings, timeout=100)


def two_dimensions(rank: int, world_size: int, kind: str, seed: int) -> None:
    source = whole()
    exact = run(copy.deepcopy(source), 2, (0, 1))[4:]

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize(copy.deepcopy(source), mesh["tp"])
        for block in model.layers:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        with applied(model) as report:
            paths = {row.name: row for row in report.rows}
            assert "data parallel: fused" in paths["layers.0.attention.wq.weight"].reason
            assert str(report).count("simulated") == 2  # two transports
            alike(run(model, 2, (rank // 2,))[2:], exact, 1e-12)
        assert attachment_of(model) is None and attachment_of(model, TENSOR_ATTACHMENT) is None

    on_streams(kind, 4, body, seed=seed)


@pytest.mark.parametrize("kind", ["nccl", pytest.param("symmetric", marks=pytest.mark.slow)])
def test_data_parallelism_over_them(workers: Any, kind: str) -> None:
    workers(1).run(two_dimensions, kind, 0, timeout=100)


def transformers_model(rank: int, world_size: int, kind: str, seed: int) -> None:
    import transformers

    from tests.parity.hugging_face_tp import models

    register_attention()
    torch.manual_seed(0)
    source = transformers.AutoModelForCausalLM.from_config(models.config_of("llama"), dtype=torch.float64)
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        with models.quiet():
            source.save_pretrained(folder)
        exact = models.train(models.load(folder), 2)

        one = threading.Lock()  # transformers sets torch's default dtype while it loads
        make = torch.distributed.init_device_mesh

        def together(*args: Any, **kwargs: Any) -> Any:
            one.release()
            try:
                return make(*args, **kwargs)
            finally:
                one.acquire()

        def body(rank: int) -> None:
            with one:
                model = models.load(folder, 2, attn_implementation="commfuse")
            dist.barrier()
            with applied(model) as report:
                assert {"column", "row"} <= report.numel_by_path().keys()
                models.alike(models.train(model, 2), exact, 1e-12)
                assert not report.gathered_inputs

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # its loading threads would be of no rank
            patch.setattr(torch.distributed, "init_device_mesh", together)
            on_streams(kind, 2, body, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nccl", "symmetric"])
def test_transformers(workers: Any, kind: str) -> None:
    workers(1).run(transformers_model, kind, 0, timeout=100)
