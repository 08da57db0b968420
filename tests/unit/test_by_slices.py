"""Tables, and the products by slices against float64 with waits and signals. No Triton."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from commfuse_dp.device.base import Word
from commfuse_dp.kernels import by_slices, tiles
from commfuse_dp.kernels.by_slices import Words
from commfuse_dp.kernels.choice import Chooser
from commfuse_dp.kernels.gemms import Gemms
from commfuse_dp.kernels.table import BIAS, DATA, FIELDS, FIRST_ROW, ROWS, STRIDE, VALUE, WORD, SliceEntry, SliceTable

GEMMS = Gemms(Chooser("blas", path=None))


def linear(tokens: int = 6, columns: int = 5, sizes: tuple[int, ...] = (3, 0, 4), dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    rows = sum(sizes)
    x, dy = torch.randn(tokens, columns, dtype=dtype), torch.randn(tokens, rows, dtype=dtype)
    weight, bias = torch.randn(rows, columns, dtype=dtype), torch.randn(rows, dtype=dtype)
    pad = torch.zeros(len(sizes), dtype=torch.int32)
    entries, outs, at = [], [], 0
    for number, size in enumerate(sizes):
        here = slice(at, at + size)
        entries.append(SliceEntry(weight[here], at, bias[here], pad, number, 7))
        outs.append(SliceEntry(torch.full((size, columns), torch.nan, dtype=dtype), at, None, pad, number, 9))
        at += size
    return x, dy, weight, bias, entries[::-1], outs


# ---- tables ----------------------------------------------------------------------------------------------------------
def test_lines_of_a_table() -> None:
    pad = torch.zeros(4, dtype=torch.int32)
    wide = torch.zeros(6, 24, dtype=torch.bfloat16)
    bias = torch.zeros(4, dtype=torch.bfloat16)
    table = SliceTable([SliceEntry(wide[:4, :16], 8, bias, pad, 3, 2**31 + 5), SliceEntry(wide[4:4, :16], 12, bias[:0])])
    line = table.lines.tolist()
    assert [line[DATA], line[FIRST_ROW], line[ROWS], line[STRIDE]] == [wide.data_ptr(), 8, 4, 24]
    assert [line[WORD], line[VALUE], line[BIAS]] == [pad.data_ptr() + 12, -(2**31) + 5, bias.data_ptr()]
    assert (table.rows, table.columns, table.total_rows, table.end_row, len(table)) == ((4,), 16, 4, 12, 1)
    assert table.vectored and table.alignments[1:] == (8, 8, 4)


def test_alignment_is_that_of_the_worst_slice() -> None:
    flat = torch.zeros(400, dtype=torch.bfloat16)
    assert flat.data_ptr() % 16 == 0
    even, odd = flat[:160].view(10, 16), flat[162:322].view(10, 16)
    assert SliceTable([SliceEntry(even, 0)]).vectored
    assert (
        not SliceTable([SliceEntry(even, 0), SliceEntry(odd, 16)]).vectored
        and SliceTable([SliceEntry(odd, 0)]).alignments.pointer == 4
    )
    x, dy = torch.zeros(4, 16, dtype=torch.bfloat16), torch.zeros(4, 24, dtype=torch.bfloat16)
    for first_row, wide in ((8, True), (4, False)):
        table = SliceTable([SliceEntry(even, first_row)])
        assert tiles.problem_of("forward", table, x, dy).vectored, "y is only written there"
        assert tiles.problem_of("dgrad", table, dy, x).vectored is wide
        assert tiles.problem_of("wgrad", table, dy, x).vectored is wide
    assert not tiles.problem_of("forward", table, torch.zeros(4, 20, dtype=torch.bfloat16)[:, :16], dy).vectored
    assert not SliceTable([SliceEntry(flat[:100].view(5, 20), 0)]).vectored, "rows of 40 bytes"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (lambda d: [SliceEntry(d[:4], 0), SliceEntry(d[:4], 3)], "rows 3 to 3 are in two slices"),
        (lambda d: [SliceEntry(d.t(), 0)], "dense columns"),
        (lambda d: [SliceEntry(d, 0), SliceEntry(d[:, :3], 8)], "must agree"),
        (lambda d: [SliceEntry(d, 0), SliceEntry(d.half(), 8)], "must agree"),
        (lambda d: [SliceEntry(d, 0, d[:, 0].contiguous()), SliceEntry(d, 8)], "in all slices or in none"),
        (lambda d: [SliceEntry(d, 0, d[0, :2])], "give 8 dense elements"),
        (lambda d: [SliceEntry(d, 0, None, torch.zeros(2, dtype=torch.int32), 2)], "int32 pad that has it"),
        (lambda d: [SliceEntry(d, -1)], "at least 0"),
    ],
)
def test_slices_that_do_not_agree(entries, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SliceTable(entries(torch.zeros(8, 4)))


def test_repoint() -> None:
    a, b, empty = torch.zeros(2, 4), torch.ones(3, 4), torch.zeros(0, 4)
    table = SliceTable([SliceEntry(a, 0), SliceEntry(empty, 2), SliceEntry(b, 2)])
    before = table.lines
    version = table.lines._version
    table.repoint([a, empty, b])
    assert table.lines._version == version, "nothing moved, nothing is copied"
    other = torch.full((3, 4), 2.0)
    table.repoint([a, empty, other])
    assert table.lines is before and table.lines.view(-1, FIELDS)[:, DATA].tolist() == [a.data_ptr(), other.data_ptr()]
    assert table.entries[1].data is other
    with pytest.raises(ValueError, match="give all of them"):
        table.repoint([a, other])
    with pytest.raises(ValueError, match="make a new table"):
        table.repoint([a, empty, torch.zeros(2, 4)])
    assert table.entries[1].data is other


def test_repoint_of_every_line() -> None:
    """Data, biases and words of all slices move; the lines are those of a table made anew."""

    def entries(seed: int) -> list[SliceEntry]:
        pad = torch.zeros(9, dtype=torch.int32)
        data = [torch.zeros(rows, 4) for rows in (2, 3, 1)]
        biases = [torch.zeros(rows) for rows in (2, 3, 1)]
        words = [(pad, seed, seed + 10), (None, 0, 0), (pad, seed + 1, 5)]
        return [SliceEntry(d, 5 * n, b, *w) for n, (d, b, w) in enumerate(zip(data, biases, words, strict=True))]

    old, new = entries(0), entries(3)
    table, fresh = SliceTable(old), SliceTable(new)
    words = [None if e.pad is None else Word(e.pad, e.index, e.value) for e in new]
    table.repoint([e.data for e in new], [e.bias for e in new if e.bias is not None], words)
    assert table.lines.tolist() == fresh.lines.tolist() and table.alignments == fresh.alignments
    assert [(e.data, e.pad, e.index, e.value) for e in table.entries] == [(e.data, e.pad, e.index, e.value) for e in new]
    same = table.lines._version
    table.repoint([e.data for e in new], [e.bias for e in new if e.bias is not None], words)
    assert table.lines._version == same
    later = [None if w is None else w._replace(value=w.value + 1) for w in words]
    table.repoint([e.data for e in new], [e.bias for e in new if e.bias is not None], later)
    assert table.lines.view(-1, FIELDS)[:, VALUE].tolist() == [14, 0, 6]


# ---- by slices -------------------------------------------------------------------------------------------------------
def test_products_by_slices() -> None:
    x, dy, weight, bias, entries, outs = linear()
    table, destinations = SliceTable(entries), SliceTable(outs)
    happened: list[tuple[str, int, int, bool]] = []

    def wait(entry: SliceEntry, epoch: int) -> None:
        happened.append(("wait", entry.first_row, epoch, False))

    def signal(entry: SliceEntry, epoch: int) -> None:
        happened.append(("signal", entry.first_row, epoch, not bool(entry.data.isnan().any())))

    y, dx = torch.full((6, 7), torch.nan, dtype=torch.float64), torch.full((6, 5), torch.nan, dtype=torch.float64)
    by_slices.gemm_forward(x, table, y, epoch=3, wait=wait)
    by_slices.gemm_dgrad(dy, table, dx, epoch=4, wait=wait)
    by_slices.gemm_wgrad(dy, x, destinations, epoch=5, signal=signal)
    torch.testing.assert_close(y, x @ weight.t() + bias)
    torch.testing.assert_close(dx, dy @ weight)
    torch.testing.assert_close(torch.cat([entry.data for entry in outs]), dy.t() @ x)
    assert happened == [
        *(("wait", 3, 3, False), ("wait", 0, 3, False), ("wait", 3, 4, False), ("wait", 0, 4, False)),
        *(("signal", 0, 5, True), ("signal", 3, 5, True)),
    ]
    for call in (
        lambda: by_slices.gemm_forward(x, table, y),
        lambda: by_slices.gemm_dgrad(dy, table, dx),
        lambda: by_slices.gemm_wgrad(dy, x, destinations),
    ):
        with pytest.raises(ValueError, match=r"has a word to (wait|signal)"):
            call()


def test_products_in_another_dtype() -> None:
    x, dy, weight, bias, _, _ = linear(dtype=torch.bfloat16)
    table = SliceTable([SliceEntry(weight[3:], 3, bias[3:]), SliceEntry(weight[:3], 0, bias[:3])])
    y, dx, dw = torch.empty(6, 7), torch.empty(6, 5), torch.empty(7, 5)
    GEMMS.forward(x, table, y)
    GEMMS.dgrad(dy, table, dx)
    GEMMS.wgrad(dy, x, SliceTable([SliceEntry(dw[:2], 0), SliceEntry(dw[2:], 2)]))
    x, dy, weight, bias = x.float(), dy.float(), weight.float(), bias.float()
    for value, exact in ((y, x @ weight.t() + bias), (dx, dy @ weight), (dw, dy.t() @ x)):
        torch.testing.assert_close(value, exact, rtol=2**-6, atol=2**-6)


def test_nothing_to_multiply() -> None:
    empty = SliceTable([SliceEntry(torch.empty(0, 4), 0)])
    dx = torch.ones(2, 4)
    GEMMS.forward(torch.ones(2, 4), empty, torch.empty(2, 0))
    GEMMS.dgrad(torch.empty(2, 0), empty, dx)
    GEMMS.wgrad(torch.empty(2, 0), torch.ones(2, 4), empty)
    assert not dx.any()


# ---- words -----------------------------------------------------------------------------------------------------------
def test_words_of_a_device_speak_for_the_current_stream() -> None:
    calls: list[tuple[object, ...]] = []

    class Recorder:
        def current_stream(self) -> str:
            return "stream"

        def wait_value(self, *arguments: object, exact: bool) -> None:
            calls.append(("wait", *arguments[:1], *arguments[2:], exact))

        def write_value(self, *arguments: object) -> None:
            calls.append(("write", *arguments[:1], *arguments[2:]))

    words = by_slices.words_of(Recorder())  # type: ignore[arg-type]
    pad = torch.zeros(4, dtype=torch.int32)
    entry = SliceEntry(torch.zeros(1, 1), 0, None, pad, 2, 2**31 - 1)
    assert words.wait is not None and words.signal is not None
    words.wait(entry, 1)
    words.signal(entry, 2)
    words.wait(replace(entry, value=2**31 + 5, exact=True), 1)
    assert calls == [
        *(("wait", "stream", 2, -(2**31), False), ("write", "stream", 2, -(2**31) + 1)),
        ("wait", "stream", 2, -(2**31) + 5, True),
    ], "an exact word is waited for as it is, without the epoch"
    assert Words() == (None, None)
