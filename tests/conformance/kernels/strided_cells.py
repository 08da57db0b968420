"""Cells for operands that lie in memory transposed, and for what the layers of tensor parallelism need besides: a bias for each
row of y, words that are waited for exactly, and the six products themselves. Run by interpreted.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.conformance.kernels.gemm_cells import BF16, FP16, FP32, Case, check_refused, close, run_with_arrivals, tile

LAYOUTS = tuple(itertools.product((False, True), repeat=2))


def turned(matrix: torch.Tensor, transposed: bool, padding: int = 0) -> torch.Tensor:
    """The same matrix, with dense rows in memory, `padding` elements between them, if it is to lie transposed."""
    if not transposed:
        return matrix
    columns, rows = matrix.t().shape
    wide = torch.full((columns, rows + padding), torch.nan, dtype=matrix.dtype)
    wide[:, :rows] = matrix.t()
    return wide[:, :rows].t()


def check_layouts(case: Case, config: Any, *, out: torch.dtype | None = None, padding: int = 0, programs: int = 2) -> None:
    """All three products, both of their operands in every layout."""
    from commfuse_dp.kernels.gemm_dgrad import gemm_dgrad
    from commfuse_dp.kernels.gemm_forward import gemm_forward
    from commfuse_dp.kernels.gemm_wgrad import gemm_wgrad

    (tokens, columns), rows, out = case.x.shape, sum(case.sizes), out or case.x.dtype
    for first, second in LAYOUTS:
        x, dy = turned(case.x, first, padding), turned(case.dy, first, padding)
        y = turned(case.poison(tokens, rows, dtype=out), second, padding)
        gemm_forward(x, case.table, y, config=config, programs=programs)
        close(y, case.y_exact, columns)
        dx = turned(case.poison(tokens, columns, dtype=out), second, padding)
        gemm_dgrad(dy, case.table, dx, config=config, programs=programs)
        close(dx, case.dx_exact, rows)
        for piece in case.partials:
            piece.fill_(torch.nan)
        gemm_wgrad(dy, turned(case.x, second, padding), case.destinations, config=config, programs=programs)
        close(torch.cat(case.partials), case.dw_exact, tokens)


def cell_layouts_ragged() -> None:
    check_layouts(Case(19, 21, (7, 0, 5, 9), FP32, order=(2, 3, 0, 1)), tile(16, 16, 16), padding=3)


def cell_layouts_ragged_fp16_in_halves() -> None:
    check_layouts(Case(21, 18, (5, 6, 17), FP16, order=(1, 2, 0)), tile(16, 16, 16, halves=True), out=FP32)


def cell_layouts_even() -> None:
    check_layouts(Case(32, 32, (16, 32), BF16, order=(1, 0)), tile(16, 16, 16, halves=True))


def cell_layouts_tma_with_tails() -> None:
    """Tokens and columns end inside a tile; slices are whole steps, as dgrad needs; what is dense begins at 16 bytes."""
    check_layouts(Case(24, 40, (16, 0, 32), BF16, order=(2, 0, 1)), tile(16, 16, 16, tma=True, flat=True), out=FP32)


def cell_row_bias() -> None:
    from commfuse_dp.kernels.gemm_forward import gemm_forward

    for config, dtype in ((tile(16, 16, 16), FP32), (tile(16, 16, 16, tma=True), BF16), (tile(16, 16, 16, halves=True), FP16)):
        case = Case(24, 40, (16, 8, 32), dtype, order=(2, 0, 1), biased=False)
        bias = torch.randn(24).to(dtype)
        for first, second in LAYOUTS:
            y = turned(case.poison(24, 56, dtype=dtype), second)
            gemm_forward(turned(case.x, first), case.table, y, row_bias=bias, config=config, programs=2)
            close(y, case.y_exact + bias.double()[:, None], 40)


def cell_a_row_bias_that_does_not_fit() -> None:
    from commfuse_dp.kernels import by_slices
    from commfuse_dp.kernels.gemm_forward import gemm_forward

    for forward in (gemm_forward, by_slices.gemm_forward):
        refuses_row_biases(forward)


def refuses_row_biases(forward: Callable[..., None]) -> None:
    case, plain = Case(4, 8, (4, 3), FP32), Case(4, 8, (4, 3), FP32, biased=False)
    y, bias = torch.empty(4, 7), torch.zeros(8)
    wrong: list[tuple[Callable[[], None], str]] = [
        (lambda: forward(case.x, case.table, y, row_bias=bias[:4]), "give one of them"),
        (lambda: forward(plain.x, plain.table, y, row_bias=bias), "4 dense elements"),
        (lambda: forward(plain.x, plain.table, y, row_bias=bias[::2]), "4 dense elements"),
        (lambda: forward(plain.x, plain.table, y, row_bias=bias[:4].half()), "dense elements of torch.float32"),
    ]
    check_refused(wrong)


# ---- words that name a message ---------------------------------------------------------------------------------------
def exact_arrivals() -> list[int]:
    """Slices of both products are asked for until their word is the very value; before that it is ahead of it."""
    from commfuse_dp.kernels.gemm_dgrad import gemm_dgrad
    from commfuse_dp.kernels.gemm_forward import gemm_forward

    def arrivals(gemm: Callable[..., None], given: str, made: str) -> list[int]:
        case = Case(20, 16, (16, 8, 16), FP32, order=(1, 2, 0), words=True, exact=True, value=7)
        case.pad[:] = 8  # of a message that came before, under a larger number
        exact = getattr(case, made)
        out = case.poison(*exact.shape, dtype=FP32)
        launch = partial(gemm, getattr(case, given), case.table, out, epoch=3, config=tile(16, 16, 16), programs=1)
        seen = run_with_arrivals(case, launch)
        close(out, exact, 40)
        return seen

    return arrivals(gemm_forward, "x", "y_exact") + arrivals(gemm_dgrad, "dy", "dx_exact")


def cell_exact_words_are_neither_counted_nor_moved_by_the_epoch() -> None:
    assert exact_arrivals() == [2, 0, 2, 0]


# ---- the six products of column- and row-parallel layers -------------------------------------------------------------
def cell_products_of_tensor_parallelism() -> None:
    from commfuse_dp.kernels.gemm_dgrad import gemm_dgrad
    from commfuse_dp.kernels.gemm_forward import gemm_forward
    from commfuse_dp.kernels.gemm_wgrad import gemm_wgrad

    for dtype in (FP32, BF16, FP16):
        check_layers(*(partial(gemm, config=tile(16, 16, 16)) for gemm in (gemm_forward, gemm_dgrad, gemm_wgrad)), dtype)


def cell_products_of_tensor_parallelism_by_slices() -> None:
    from commfuse_dp.kernels import by_slices

    for dtype in (FP32, BF16, FP16):
        check_layers(by_slices.gemm_forward, by_slices.gemm_dgrad, by_slices.gemm_wgrad, dtype)


def check_layers(
    gemm_forward: Callable[..., None], gemm_dgrad: Callable[..., None], gemm_wgrad: Callable[..., None], dtype: torch.dtype
) -> None:
    """h = x W^T + b with x by slices of tokens, dx, dW; y = h V^T by slices of tokens, dh, dV."""
    from commfuse_dp.kernels.table import SliceEntry, SliceTable

    generator = torch.Generator().manual_seed(6)
    width, features, cuts = 24, 20, (0, 5, 19, 32)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def poison(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=dtype)

    def table(rows: torch.Tensor) -> SliceTable:
        """Slices of tokens, each where it came; the last one first."""
        return SliceTable([SliceEntry(rows[low:high].clone(), low) for low, high in reversed([*itertools.pairwise(cuts)])])

    def room(columns: int) -> tuple[SliceTable, Callable[[], torch.Tensor]]:
        pieces = [poison(high - low, columns) for low, high in itertools.pairwise(cuts)]
        entries = [SliceEntry(piece, low) for piece, low in zip(pieces, cuts[:-1], strict=True)]
        return SliceTable(entries), lambda: torch.cat(pieces)

    x, dy, weight, bias = random(32, width), random(32, width), random(features, width), random(features)
    back, h, dh = random(width, features), random(32, features), random(32, features)
    wide = {name: tensor.double() for name, tensor in locals().items() if isinstance(tensor, torch.Tensor)}

    y = poison(32, features)
    gemm_forward(weight, table(x), y.t(), row_bias=bias)
    close(y, wide["x"] @ wide["weight"].t() + wide["bias"], width)
    slots, sent = room(width)
    gemm_wgrad(dh.t(), weight, slots)
    close(sent(), wide["dh"] @ wide["weight"], features)
    dw = poison(features, width)
    gemm_dgrad(dh.t(), table(x), dw)
    close(dw, wide["dh"].t() @ wide["x"], 32)

    slots, sent = room(width)
    gemm_wgrad(h.t(), back.t(), slots)
    close(sent(), wide["h"] @ wide["back"].t(), features)
    made = poison(32, features)
    gemm_forward(back.t(), table(dy), made.t())
    close(made, wide["dy"] @ wide["back"], width)
    dv = poison(width, features)
    gemm_dgrad(h.t(), table(dy), dv.t())
    close(dv, wide["dy"].t() @ wide["h"], 32)


# ---- all slices of a sequence, as ops/sequence/whole.py gives them to the kernels --------------------------------------
class OwnWords:
    """A transport alone: words of its own, and ranks that are all there are."""

    def __init__(self) -> None:
        from benchmarks.one_rank import NullDevice
        from commfuse_dp.transport.membership import Membership

        self.device, self.membership = NullDevice(), Membership(3)
        self.words: dict[int, torch.Tensor] = {}
        self.kernels_may_wait = True

    def own_words(self, count: int) -> torch.Tensor:
        return self.words.setdefault(count, torch.zeros(count, dtype=torch.int32))


def whole_sequences(dtype: torch.dtype) -> None:
    """Three batch entries, three ranks, of which one has nothing; a slice is up to three blocks. Twice, with other memory."""
    from commfuse_dp.collectives.bound import Owner
    from commfuse_dp.collectives.execution import Coming, Leaving
    from commfuse_dp.ops.sequence.rows import tokens_of
    from commfuse_dp.ops.sequence.whole import Product, WholeSequence
    from commfuse_dp.program.layout import Slice

    tokens, width, features, rows = tokens_of(3, 1, (2, 0, 4)), 24, 20, 18
    transport: Any = OwnWords()
    whole, generator = WholeSequence(transport, "triton"), torch.Generator().manual_seed(3)
    cuts = ((0, 4), (4, 6), (6, 11), (11, 18))  # of rank 0, and of rank 2
    owners = [Owner(rank, Slice(rank, at, *cut), 0) for rank, at, cut in zip((0, 0, 2, 2), (0, 1, 0, 1), cuts, strict=True)]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def never(*arguments: Any) -> None:
        raise AssertionError("by slices")

    for turn in range(2):
        x, dy, weight, bias = random(rows, width), random(rows, features), random(features, width), random(features)
        y, dw = torch.full((rows, features), torch.nan, dtype=dtype), torch.full((features, width), torch.nan, dtype=dtype)
        blocks = [tokens.blocks[cut] for cut in cuts]
        pad = torch.full((4,), 5 + turn, dtype=torch.int32)
        coming = []
        for at in (1, 0, 3, 2):
            part = block_of(blocks[at], x.view(3, 6, width)).clone()
            coming.append(Coming(owners[at], part, None if at < 2 else (pad, at, 5 + turn)))
        products = [Product("forward", weight, y.t(), bias), Product("dgrad", dy.t(), dw)]
        assert whole.consume(tokens, coming, never, products, never)
        close(y, x.double() @ weight.double().t() + bias.double(), width)
        close(dw, dy.double().t() @ x.double(), rows)

        leaving = [
            Leaving(owners[at], torch.full((len(block_of(blocks[at], x.view(3, 6, width))), width), torch.nan), at > 1)
            for at in (3, 2, 1, 0)
        ]
        leaving = [item._replace(out=item.out.to(dtype)) for item in leaving]
        words = whole.produce(tokens, leaving, 7 + turn, dy.t(), weight, never)
        for at, item, when in zip((3, 2, 1, 0), leaving, words, strict=True):
            exact = block_of(blocks[at], (dy.double() @ weight.double()).view(3, 6, width))
            close(item.out, exact, features)
            if item.sent:
                assert len(when) == len(blocks[at].regions) and {int(pad[place]) for pad, place, _ in when} == {7 + turn}


def block_of(blocks: Any, whole: torch.Tensor) -> torch.Tensor:
    picked: torch.Tensor = blocks.pick(whole)
    return picked


def cell_whole_sequences() -> None:
    for dtype in (FP32, BF16):
        whole_sequences(dtype)


# ---- the cells above can fail ----------------------------------------------------------------------------------------
def fails(cell: Callable[[], object], module: Any, name: str, wrong: Any) -> None:
    """By its own comparison: an error in what was planted is none of that."""
    kept = getattr(module, name)
    setattr(module, name, wrong)
    try:
        cell()
    except AssertionError:
        return
    finally:
        setattr(module, name, kept)
    raise AssertionError(f"{cell.__name__} passed with another {name}")


def cell_mutation_of_strides_is_caught() -> None:
    from commfuse_dp.kernels import gemm_dgrad, gemm_forward, gemm_wgrad
    from commfuse_dp.kernels.launching import strides

    for module, operand in itertools.product((gemm_forward, gemm_dgrad, gemm_wgrad), range(2)):

        def shorter(*arguments: Any, operand: int = operand) -> tuple[int, ...]:
            """One short for one operand: nothing beyond its memory is touched."""
            return tuple(stride - (number == operand) for number, stride in enumerate(strides(*arguments)))

        fails(cell_layouts_even, module, "strides", shorter)


def cell_mutation_without_a_row_bias_is_caught() -> None:
    from commfuse_dp.kernels import gemm_forward

    launch = gemm_forward.launch

    def without(kernel: Any, arguments: tuple[Any, ...], *how: Any) -> None:
        launch(kernel, (*arguments[:3], None, *arguments[4:]), *how)

    fails(cell_row_bias, gemm_forward, "launch", without)


def cell_mutation_of_exactness_is_caught() -> None:
    from commfuse_dp.kernels import device_code
    from tests.conformance.kernels.broken import counts

    fails(exact_arrivals, device_code, "misses", counts)
