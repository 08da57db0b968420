"""The inbox reduction: its reference against collectives/summation.py, its kernel (emulated on the host, thread by thread)
against its reference, bit for bit; and the bytes it moves."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

from commfuse_dp.collectives.summation import sum_in_rank_order
from commfuse_dp.kernels.inbox_sum import (
    InboxSumArgument,
    inbox_sum,
    inbox_sum_op,
    inbox_sum_reference,
    plan_sum,
    scaling,
    tile_elements,
)
from commfuse_dp.kernels.packs import common_head
from tests.conformance.kernels.host.emulate import HostKernel, misaligned, same_bits

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = (BF16, FP16, FP32, FP64)
DIVISORS = (None, 1.0, 2.0, 3.0, 8.0, 7.5, 0.1, -4.0, 2.0**120, 1e-30)
# What the host library has (host/inbox_sum_main.h): the numbers of partials of each pair of dtypes.
COUNTS = {(p, o): [2] for p in DTYPES for o in DTYPES}
COUNTS[BF16, FP32] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 64]
COUNTS[FP32, BF16] += [1]
COUNTS[FP32, FP32] += [4]
COUNTS[FP16, FP16] += [16, 33]
COUNTS[FP64, FP64] += [11]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> HostKernel:
    return HostKernel("inbox_sum", tmp_path_factory.mktemp("host"))


def numbers(numel: int, dtype: torch.dtype, offset: int, generator: torch.Generator) -> torch.Tensor:
    """Normal numbers, some of them special: zeros of both signs, subnormals, the largest, infinities, NaN."""
    tensor = misaligned(numel, dtype, offset)
    tensor.copy_(torch.randn(numel, generator=generator, dtype=FP64))
    info = torch.finfo(dtype)
    special = torch.tensor(
        [0.0, -0.0, info.tiny, -info.tiny / 2, info.smallest_normal / 8, info.max, -info.max, float("inf"), float("nan"), 1.0]
    ).to(dtype)
    places = torch.randint(0, 4 * len(special), (numel,), generator=generator)
    return torch.where(places < len(special), special[places.clamp(max=len(special) - 1)], tensor, out=tensor)


def emulate(
    kernel: HostKernel, out: torch.Tensor, partials: list[torch.Tensor], divisor: float | None, accumulate: bool
) -> None:
    spec, argument, blocks = plan_sum(
        out.data_ptr(),
        [partial.data_ptr() for partial in partials],
        out.numel(),
        out_dtype=out.dtype,
        dtype=partials[0].dtype,
        divisor=divisor,
        accumulate=accumulate,
    )
    kernel.allow([*partials, out], [out])
    kernel.run(spec, ctypes.addressof(argument), blocks)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_equals_reference_bit_for_bit(kernel: HostKernel, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Random numbers of partials, sizes around packs and tiles, addresses aligned to the element only, divisors, aliases."""
    pick = random.Random(f"{dtype}{out_dtype}")
    generator = torch.Generator().manual_seed(DTYPES.index(dtype) * 4 + DTYPES.index(out_dtype))
    for _ in range(30 if len(COUNTS[dtype, out_dtype]) > 2 else 12):
        count = pick.choice(COUNTS[dtype, out_dtype])
        pack = 16 // dtype.itemsize
        tile = tile_elements(count if count <= 8 else 0, pack)
        numel = pick.choice((1, pack - 1, pack, pack + 1, 100, tile - 1, tile, tile + 1, tile + 3 * pack + 1, 2 * tile + 5))
        agree = pick.random() < 0.7  # the same distance from a 16-byte boundary for all, in elements
        offset = pick.randrange(pack)
        offsets = [offset if agree else pick.randrange(8) for _ in range(count + 1)]
        partials = [numbers(numel, dtype, offsets[i], generator) for i in range(count)]
        accumulate = pick.random() < 0.4
        out = numbers(numel, out_dtype, offsets[-1], generator)
        if dtype == out_dtype and not accumulate and pick.random() < 0.5:
            out = partials[pick.randrange(count)]
        divisor = pick.choice(DIVISORS)
        want = inbox_sum_reference(out.clone(), [p.clone() for p in partials], divisor=divisor, accumulate=accumulate)
        emulate(kernel, out, partials, divisor, accumulate)
        assert same_bits(out, want), (count, numel, offsets, divisor, accumulate)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 64])
def test_every_byte_is_touched_once_and_in_16s(kernel: HostKernel, count: int) -> None:
    numel = 3 * tile_elements(count if count <= 8 else 0, 8) + 5
    partials = [misaligned(numel, BF16, 3).fill_(1.0) for _ in range(count)]
    out = misaligned(numel, FP32, 3).fill_(0.0)  # element 3 + 5 lies on a boundary of both
    emulate(kernel, out, partials, None, False)
    assert kernel.watch.bytes_read == count * numel * 2
    assert kernel.watch.bytes_written == numel * 4
    assert kernel.watch.reads_of_16 == count * ((numel - 5) // 8)
    emulate(kernel, out, partials, None, True)
    assert kernel.watch.bytes_read == count * numel * 2 + numel * 4
    assert (out == 2 * count).all()


@pytest.mark.parametrize("count", [1, 2, 9, 64])
def test_zeros_keep_their_sign(kernel: HostKernel, count: int) -> None:
    out = torch.ones(40)
    emulate(kernel, out, [torch.full((40,), -0.0, dtype=BF16) for _ in range(count)], 2.0, False)
    assert (out == 0).all() and out.signbit().all()


def test_addresses_that_do_not_agree_are_read_by_elements(kernel: HostKernel) -> None:
    partials = [misaligned(999, BF16, offset).fill_(1.0) for offset in (0, 1)]
    out = misaligned(999, FP32, 0)
    emulate(kernel, out, partials, None, False)
    assert kernel.watch.reads_of_16 == 0 and kernel.watch.reads == 2 * 999 and (out == 2).all()


def test_the_emulation_can_fail(kernel: HostKernel) -> None:
    """A launch that reads past an end, and one whose head does not fit its addresses, are noticed."""
    partials, out = [misaligned(100, BF16, 0).fill_(1.0) for _ in range(2)], misaligned(100, FP32, 0)
    pointers = [partial.data_ptr() for partial in partials]
    spec, argument, blocks = plan_sum(out.data_ptr(), pointers, 100, out_dtype=FP32, dtype=BF16, divisor=None, accumulate=False)
    kernel.allow([partials[0], partials[1][:99], out], [out])
    with pytest.raises(AssertionError, match="outside"):
        kernel.run(spec, ctypes.addressof(argument), blocks)
    argument.head = 1
    kernel.allow([*partials, out], [out])
    with pytest.raises(AssertionError, match="misaligned"):
        kernel.run(spec, ctypes.addressof(argument), blocks)


def test_layout_of_the_argument(kernel: HostKernel) -> None:
    assert kernel.library.argument_bytes() == ctypes.sizeof(InboxSumArgument) == 552


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_reference_equals_the_sum_in_rank_order(count: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    partials = [numbers(200, dtype, 0, generator).view(10, 20) for _ in range(count)]
    for divisor in (None, 3.0, 4.0):
        want = torch.empty(10, 20, dtype=out_dtype)
        sum_in_rank_order(want, partials, own_rank=0, scale_divisor=divisor)
        out = torch.empty(10, 20, dtype=out_dtype)
        assert inbox_sum(out, partials, divisor=divisor) is out
        assert same_bits(out, want)
        before = numbers(200, out_dtype, 0, generator).view(10, 20)
        out.copy_(before)
        inbox_sum(out, partials, divisor=divisor, accumulate=True)
        assert same_bits(out, before + want)
        if dtype == out_dtype:
            mine = partials[-1].clone()
            inbox_sum(mine, [*partials[:-1], mine], divisor=divisor)
            assert same_bits(mine, want)


def test_scaling_multiplies_only_where_that_is_the_division() -> None:
    assert scaling(None, FP32) == scaling(1, FP32) == (0, 1.0)
    assert scaling(8, FP32) == (1, 0.125) and scaling(-0.5, FP32) == (1, -2.0)
    assert scaling(6, FP32) == (2, 6.0) and scaling(0.0, FP32) == (2, 0.0)
    assert scaling(2.0**126, FP32)[0] == 1 and scaling(2.0**127, FP32)[0] == 2 and scaling(2.0**127, FP64)[0] == 1


def test_common_head() -> None:
    assert common_head([(64, 2), (128, 4)], 8) == 0
    assert common_head([(64 + 6, 2), (128 + 12, 4)], 8) == 5
    assert common_head([(64, 2), (66, 2)], 8) is None
    assert common_head([(64, 4), (72, 2)], 4) == 0  # four halves are 8 bytes


def test_empty() -> None:
    out = torch.empty(0)
    assert inbox_sum(out, [torch.empty(0, dtype=BF16)] * 3, divisor=2.0, accumulate=True) is out


def test_wrong_calls() -> None:
    a, out, room = torch.ones(8), torch.empty(8), torch.ones(9)
    for text, call in {
        "no partials": lambda: inbox_sum(out, []),
        "partial 1 has 4 elements": lambda: inbox_sum(out, [a, a[:4]]),
        "out is torch.int32": lambda: inbox_sum(out.int(), [a]),
        "partial 0 is torch.int64": lambda: inbox_sum(out, [a.long()]),
        "partial 0 is not contiguous": lambda: inbox_sum(out, [torch.ones(8, 2)[:, 0]]),
        "out of shape": lambda: inbox_sum(torch.ones(8, 2)[:, 0], [a]),
        "partial 1 overlaps out": lambda: inbox_sum(a, [out, a.view(BF16)[:8]]),
        "partial 0 overlaps out": lambda: inbox_sum(room[:8], [room[1:], out]),
        "accumulating adds to": lambda: inbox_sum(a, [out, a], accumulate=True),
        "partial 0 is on meta": lambda: inbox_sum(out, [a.to("meta")]),
        "runs on CUDA tensors": lambda: inbox_sum(out, [a], implementation="kernel"),
    }.items():
        with pytest.raises(ValueError, match=text):
            call()


def test_registered_op() -> None:
    partials = [torch.randn(4, 5, dtype=BF16) for _ in range(3)]
    out = torch.zeros(4, 5)
    torch.library.opcheck(inbox_sum_op, (out, partials, 3.0, True), test_utils=("test_schema", "test_faketensor"))
    want = inbox_sum_reference(out.clone(), partials, divisor=3.0, accumulate=True)
    torch.ops.commfuse.inbox_sum(out, partials, 3.0, True)
    assert torch.equal(out, want)
