"""Cells for the three GEMM kernels. A cell is a function `cell_*` that raises if something is wrong; run by interpreted.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# The interpreter truncates where it casts to bfloat16: one unit in the last place instead of half of one.
UNIT = {BF16: 2.0**-7, FP16: 2.0**-11, FP32: 2.0**-18}
PATIENCE = 20  # times that a kernel asks for a slice which does not come


def close(value: torch.Tensor, exact: torch.Tensor, terms: int) -> None:
    """value == exact (float64) up to one rounding to its dtype and float32 sums of so many terms of about one."""
    assert not value.isnan().any(), "poison was read, or something was not written"
    error = (value.double() - exact).abs()
    bound = exact.abs() * UNIT[value.dtype] + terms * 2.0**-21
    worst = int((error - bound).argmax())
    assert bool((error <= bound).all()), f"error {error.flatten()[worst]:.3e}, allowed {bound.flatten()[worst]:.3e}"


class Case:
    """Operands of one linear cut in slices. sizes: rows per slice, in row order; order: the table's order of slices."""

    def __init__(self, tokens: int, columns: int, sizes: tuple[int, ...], dtype: torch.dtype, **how: Any) -> None:
        from commfuse_dp.kernels.table import SliceEntry, SliceTable

        generator = torch.Generator().manual_seed(tokens * 1000 + columns)
        out, pad = sum(sizes), how.get("row_padding", 0)
        partial = how.get("partial", dtype)
        self.order: tuple[int, ...] = how.get("order", tuple(range(len(sizes))))
        self.words = how.get("words", False)
        self.value = how.get("value", 5)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.x, self.dy = random(tokens, columns + pad)[:, :columns], random(tokens, out + pad)[:, :out]
        self.weight, self.bias = random(out, columns), random(out)
        self.starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self.sizes = sizes
        self.pad = torch.zeros(len(sizes) + 1, dtype=torch.int32)
        self.slices = [torch.full((size, columns + pad), torch.nan, dtype=dtype)[:, :columns] for size in sizes]
        self.biases = [torch.full((size,), torch.nan, dtype=dtype) for size in sizes]
        self.partials = [torch.full((size, columns + pad), torch.nan, dtype=partial)[:, :columns] for size in sizes]
        biased = how.get("biased", True)

        def entry(number: int, data: torch.Tensor, bias: torch.Tensor | None, word: bool) -> Any:
            pad = self.pad if word else None
            return SliceEntry(data, self.starts[number], bias, pad, number + 1, self.value, word and how.get("exact", False))

        first = self.order[0] if self.order else -1
        self.table = SliceTable(
            [
                entry(number, self.slices[number], self.biases[number] if biased else None, self.words and number != first)
                for number in self.order
            ]
        )
        self.destinations = SliceTable([entry(number, self.partials[number], None, True) for number in self.order])
        for number in range(len(sizes)):
            if not self.words or number == first:
                self.deliver(number)
        self.y_exact = self.x.double() @ self.weight.double().t() + (self.bias.double() if biased else 0)
        self.dx_exact = self.dy.double() @ self.weight.double()
        self.dw_exact = self.dy.double().t() @ self.x.double()

    def deliver(self, number: int, word: int | None = None) -> None:
        """The data of a slice comes, then its word."""
        rows = slice(self.starts[number], self.starts[number] + self.sizes[number])
        self.slices[number].copy_(self.weight[rows])
        self.biases[number].copy_(self.bias[rows])
        self.pad[number + 1] = self.value if word is None else word

    def address(self, number: int) -> int:
        return self.pad.data_ptr() + 4 * (number + 1)

    def poison(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=dtype)


def tile(*shape: int, **how: Any) -> Any:
    from commfuse_dp.kernels.tiles import TileConfig

    return TileConfig(*shape, group=how.pop("group", 2), **how)


def check_all(case: Case, config: Any, out: torch.dtype | None = None, programs: int = 3) -> None:
    """All three products with one configuration."""
    from commfuse_dp.kernels.gemm_dgrad import gemm_dgrad
    from commfuse_dp.kernels.gemm_forward import gemm_forward
    from commfuse_dp.kernels.gemm_wgrad import gemm_wgrad

    tokens, columns = case.x.shape
    rows = sum(case.sizes)
    out = out or case.x.dtype
    y = case.poison(tokens, rows, dtype=out)
    gemm_forward(case.x, case.table, y, config=config, programs=programs)
    close(y, case.y_exact, columns)
    dx = case.poison(tokens, columns, dtype=out)
    gemm_dgrad(case.dy, case.table, dx, config=config, programs=programs)
    close(dx, case.dx_exact, rows)
    for epoch in (2, 3):  # the second launch finds the counters as the first did
        gemm_wgrad(case.dy, case.x, case.destinations, epoch=epoch, config=config, programs=programs)
        expected = [case.value + epoch if size else case.value for size in case.sizes]  # an empty one has nobody to tell
        assert case.pad[1:].tolist() == expected, (case.pad.tolist(), expected)
        assert not case.destinations.counters.any()
    close(torch.cat([*case.partials]), case.dw_exact, tokens)


# ---- against float64 -------------------------------------------------------------------------------------------------
def cell_ragged_bf16() -> None:
    check_all(Case(19, 21, (7, 0, 5, 9), BF16, order=(2, 3, 0, 1)), tile(16, 16, 16, flat=True))


def cell_ragged_fp16_strided() -> None:
    case = Case(21, 18, (5, 6, 17), FP16, order=(1, 2, 0), row_padding=5)
    check_all(case, tile(16, 16, 16, halves=True), out=FP32, programs=2)


def cell_dgrad_is_rounded_once() -> None:
    """At 2, 8 and 64 slices the error is that of one GEMM: sums stay in float32 to the end. (Rounded by torch: see UNIT.)"""
    from commfuse_dp.kernels.gemm_dgrad import gemm_dgrad

    for slices in (2, 8, 64):
        case = Case(16, 16, (2,) * slices, BF16 if slices == 8 else FP16)
        dx = case.poison(16, 16, dtype=FP32)
        gemm_dgrad(case.dy, case.table, dx, config=tile(16, 16, 16), programs=1)
        stock = (case.dy @ case.weight).double() - case.dx_exact
        assert (dx.to(case.dy.dtype).double() - case.dx_exact).norm() <= 1.1 * stock.norm(), slices


def cell_ragged_fp32() -> None:
    check_all(Case(17, 35, (3, 20), FP32), tile(16, 32, 16), programs=1)


def cell_even_bf16() -> None:
    check_all(Case(32, 32, (16, 32), BF16, order=(1, 0)), tile(16, 16, 16, halves=True))


def cell_tma_with_tails() -> None:
    """Tokens and columns end inside a tile; slices are whole steps, as dgrad needs."""
    check_all(Case(19, 24, (16, 0, 32), BF16, order=(2, 0, 1)), tile(16, 16, 16, tma=True, flat=True), out=FP32)


def cell_tma_ragged_slices() -> None:
    from commfuse_dp.kernels.gemm_forward import gemm_forward
    from commfuse_dp.kernels.gemm_wgrad import gemm_wgrad

    case, config = Case(20, 24, (8, 24, 16), FP16), tile(16, 16, 16, tma=True)
    y = case.poison(20, 48, dtype=FP16)
    gemm_forward(case.x, case.table, y, config=config, programs=2)
    close(y, case.y_exact, 24)
    gemm_wgrad(case.dy, case.x, case.destinations, config=config, programs=2)
    close(torch.cat(case.partials), case.dw_exact, 20)


def cell_wider_and_narrower_partials() -> None:
    from commfuse_dp.kernels.gemm_wgrad import gemm_wgrad

    for dtype, partial in ((BF16, FP32), (FP32, BF16)):
        case = Case(20, 17, (6, 11), dtype, partial=partial)
        gemm_wgrad(case.dy, case.x, case.destinations, config=tile(16, 16, 16), programs=2)
        close(torch.cat(case.partials), case.dw_exact, 20)


def cell_several_slices_of_one_owner() -> None:
    """Owner 0 has rows 0 .. 9 in two slices, owner 1 the rest in three; the default configuration."""
    from commfuse_dp.kernels.gemm_forward import gemm_forward

    case = Case(9, 16, (5, 5, 3, 3, 2), FP32, order=(2, 3, 4, 0, 1), biased=False)
    y = case.poison(9, 18, dtype=FP32)
    gemm_forward(case.x, case.table, y)
    close(y, case.y_exact, 16)


def cell_chosen_by_name() -> None:
    """Through the choice of backends: 'triton' with its default tiles, interpreted."""
    from commfuse_dp.kernels.choice import Chooser
    from commfuse_dp.kernels.gemms import Gemms

    chooser = Chooser("triton", path=None)
    gemms = Gemms(chooser)
    case = Case(9, 12, (5, 3), BF16, order=(1, 0), partial=FP32)
    y, dx = case.poison(9, 8, dtype=BF16), case.poison(9, 12, dtype=FP32)
    gemms.forward(case.x, case.table, y)
    gemms.dgrad(case.dy, case.table, dx)
    gemms.wgrad(case.dy, case.x, case.destinations)
    close(y, case.y_exact, 12)
    close(dx, case.dx_exact, 8)
    close(torch.cat(case.partials), case.dw_exact, 9)
    assert [row.backend for row in chooser.explain()] == ["triton"] * 3


def cell_inputs_that_are_not_dense() -> None:
    """A gradient that was expanded, an input that was transposed; y is the left part of a wider matrix."""
    from commfuse_dp.kernels.gemm_dgrad import gemm_dgrad
    from commfuse_dp.kernels.gemm_forward import gemm_forward

    case, config = Case(18, 20, (4, 9), FP32), tile(16, 16, 16)
    y = torch.zeros(18, 40)
    gemm_forward(case.x.t().contiguous().t(), case.table, y[:, :20], config=config, programs=2)
    close(y[:, :13], case.y_exact, 20)
    assert not y[:, 13:].any(), "columns beyond the slices were written"
    dx = case.poison(18, 20, dtype=FP32)
    gemm_dgrad(torch.ones(1, 1).expand(18, 13), case.table, dx, config=config, programs=2)
    close(dx, case.weight.double().sum(0).expand(18, 20), 13)


def cell_nothing_to_do() -> None:
    """No tokens, no columns, no slices."""
    from commfuse_dp.kernels.gemm_dgrad import gemm_dgrad
    from commfuse_dp.kernels.gemm_forward import gemm_forward
    from commfuse_dp.kernels.gemm_wgrad import gemm_wgrad
    from commfuse_dp.kernels.table import SliceEntry, SliceTable

    case = Case(0, 8, (4, 3), FP32)
    gemm_forward(case.x, case.table, torch.empty(0, 7))
    gemm_dgrad(case.dy, case.table, torch.empty(0, 8))
    gemm_wgrad(case.dy, case.x, case.destinations, epoch=1)
    assert not torch.cat(case.partials).any() and case.pad[1:].tolist() == [6, 6], "the gradient is zero, and signalled"
    case = Case(3, 0, (4, 3), FP32)
    y = case.poison(3, 7, dtype=FP32)
    gemm_forward(case.x, case.table, y)
    close(y, case.bias.double().expand(3, 7), 0)
    none = SliceTable([SliceEntry(torch.empty(0, 8), 0)])
    dx = torch.ones(3, 8)
    gemm_dgrad(torch.empty(3, 0), none, dx)
    gemm_forward(torch.ones(3, 8), none, torch.empty(3, 0))
    gemm_wgrad(torch.empty(3, 0), torch.ones(3, 8), none)
    assert not len(none) and not dx.any()


def cell_operands_that_do_not_fit() -> None:
    from commfuse_dp.kernels.gemm_dgrad import gemm_dgrad
    from commfuse_dp.kernels.gemm_forward import gemm_forward
    from commfuse_dp.kernels.gemm_wgrad import gemm_wgrad

    case = Case(4, 8, (4, 3), FP32)
    y, dx = torch.empty(4, 7), torch.empty(4, 8)
    wrong: list[tuple[Callable[[], None], str]] = [
        (lambda: gemm_forward(case.x[:, :7], case.table, y), "at least 8 columns"),
        (lambda: gemm_forward(case.x, case.table, y[:3]), "as many rows as x"),
        (lambda: gemm_forward(case.x.half(), case.table, y), "allowed here: torch.float32"),
        (lambda: gemm_forward(case.x, case.table, torch.empty(8, 14)[::2, ::2]), "dense columns or dense rows"),
        (lambda: gemm_dgrad(case.dy[:, :6], case.table, dx), "at least 7 columns"),
        (lambda: gemm_dgrad(case.dy, case.table, dx.double()), "allowed here"),
        (lambda: gemm_wgrad(case.dy, case.x[:3], case.destinations), "as many rows as dy"),
        (lambda: gemm_wgrad(case.dy, case.x.half(), case.destinations), "allowed here: torch.float32"),
        (lambda: gemm_dgrad(case.dy, case.table, dx, config=tile(16, 16, 16, tma=True)), "TMA needs"),
    ]
    check_refused(wrong)


def check_refused(wrong: list[tuple[Callable[[], None], str]]) -> None:
    """(call, part of the text of its ValueError)."""
    for call, message in wrong:
        try:
            call()
        except ValueError as error:
            assert message in str(error), (message, str(error))
        else:
            raise AssertionError(f"accepted: {message}")


# ---- arrivals --------------------------------------------------------------------------------------------------------
def run_with_arrivals(case: Case, launch: Callable[[], None]) -> list[int]:
    """Launch with all slices but the first missing; each one comes after the kernel has asked for it, in
    the case's order, and not before.

    Returns the slices in the order in which the kernel asked for them, repetitions left out.
    """
    from tests.conformance.kernels.interpreting import watched

    numbers = {case.address(number): number for number in case.order}
    missing = [number for number in case.order[1:] if case.sizes[number]]
    asked: Counter[int] = Counter()
    seen: list[int] = []

    def watch(_operation: str, address: int) -> None:
        number = numbers.get(address)
        if number is None:
            return
        if not seen or seen[-1] != number:
            seen.append(number)
        while missing and missing[0] != number and asked[missing[0]]:  # the kernel has found it there and gone on
            case.deliver(missing.pop(0))
        if number not in missing:
            return
        asked[number] += 1
        if asked[number] > 1 and number == missing[0]:
            case.deliver(missing.pop(0))
        elif asked[number] > PATIENCE:
            raise TimeoutError(f"still waiting for slice {number}")

    with watched(watch):
        launch()
    return seen


def arrivals_forward(programs: int = 1, flat: bool = False, tma: bool = False) -> list[int]:
    from commfuse_dp.kernels.gemm_forward import gemm_forward

    case = Case(20, 16, (16, 8, 16, 24), BF16, order=(2, 3, 0, 1), words=True)
    y = case.poison(20, 64, dtype=BF16)
    config = tile(16, 16, 16, flat=flat, tma=tma)
    seen = run_with_arrivals(case, lambda: gemm_forward(case.x, case.table, y, config=config, programs=programs))
    close(y, case.y_exact, 16)
    return seen


def arrivals_dgrad() -> list[int]:
    from commfuse_dp.kernels.gemm_dgrad import gemm_dgrad

    case = Case(20, 16, (5, 9, 16, 7), FP32, order=(1, 3, 2, 0), words=True)
    dx = case.poison(20, 16, dtype=FP32)
    seen = run_with_arrivals(case, lambda: gemm_dgrad(case.dy, case.table, dx, config=tile(16, 16, 16), programs=2))
    close(dx, case.dx_exact, 37)
    return seen


def cell_forward_waits_in_order_of_arrival() -> None:
    assert arrivals_forward() == [3, 0, 1], "own slice without a wait, then the others, each asked for once it is needed"


def cell_forward_waits_in_every_program() -> None:
    assert arrivals_forward(programs=2, tma=True)[:3] == [3, 0, 1]


def cell_dgrad_waits_in_order_of_arrival() -> None:
    assert arrivals_dgrad()[:3] == [3, 2, 0]


def cell_a_program_waits_once_per_slice() -> None:
    """Everything is there: two slices with words, many tiles each, two programs: four questions, whatever the tiles."""
    from commfuse_dp.kernels.gemm_dgrad import gemm_dgrad
    from commfuse_dp.kernels.gemm_forward import gemm_forward
    from tests.conformance.kernels.interpreting import watched

    case = Case(40, 32, (16, 16, 16), FP32, order=(1, 0, 2), words=True)
    for number in range(3):
        case.deliver(number)
    questions: list[int] = []
    config = tile(16, 16, 16)
    with watched(lambda _operation, address: questions.append(address)):
        gemm_forward(case.x, case.table, torch.empty(40, 48), config=config, programs=2)
        gemm_dgrad(case.dy, case.table, torch.empty(40, 32), config=config, programs=2)
    assert questions == [case.address(0), case.address(2)] * 4, questions


def cell_words_are_compared_cyclically() -> None:
    """The awaited value has wrapped around to the negative; a word just below it waits, one above passes."""
    from commfuse_dp.kernels.gemm_forward import gemm_forward

    case = Case(4, 16, (3, 4, 5), FP32, words=True, value=2**31 - 2)
    case.pad[:] = 2**31 - 1  # one short of value + epoch = 2**31 = -2**31
    case.deliver(1, -(2**31) + 7)  # ahead
    y = case.poison(4, 12, dtype=FP32)
    deliver = case.deliver
    case.deliver = lambda number, word=None: deliver(number, -(2**31))  # type: ignore[method-assign]
    seen = run_with_arrivals(case, lambda: gemm_forward(case.x, case.table, y, epoch=2, config=tile(16, 16, 16), programs=1))
    close(y, case.y_exact, 16)
    assert seen == [1, 2]


def signals(case: Case) -> list[tuple[int, list[bool]]]:
    """(slice, which slices are complete) at each signal of a wgrad of two programs."""
    from commfuse_dp.kernels.gemm_wgrad import gemm_wgrad
    from tests.conformance.kernels.interpreting import watched

    numbers = {case.address(number): number for number in case.order}
    found: list[tuple[int, list[bool]]] = []

    def watch(operation: str, address: int) -> None:
        if address in numbers:
            assert operation == "xchg", operation
            found.append((numbers[address], [not bool(partial.isnan().any()) for partial in case.partials]))

    with watched(watch):
        gemm_wgrad(case.dy, case.x, case.destinations, config=tile(16, 16, 16), programs=1)
    return found


def cell_wgrad_signals_each_slice_when_it_is_complete() -> None:
    case = Case(20, 24, (18, 0, 5, 16), FP32, order=(2, 3, 1, 0))
    assert signals(case) == [
        (2, [False, True, True, False]),
        (3, [False, True, True, True]),
        (0, [True, True, True, True]),
    ], "others first, own last; no signal for an empty slice (which is always complete)"


# ---- the cells above can fail ----------------------------------------------------------------------------------------
def cell_mutation_without_waits_is_caught() -> None:
    from commfuse_dp.kernels import gemm_dgrad, gemm_forward
    from tests.conformance.kernels.broken import no_wait

    modules: tuple[tuple[Any, Callable[[], list[int]]], ...] = ((gemm_forward, arrivals_forward), (gemm_dgrad, arrivals_dgrad))
    for module, arrivals in modules:
        kept = module.await_word
        module.await_word = no_wait
        try:
            arrivals()
        except AssertionError as error:
            assert "poison" in str(error), error
        else:
            raise AssertionError(f"{module.__name__} without waits passed")
        finally:
            module.await_word = kept


def cell_mutation_of_the_order_is_caught() -> None:
    """Slices that come in another order than the table's: the kernel asks for one that nobody brings before it."""
    from commfuse_dp.kernels.gemm_forward import gemm_forward

    case = Case(4, 16, (4, 4, 4), FP32, words=True)
    case.order = (0, 2, 1)
    y = case.poison(4, 12, dtype=FP32)
    try:
        run_with_arrivals(case, lambda: gemm_forward(case.x, case.table, y, config=tile(16, 16, 16), programs=1))
    except Exception as error:
        assert "still waiting for slice 1" in str(error), error
    else:
        raise AssertionError("a kernel that asks in another order passed")


def cell_mutation_of_the_count_is_caught() -> None:
    """A counter that was not reset makes a signal come too early."""
    case = Case(20, 24, (18, 5), FP32, order=(1, 0))
    case.destinations.counters[1] = 1
    early = [ready for number, ready in signals(case) if number == 0]
    assert early == [[False, True]], early
