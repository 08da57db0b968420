"""`column_parallel` and `row_parallel` over thread ranks: against the unsharded layers in float64; counts; bits; bad input."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_dp.collectives.agreement import BRIEF
from commfuse_dp.collectives.arguments import even_sizes
from commfuse_dp.errors import CommFuseError, MismatchError
from commfuse_dp.ops import column_parallel, row_parallel
from tests.conformance.collectives.worlds import in_world
from tests.support.inproc import Faults

D, HIDDEN = 6, (5, 4, 0)


def randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Whole:
    """A two-layer block, unsharded: column weights W_i [F_i, D] (of all ranks), then a row weight over all features."""

    def __init__(self, case: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(case["seed"])
        self.n, self.dim, self.sizes = case["n"], case["dim"], case["sizes"]
        self.replicated = case.get("layout") == "replicated"
        shape = [case["batch"], sum(self.sizes), D] if case["dim"] == 1 else [sum(self.sizes), case["batch"], D]
        if case["flat"]:
            shape, self.dim = [sum(self.sizes), D], 0
        self.x = randn(generator, *shape).requires_grad_()
        self.per_rank = HIDDEN[: case["members"]]
        self.weights = [randn(generator, f * self.n, D).requires_grad_() for f in self.per_rank]
        self.biases = [randn(generator, f * self.n).requires_grad_() if case["bias"] else None for f in self.per_rank]
        self.last = randn(generator, D, sum(self.per_rank) * self.n).requires_grad_()
        self.last_bias = randn(generator, D).requires_grad_() if case["bias"] else None
        self.grad = randn(generator, *shape)

    def leaves(self) -> list[torch.Tensor]:
        found = [self.x, *self.weights, *self.biases, self.last, self.last_bias]
        return [leaf for leaf in found if leaf is not None]

    def parts(self, y: torch.Tensor, f: int) -> list[torch.Tensor]:
        return list(y.split(f, dim=-1)) if f else [y] * self.n

    def forward(self) -> torch.Tensor:
        """The hidden features of rank r are those of all members, one behind the other."""
        ys = [self.parts(F.linear(self.x, w, b), f) for w, b, f in zip(self.weights, self.biases, self.per_rank, strict=True)]
        hidden = torch.cat([torch.cat([y[r] for y in ys], -1) for r in range(self.n)], -1)
        return F.linear(torch.sin(hidden), self.last, self.last_bias)

    def shard(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return tensor if self.replicated else tensor.split(list(self.sizes), self.dim)[rank]

    def local(self, rank: int, dtype: torch.dtype) -> dict[str, Any]:
        def own(tensor: torch.Tensor | None, f: int, at: int) -> torch.Tensor | None:
            if tensor is None:
                return None
            return tensor.detach().narrow(at, rank * f, f).to(dtype).clone().requires_grad_()

        width = sum(self.per_rank)
        return {
            "x": self.shard(self.x, rank).detach().to(dtype).clone().requires_grad_(),
            "weights": [own(w, f, 0) for w, f in zip(self.weights, self.per_rank, strict=True)],
            "biases": [own(b, f, 0) for b, f in zip(self.biases, self.per_rank, strict=True)],
            "last": own(self.last, width, 1),
            "last_bias": None if self.last_bias is None else self.last_bias.detach().to(dtype).clone().requires_grad_(),
        }


def block(local: dict[str, Any], whole: Whole, case: dict[str, Any], transport: Any) -> torch.Tensor:
    how = {"dim": whole.dim, "transport": transport, "slices_per_rank": case["m"], "order": case["order"]}
    if whole.replicated:
        how["layout"] = "replicated"
        ys = column_parallel(local["x"], local["weights"], local["biases"], save=case["save"], **how)
        return row_parallel(torch.sin(torch.cat(ys, -1)), local["last"], local["last_bias"], **how)
    given_sizes = whole.sizes if case["told"] else None
    ys = column_parallel(local["x"], local["weights"], local["biases"], sizes=given_sizes, save=case["save"], **how)
    return row_parallel(torch.sin(torch.cat(ys, -1)), local["last"], local["last_bias"], sizes=whole.sizes, **how)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(1, 4))
    return {
        "n": n,
        "sizes": tuple(draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))),
        "batch": draw(st.integers(0, 3)),
        "dim": draw(st.integers(0, 1)),
        "flat": draw(st.booleans()),
        "members": draw(st.integers(1, 3)),
        "bias": draw(st.booleans()),
        "m": draw(st.sampled_from([None, 1, 2, 3])),
        "order": draw(st.sampled_from(["pairwise", "ring"])),
        "save": draw(st.sampled_from(["shard", "gathered"])),
        "layout": draw(st.sampled_from(["sharded", "replicated"])),
        "told": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31 - 1)),
    }


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    if not wanted.numel():
        return 0.0
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-300))


def compare(case: dict[str, Any], dtype: torch.dtype, tolerance: float, faults: Faults | None = None) -> list[Any]:
    whole = Whole(case)
    whole.forward().backward(whole.grad)

    def body(rank: int, transport: Any) -> Any:
        local = whole.local(rank, dtype)
        y = block(local, whole, case, transport)
        y.backward(whole.shard(whole.grad, rank).to(dtype))
        return y.detach(), local

    results, _ = in_world(whole.n, body, faults=faults)
    exact = whole.forward().detach()
    for rank, (y, local) in enumerate(results):
        assert relative(y, whole.shard(exact, rank)) <= tolerance
        assert whole.x.grad is not None
        assert relative(local["x"].grad, whole.shard(whole.x.grad, rank)) <= tolerance
        named = [*zip(local["weights"], whole.weights, whole.per_rank, strict=True)]
        named += [(a, b, f) for a, b, f in zip(local["biases"], whole.biases, whole.per_rank, strict=True) if a is not None]
        for mine, all_of_it, f in named:
            assert relative(mine.grad, all_of_it.grad.narrow(0, rank * f, f)) <= tolerance
        width = sum(whole.per_rank)
        assert relative(local["last"].grad, whole.last.grad.narrow(1, rank * width, width)) <= tolerance
        if whole.last_bias is not None:
            assert relative(local["last_bias"].grad, whole.last_bias.grad) <= tolerance
            assert torch.equal(local["last_bias"].grad, results[0][1]["last_bias"].grad)  # replicas stay alike, bit by bit
    return results


@settings(max_examples=40)
@given(cases())
def test_against_the_unsharded_block_in_float64(case: dict[str, Any]) -> None:
    compare(case, torch.float64, 1e-12, Faults(seed=case["seed"], max_delay=3))


CASE: dict[str, Any] = {
    "n": 3,
    "sizes": (3, 0, 5),
    "batch": 2,
    "dim": 1,
    "flat": False,
    "members": 2,
    "bias": True,
    "m": 2,
    "order": "pairwise",
    "save": "shard",
    "told": True,
    "seed": 7,
}


@pytest.mark.parametrize("n", [2, 4])
def test_float32(n: int) -> None:
    # Sums of some tens of products of numbers of size 1: a few roundings of 6e-8.
    compare({**CASE, "n": n, "sizes": (7, 5, 0, 4)[:n]}, torch.float32, 1e-6)


@pytest.mark.parametrize("save", ["shard", "gathered"])
def test_low_precision_is_rounded_as_unfused(save: str) -> None:
    """Twice the error of the unsharded block in bfloat16: slices and members add no roundings but the partials'."""
    case = {**CASE, "sizes": (9, 6, 8), "batch": 3, "m": 3, "save": save}
    exact = Whole(case)
    exact.forward().backward(exact.grad)
    narrow = Whole(case)
    for name, value in vars(narrow).items():
        if isinstance(value, torch.Tensor):
            setattr(narrow, name, value.detach().bfloat16().requires_grad_(value.requires_grad))
        elif isinstance(value, list) and isinstance(value[0], torch.Tensor):
            setattr(narrow, name, [item.detach().bfloat16().requires_grad_() for item in value])
    narrow.forward().backward(narrow.grad)
    for plain, right in zip(narrow.leaves(), exact.leaves(), strict=True):
        assert plain.grad is not None and right.grad is not None
    worst = max(relative(a.grad, b.grad) for a, b in zip(narrow.leaves(), exact.leaves(), strict=True))  # type: ignore[arg-type]
    compare(case, torch.bfloat16, 2 * max(worst, 2**-8))


@pytest.mark.parametrize("save", ["shard", "gathered"])
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("sizes", [(4,), (4, 4), (5, 2, 0), (2, 2, 2, 1)])
def test_messages_and_bytes_are_the_minimum(sizes: tuple[int, ...], m: int, save: str) -> None:
    """U = bytes of all rows but the own: column 1 U forward, 2 U backward (1 U if gathered), row 1 U each."""
    n, batch = len(sizes), 2
    rows_of_others = sum(sizes) * batch * (n - 1)  # all ranks together

    def counted(backward: str) -> tuple[int, int]:
        def body(rank: int, transport: Any) -> None:
            how: dict[str, Any] = {"sizes": sizes, "transport": transport, "slices_per_rank": m}
            x = torch.ones(batch, sizes[rank], D, requires_grad=True)
            weight = torch.ones(3, D, requires_grad=True)
            last = torch.ones(D, 3, requires_grad=True)
            for _ in range(2):  # the first time, ranks compare what they are given
                (y,) = column_parallel(x, [weight], save=save, **how)
                if backward == "column":
                    y.sum().backward()
                z = row_parallel(y.detach().requires_grad_(), last, **how)
                if backward == "row":
                    z.sum().backward()

        _, moved = in_world(n, body)
        return sum(one.messages for one in moved), sum(one.bytes for one in moved)

    agreement = 2 * n * (n - 1)  # two ops
    facts = BRIEF.size * agreement
    pieces = sum(min(m, size * batch) for size in sizes) * (n - 1)
    unit = rows_of_others * D * 4
    messages, nbytes = counted("no")
    assert (messages, nbytes) == (agreement + 2 * 2 * pieces, facts + 2 * 2 * unit)
    back = 1 if save == "gathered" else 2
    assert counted("column") == (messages + 2 * back * pieces, nbytes + 2 * back * unit)
    assert counted("row") == (messages + 2 * pieces, nbytes + 2 * unit)


@pytest.mark.parametrize(("sizes", "slices"), [((512, 512), 2), ((512, 3), 2), ((511, 511), 1), ((512, 512, 512), 1)])
def test_default_slices_are_not_thin(sizes: tuple[int, ...], slices: int) -> None:
    """Two of 256 rows or more at two ranks, else one."""

    def body(rank: int, transport: Any) -> None:
        for _ in range(2):  # the first time, ranks compare what they are given
            column_parallel(torch.ones(1, sizes[rank], 2), [torch.ones(1, 2)], sizes=sizes, transport=transport)

    _, moved = in_world(len(sizes), body)
    peers = len(sizes) - 1
    assert sum(one.messages for one in moved) == len(sizes) * peers * (1 + 2 * slices)


def test_the_same_bits_whenever_what_arrives() -> None:
    calm = compare(CASE, torch.float32, 1e-5)
    late = compare(CASE, torch.float32, 1e-5, Faults(seed=3, max_delay=9))
    for (y, local), (other, others) in zip(calm, late, strict=True):
        assert torch.equal(y, other)
        assert torch.equal(local["x"].grad, others["x"].grad)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(local["weights"], others["weights"], strict=True))


# ---- what autograd may ask for ---------------------------------------------------------------------------------------
def small(rank: int, sizes: tuple[int, ...] = (2, 1)) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(2, sizes[rank], D, generator=generator, requires_grad=True)
    return x, torch.randn(3, D, generator=generator, requires_grad=True), torch.randn(4, D, generator=generator)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True), (False, False)])
def test_only_what_requires_a_gradient(wanted: tuple[bool, bool]) -> None:
    def body(rank: int, transport: Any) -> None:
        x, weight, frozen = small(rank)
        x.requires_grad_(wanted[0])
        weight.requires_grad_(wanted[1])
        y, z = column_parallel(x, [weight, frozen], transport=transport)
        assert y.requires_grad == any(wanted)
        if any(wanted):
            (y.sum() + z.sum()).backward()
        assert ((x.grad is not None), (weight.grad is not None)) == wanted and frozen.grad is None
        out = row_parallel(y.detach().requires_grad_(wanted[0]), weight.detach().t().clone(), transport=transport)
        assert out.requires_grad == wanted[0]
        if wanted[0]:
            out.sum().backward()

    in_world(2, body)


def test_an_output_that_nobody_uses() -> None:
    """On one rank only: all ranks communicate alike all the same."""

    def body(rank: int, transport: Any) -> Any:
        x, weight, other = small(rank)
        other.requires_grad_()
        y, z = column_parallel(x, [weight, other], transport=transport)
        (y.sum() if rank == 0 else y.sum() + z.sum()).backward()
        return x, weight, other

    results, _ = in_world(2, body)
    assert results[0][2].grad is None and results[1][2].grad is not None
    wanted = results[0][1].detach().sum(0) + results[1][1].detach().sum(0) + results[1][2].detach().sum(0)
    for x, _, _ in results:
        assert torch.allclose(x.grad, wanted.expand_as(x), rtol=1e-5, atol=1e-6)


def test_no_grad_autocast_and_checkpointing() -> None:
    def body(rank: int, transport: Any) -> None:
        x, weight, _ = small(rank)

        def layer(x: torch.Tensor) -> torch.Tensor:
            (y,) = column_parallel(x, [weight], transport=transport)
            return row_parallel(y, weight.t().contiguous(), sizes=(2, 1), transport=transport)

        with torch.no_grad():
            assert not layer(x).requires_grad
        plain = layer(x)
        plain.sum().backward()
        kept = x.grad.clone(), weight.grad.clone()
        for reentrant in (False, True):
            x.grad = weight.grad = None
            again = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
            again.sum().backward()
            assert torch.equal(again, plain)
            assert torch.equal(x.grad, kept[0]) and torch.equal(weight.grad, kept[1])
        x.grad = weight.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            narrow = layer(x)
        assert narrow.dtype == torch.bfloat16
        narrow.float().sum().backward()
        assert x.grad.dtype == weight.grad.dtype == torch.float32
        assert torch.allclose(weight.grad, kept[1], rtol=0.1, atol=0.5)

    in_world(2, body)


def test_autocast_halves_what_travels() -> None:
    def body(rank: int, transport: Any, on: bool) -> None:
        x, weight, _ = small(rank, (4, 4))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            column_parallel(x, [weight], sizes=(4, 4), transport=transport)

    plain = sum(m.bytes for m in in_world(2, lambda r, t: body(r, t, False))[1])
    narrow = sum(m.bytes for m in in_world(2, lambda r, t: body(r, t, True))[1])
    assert plain - narrow == 2 * 2 * 4 * D * 2


def test_lengths_that_change_from_call_to_call() -> None:
    """Also one position on several ranks (generation), and none at all."""

    def body(rank: int, transport: Any) -> None:
        for length in (8, 1, 5, 0, 8, 3):
            sizes = even_sizes(length, 3)
            x = torch.full((2, sizes[rank], D), 1.0 + rank)
            (y,) = column_parallel(x, [torch.ones(2, D)], transport=transport)
            wanted = torch.cat([torch.full((2, size, 2), (1.0 + r) * D) for r, size in enumerate(sizes)], 1)
            assert torch.equal(y, wanted)
            z = row_parallel(y, torch.ones(D, 2), transport=transport)
            assert torch.equal(z, torch.full((2, sizes[rank], D), 3 * 2 * D * (1.0 + rank)))

    in_world(3, body)


def test_one_rank_alone() -> None:
    x, weight, _ = small(0)
    (y,) = column_parallel(x, [weight])
    assert torch.allclose(y, F.linear(x, weight))
    assert torch.allclose(row_parallel(y, weight.t()), F.linear(y, weight.t()))


# ---- bad input -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kw", "wanted"),
    [
        ({"weights": []}, "weights is empty"),
        ({"weights": [torch.ones(3, D + 1)]}, rf"weights\[0\] has shape \(3, 7\): \[F, {D}\] is needed"),
        ({"weights": [torch.ones(3)]}, r"weights\[0\] has shape"),
        ({"biases": [torch.ones(3), None]}, "2 biases for 1 weights"),
        ({"biases": [torch.ones(2)]}, r"biases\[0\] has shape \(2,\): \(3,\) is needed"),
        ({"weights": [torch.ones(3, D).double()]}, "float64: convert one"),
        ({"x": torch.ones(2, 2, D, dtype=torch.int64)}, "int64: only"),
        ({"dim": 2}, "not the last"),
        ({"dim": 5}, "dim=5"),
        ({"x": torch.ones(D)}, "dim=1 of an input of shape"),
        ({"save": "nothing"}, "'shard' or 'gathered'"),
        ({"order": "spiral"}, "spiral"),
        ({"slices_per_rank": 0}, "at least 1"),
        ({"sizes": (2, 2)}, "for each of 1 ranks"),
        ({"sizes": (3,)}, r"sizes\[0\]=3, but this rank has 2 positions"),
    ],
)
def test_columns_that_do_not_fit(kw: dict[str, Any], wanted: str) -> None:
    given_kw = {"x": torch.ones(2, 2, D), "weights": [torch.ones(3, D)], **kw}
    with pytest.raises(ValueError, match=wanted):
        column_parallel(given_kw.pop("x"), given_kw.pop("weights"), **given_kw)


@pytest.mark.parametrize(
    ("kw", "wanted"),
    [
        ({"weight": torch.ones(3, D + 1)}, rf"\[D, {D}\] is needed"),
        ({"bias": torch.ones(2)}, r"bias has shape \(2,\): \(3,\) is needed"),
        ({"bias": torch.ones(3).double()}, "bias is torch.float64"),
        ({"reduce_dtype": torch.int32}, "int32"),
        ({"sizes": (1,)}, r"sizes=\[1\].*2 positions"),
    ],
)
def test_rows_that_do_not_fit(kw: dict[str, Any], wanted: str) -> None:
    given_kw = {"weight": torch.ones(3, D), **kw}
    with pytest.raises(ValueError, match=wanted):
        row_parallel(torch.ones(2, 2, D), given_kw.pop("weight"), **given_kw)


DIFFERENT = {
    "batch": lambda rank: {"x": torch.ones(2 + rank, 2, D)},
    "width": lambda rank: {"x": torch.ones(2, 2, D + rank), "weights": [torch.ones(3, D + rank)]},
    "dtype": lambda rank: {"x": torch.ones(2, 2, D).to((torch.float32, torch.bfloat16)[rank])},
    "gradients": lambda rank: {"x": torch.ones(2, 2, D, requires_grad=bool(rank))},
    "slices_per_rank": lambda rank: {"slices_per_rank": 1 + rank},
    "save": lambda rank: {"save": ("shard", "gathered")[rank]},
    "dim": lambda rank: {"x": torch.ones(2, 2, 2, D), "dim": 1 + rank},
}


DIFFERS = {"batch": "batch entries=2", "width": f"features={D}", "gradients": "gradients wanted"}  # as errors name it


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("what", list(DIFFERENT))
def test_ranks_that_do_not_fit_together(what: str, told: bool) -> None:
    """Every rank ends with an error that says what all ranks have, and no data has moved."""
    raised: dict[int, BaseException] = {}

    def body(rank: int, transport: Any) -> None:
        kw = {"x": torch.ones(2, 2, D), "weights": [torch.ones(3, D)], **DIFFERENT[what](rank)}
        kw["weights"] = [weight.to(kw["x"].dtype) for weight in kw["weights"]]
        try:
            column_parallel(kw.pop("x"), kw.pop("weights"), sizes=(2, 2) if told else None, transport=transport, **kw)
        except CommFuseError as error:
            raised[rank] = error

    with contextlib.suppress(Exception):  # the transport is of no use any more
        in_world(2, body, deadline_s=10.0)
    assert set(raised) == {0, 1}
    assert any(isinstance(error, MismatchError) and "do not fit together" in str(error) for error in raised.values())
    assert all(DIFFERS.get(what, what) in str(error) for error in raised.values() if "do not fit together" in str(error))


def test_sizes_that_are_wrong_about_another_rank() -> None:
    raised: dict[int, BaseException] = {}

    def body(rank: int, transport: Any) -> None:
        try:
            column_parallel(torch.ones(1, 2, D), [torch.ones(3, D)], sizes=((2, 3), (3, 2))[rank], transport=transport)
        except CommFuseError as error:
            raised[rank] = error

    with contextlib.suppress(Exception):
        in_world(2, body, deadline_s=10.0)
    assert set(raised) == {0, 1} and any("the ranks have [2, 2]" in str(error) for error in raised.values())
