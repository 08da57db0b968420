"""Publishing: the kernel (emulated on the host, thread by thread) against torch's copies, bit for bit; work evenly shared."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from commfuse_dp.kernels.publish import (
    CAPACITIES,
    ITEM,
    TILE_PACKS,
    Launch,
    PublishPlan,
    Shard,
    plan_publish,
    publish,
    publish_op,
    publish_reference,
)
from tests.conformance.kernels.host.emulate import HostKernel, misaligned, same_bits

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = (BF16, FP16, FP32, FP64)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> HostKernel:
    return HostKernel("publish", tmp_path_factory.mktemp("host"))


def launches(sources: list[torch.Tensor], destinations: list[torch.Tensor]) -> list[Launch]:
    return plan_publish(
        [Shard(s.data_ptr(), d.data_ptr(), s.numel(), s.dtype, d.dtype) for s, d in zip(sources, destinations, strict=True)]
    )


def emulate(kernel: HostKernel, sources: list[torch.Tensor], destinations: list[torch.Tensor], blocks: int) -> list[Launch]:
    planned = launches(sources, destinations)
    kernel.allow(sources, destinations)
    for launch in planned:
        kernel.run(launch.spec, launch.argument.ctypes.data, min(blocks, launch.tiles))
    return planned


def shards(
    pick: random.Random, count: int, dtypes: tuple[torch.dtype, ...], to: torch.dtype, largest: int
) -> tuple[list, list]:
    generator = torch.Generator().manual_seed(pick.randrange(1 << 30))
    sources, destinations = [], []
    for _ in range(count):
        dtype = pick.choice(dtypes)
        numel = pick.choice((0, 1, 3, 7, 8, 64, 1000, largest, 4096, 8192, 8193))
        offset = pick.randrange(8)
        source = misaligned(numel, dtype, offset)
        source.copy_(torch.randn(numel, generator=generator) * 10 ** pick.uniform(-9, 9))
        sources.append(source)
        destinations.append(misaligned(numel, to, offset if pick.random() < 0.7 else pick.randrange(8)))
    return sources, destinations


@pytest.mark.parametrize("to", DTYPES)
def test_kernel_equals_reference_bit_for_bit(kernel: HostKernel, to: torch.dtype) -> None:
    """All source dtypes in one launch, sizes around packs and tiles, empty shards, addresses aligned to the element only."""
    pick = random.Random(str(to))
    for blocks in (1, 3, 8):
        sources, destinations = shards(pick, 16, DTYPES, to, 20000)
        want = [torch.empty_like(d) for d in destinations]
        publish_reference(sources, want)
        assert len(emulate(kernel, sources, destinations, blocks)) == 1
        for index, (got, right) in enumerate(zip(destinations, want, strict=True)):
            assert same_bits(got, right), (blocks, index, sources[index].dtype, sources[index].numel())


def test_every_value_of_the_half_types(kernel: HostKernel) -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    sources = [bits.view(BF16), bits.view(FP16)]
    for to in DTYPES:
        destinations = [torch.empty(len(bits), dtype=to) for _ in sources]
        want = [source.to(to) for source in sources]
        emulate(kernel, sources, destinations, 5)
        assert all(same_bits(got, right) for got, right in zip(destinations, want, strict=True))


@pytest.mark.parametrize("count", [100, 500])
def test_many_shards_are_one_launch(kernel: HostKernel, count: int) -> None:
    pick = random.Random(count)
    sources, destinations = shards(pick, count, (FP32, BF16), BF16, 300)
    (launch,) = emulate(kernel, sources, destinations, 7)
    assert dict(launch.spec.macros)["COMMFUSE_CAPACITY"] == ("120" if count == 100 else "1000")
    for source, got in zip(sources, destinations, strict=True):
        assert same_bits(got, source.to(BF16))
    assert kernel.watch.bytes_read == sum(s.numel() * s.itemsize for s in sources)
    assert kernel.watch.bytes_written == sum(d.numel() * 2 for d in destinations)


def test_more_shards_than_an_argument_holds_and_two_dtypes() -> None:
    planned = plan_publish([Shard(64, 64, 8, FP32, BF16)] * 1001 + [Shard(64, 64, 8, FP32, FP32)])
    assert [launch.spec.macros[0][1] for launch in planned] == ["bf16", "bf16", "float"]
    assert [int(launch.argument[:4].view(np.int32)[0]) for launch in planned] == [1000, 1, 1]


def test_aligned_shards_are_read_in_16s(kernel: HostKernel) -> None:
    sources = [misaligned(numel, FP32, 1) for numel in (4099, 12, 8)]
    destinations = [misaligned(s.numel(), BF16, 1) for s in sources]  # 3 elements on: 16 bytes there, 8 here
    emulate(kernel, sources, destinations, 2)
    assert kernel.watch.reads_of_16 == 1024 + 2 + 1
    assert kernel.watch.reads == kernel.watch.reads_of_16 + 3 * 3 + 1 + 1


def test_blocks_get_equal_shares() -> None:
    """Tiles are what is shared out, each of 16 KB of source: a large matrix beside a hundred norms keeps no block waiting."""
    (launch,) = plan_publish([Shard(0, 0, 4096, FP32, BF16)] * 100 + [Shard(0, 0, 4096 * 4096, FP32, BF16)])
    items = launch.argument[8:].view(ITEM)
    assert launch.tiles == 100 + 4096 * 4096 // (TILE_PACKS * 4)
    assert list(np.diff(items["end"][:101], prepend=0)) == [1] * 100 + [4096]
    for blocks in (1, 100, 1056):
        ends = [launch.tiles * (b + 1) // blocks for b in range(blocks)]
        shares = np.diff(ends, prepend=0)
        assert shares.sum() == launch.tiles and shares.max() - shares.min() <= 1


def test_the_emulation_can_fail(kernel: HostKernel) -> None:
    sources, destinations = [torch.ones(5000)], [torch.empty(5000, dtype=BF16)]
    (launch,) = launches(sources, destinations)
    launch.argument[8:].view(ITEM)["numel"][0] = 5001
    kernel.allow(sources, destinations)
    with pytest.raises(AssertionError, match="outside"):
        kernel.run(launch.spec, launch.argument.ctypes.data, 1)


def test_layout_of_the_argument(kernel: HostKernel) -> None:
    for capacity in CAPACITIES:
        assert kernel.library.argument_bytes(capacity) == 8 + capacity * ITEM.itemsize <= 32764


def test_plan_runs_again_and_knows_when_tensors_moved() -> None:
    sources, destinations = [torch.randn(4, 4), torch.randn(3)], [torch.empty(16, dtype=BF16), torch.empty(3, dtype=BF16)]
    sources[0].requires_grad_()
    plan = PublishPlan(sources, destinations)
    for _ in range(2):
        with torch.no_grad():
            sources[0].add_(1)
        plan.run()
        assert torch.equal(destinations[0], sources[0].detach().view(-1).to(BF16)) and not destinations[0].requires_grad
    assert plan.fits(sources, destinations) and len(plan) == 2
    sources[1] = sources[1].clone()
    assert not plan.fits(sources, destinations)


def test_nothing_to_publish() -> None:
    publish([], [])
    publish([torch.empty(0)], [torch.empty(0, dtype=BF16)])
    assert plan_publish([Shard(0, 0, 0, FP32, BF16)]) == []


def test_wrong_calls() -> None:
    a = torch.ones(8)
    for text, call in {
        "2 sources and 1 destinations": lambda: publish([a, a], [a]),
        "source 0 has 8 elements, its destination 4": lambda: publish([a], [a[:4]]),
        "source 0 is torch.int64": lambda: publish([a.long()], [a]),
        "destination 0 is not contiguous": lambda: publish([a], [torch.ones(8, 2)[:, 0]]),
        "source 0 is on meta": lambda: publish([a.to("meta")], [a]),
        "runs on CUDA tensors": lambda: publish([a], [a.clone()], implementation="kernel"),
    }.items():
        with pytest.raises(ValueError, match=text):
            call()


def test_registered_op() -> None:
    sources, destinations = [torch.randn(8), torch.randn(3)], [torch.zeros(8, dtype=BF16), torch.zeros(3, dtype=FP16)]
    torch.library.opcheck(publish_op, (sources, destinations), test_utils=("test_schema", "test_faketensor"))
    torch.ops.commfuse.publish(sources, destinations)
    assert torch.equal(destinations[1], sources[1].to(FP16))
