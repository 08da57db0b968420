"""`sharded_experts` over thread ranks: against experts that are whole, in float64; saved tensors, counts, bits, bad input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from commfuse_dp.errors import CommFuseError, MismatchError
from commfuse_dp.ops.sequence.experts import sharded_experts
from commfuse_dp.ops.sequence.rows import place_of
from tests.conformance.collectives.worlds import in_world
from tests.conformance.sequence.test_sequence_ops import relative
from tests.support.inproc import Faults

EXPERTS, D, HIDDEN = 4, 6, 5


def compute(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, params: Sequence[torch.Tensor]) -> torch.Tensor:
    up, down = params
    out = torch.zeros_like(x)
    for number in range(EXPERTS):
        token, choice = torch.where(index == number)
        if len(token):
            hidden = torch.sin(x @ up[number].t())[token] @ down[number].t()  # its backward reads x as it was given
            out = out.index_add(0, token, (hidden * weights[token, choice, None]).to(x.dtype))
    return out


class Whole:
    """Tokens of all ranks, with all features of the experts."""

    def __init__(self, case: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(case["seed"])
        self.case, self.sizes, self.n = case, tuple(case["sizes"]), case["n"]
        total = sum(self.sizes)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(case["dtype"]).double()

        self.index = torch.stack(
            [torch.randperm(EXPERTS, generator=generator)[: case["k"]] for _ in range(total)]
            or [torch.zeros(case["k"], dtype=torch.long)]
        )[:total]
        self.leaves = [drawn(total, D), drawn(total, case["k"]), drawn(EXPERTS, HIDDEN * self.n, D)]
        self.leaves += [drawn(EXPERTS, D, HIDDEN * self.n)]
        self.grad = drawn(total, D)
        for leaf, wanted in zip(self.leaves, case["wanted"], strict=True):
            leaf.requires_grad_(wanted)
        x, weights, up, down = self.leaves
        self.y = compute(x, self.index, weights, (up, down))
        if self.y.requires_grad:
            self.y.backward(self.grad)

    def tokens(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return tensor.split(list(self.sizes))[rank]

    def own(self, tensors: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        x, weights, up, down = tensors
        part = slice(rank * HIDDEN, (rank + 1) * HIDDEN)
        return [self.tokens(x, rank), self.tokens(weights, rank), up[:, part], down[:, :, part]]

    def run(self, rank: int, transport: Any, around: Callable[..., torch.Tensor] | None = None) -> list[torch.Tensor | None]:
        """y, and gradients of x, weights and parameters."""
        dtypes = (self.case["dtype"], self.case["weights"], self.case["dtype"], self.case["dtype"])
        leaves = [part.detach().to(dtype).clone() for part, dtype in zip(self.own(self.leaves, rank), dtypes, strict=True)]
        for leaf, wanted in zip(leaves, self.case["wanted"], strict=True):
            leaf.requires_grad_(wanted)
        place = place_of(None, transport, self.case["order"], self.case["slices"], "experts")
        index = self.tokens(self.index, rank)

        def experts(x: torch.Tensor, weights: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
            return sharded_experts(
                "experts", compute, x, index, weights, params, self.sizes, place, self.case.get("experts", 1)
            )

        y = experts(*leaves) if around is None else around(experts, *leaves)
        if y.requires_grad:
            y.backward(self.tokens(self.grad, rank).to(y.dtype), retain_graph=around is _twice)
            if around is _twice:
                before = [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
                y.backward(self.tokens(self.grad, rank).to(y.dtype))
                for leaf, first in zip(leaves, before, strict=True):
                    assert (leaf.grad is None) == (first is None)
                    if leaf.grad is not None and first is not None:
                        assert torch.equal(leaf.grad, 2 * first)
                        leaf.grad = first
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    def check(self, rank: int, found: Sequence[torch.Tensor | None], tolerance: float) -> None:
        grads = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in self.leaves]
        wanted = [self.tokens(self.y.detach(), rank), *self.own(grads, rank)]
        for mine, exact, want in zip(found, wanted, (True, *self.case["wanted"]), strict=True):
            assert (mine is not None) == want or not self.y.requires_grad
            if mine is not None:
                assert relative(mine, exact) <= tolerance


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(1, 4))
    return {
        "n": n,
        "sizes": draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)),
        "k": draw(st.integers(1, 3)),
        "order": draw(st.sampled_from(["pairwise", "ring"])),
        "slices": draw(st.sampled_from([None, 1, 3])),
        "experts": draw(st.sampled_from([EXPERTS, 0.01])),  # of which come few or many tokens to each
        "wanted": draw(st.sampled_from([(True,) * 4, (False, True, True, True), (True, False, False, True), (False,) * 4])),
        "dtype": torch.float64,
        "weights": torch.float64,
        "seed": draw(st.integers(0, 2**31 - 1)),
    }


CASE = {"n": 3, "sizes": [5, 0, 4], "k": 2, "order": "pairwise", "slices": 2, "wanted": (True,) * 4, "seed": 7}
EXACT = {**CASE, "dtype": torch.float64, "weights": torch.float64}


def compare(case: dict[str, Any], tolerance: float = 1e-12, around: Any = None, faults: Faults | None = None) -> list[Any]:
    whole = Whole(case)
    found, _ = in_world(whole.n, lambda rank, transport: whole.run(rank, transport, around), faults=faults)
    for rank, mine in enumerate(found):
        whole.check(rank, mine, tolerance)
    return found


@settings(max_examples=25, deadline=None)
@given(cases())
def test_against_whole_experts_in_float64(case: dict[str, Any]) -> None:
    compare(case)


@pytest.mark.parametrize(
    ("dtype", "weights", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-6),
        (torch.bfloat16, torch.float32, 2e-2),  # weights travel as they are, beside narrower tokens
        (torch.bfloat16, torch.bfloat16, 2e-2),
        (torch.float32, torch.bfloat16, 2e-2),
    ],
)
def test_dtypes(dtype: torch.dtype, weights: torch.dtype, tolerance: float) -> None:
    compare({**CASE, "dtype": dtype, "weights": weights}, tolerance)


def test_the_same_bits_whenever_what_arrives() -> None:
    runs = [compare(EXACT, faults=Faults(seed=seed, max_delay=5)) for seed in range(3)]
    for rank in range(3):
        for first, *others in zip(*(run[rank] for run in runs), strict=True):
            assert all(torch.equal(first, other) for other in others)


def _checkpointed(experts: Any, *leaves: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda *args: experts(*(arg * 1 for arg in args)) * 1, *leaves, use_reentrant=False)


def _reentrant(experts: Any, *leaves: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda *args: experts(*(arg * 1 for arg in args)) * 1, *leaves, use_reentrant=True)


def _copied(experts: Any, *leaves: torch.Tensor) -> torch.Tensor:
    """What is saved comes back as copies, so the slices' graphs are lost."""
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        return experts(*leaves)


def _twice(experts: Any, *leaves: torch.Tensor) -> torch.Tensor:
    return experts(*leaves)


@pytest.mark.parametrize("around", [_checkpointed, _reentrant, _copied, _twice])
@pytest.mark.parametrize(("frozen", "slices"), [(False, 2), (True, 2), (False, None)])
def test_what_is_saved(around: Any, frozen: bool, slices: int | None) -> None:
    compare({**EXACT, "wanted": (True, True, True, not frozen), "slices": slices}, around=around)


def test_hooks_see_what_the_node_saves_alone() -> None:
    seen: list[int] = []

    def around(experts: Any, *leaves: torch.Tensor) -> torch.Tensor:
        count: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: count.append(1) or tensor, lambda tensor: tensor):
            y = experts(*leaves)
        seen.append(len(count))
        return y

    compare(EXACT, around=around)
    assert seen == [4] * 3  # own tokens, what holds the graphs, two parameters


def test_graphs_end_with_what_is_saved() -> None:
    from commfuse_dp.ops.sequence import experts as module

    before = len(module._alive)
    held = []

    def around(experts: Any, *leaves: torch.Tensor) -> torch.Tensor:
        y = experts(*leaves)
        held.append(len(module._alive) - before)
        return y

    compare(EXACT, around=around)
    assert max(held) >= 1
    compare({**EXACT, "wanted": (False,) * 4}, around=around)  # nothing to go back through
    assert len(module._alive) == before


@pytest.mark.parametrize("slices", [2, None])
def test_bytes_are_the_minimum(slices: int | None) -> None:
    """Forward: x, weights, index in, and results out; backward: gradients in, those of x and weights out."""
    case = {**EXACT, "sizes": [8, 8, 8], "slices": slices}
    whole = Whole(case)

    def body(rank: int, transport: Any) -> int:
        whole.run(rank, transport)  # ranks agree
        before = transport.probe.counters.snapshot()
        whole.run(rank, transport)
        since = transport.probe.counters.since(before)
        return since.param_bytes_sent + since.grad_bytes_sent

    row = (D + 2 * case["k"]) + D + D + (D + case["k"])
    assert in_world(3, body)[0] == [2 * 8 * 8 * row] * 3


def test_bad_input() -> None:
    place = place_of(None, None, "pairwise", None, "experts")
    x, index, weights = torch.ones(2, D), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1)
    for bad, wanted in (
        ({"x": torch.ones(1, 2, D)}, r"x \(1, 2, 6\)"),
        ({"index": index[:1]}, r"index \(1, 1\)"),
        ({"index": index.float()}, "index is torch.float32"),
        ({"weights": index}, "weights torch.int64"),
        ({"x": x.to(torch.int32)}, "only .* can be reduced"),
        ({"sizes": (3,)}, "this rank has 2 positions"),
    ):
        given_ = {"x": x, "index": index, "weights": weights, "sizes": (2,), **bad}
        with pytest.raises(ValueError, match=wanted):
            sharded_experts("experts", compute, given_["x"], given_["index"], given_["weights"], (), given_["sizes"], place)


@pytest.mark.parametrize(("what", "words"), [("choices", "of a token"), ("gradients", "gradients wanted")])
def test_ranks_that_do_not_fit_together(what: str, words: str) -> None:
    def body(rank: int, transport: Any) -> None:
        place = place_of(None, transport, "pairwise", None, "experts")
        k = 1 + rank if what == "choices" else 1
        x = torch.ones(2, D, requires_grad=True)
        with torch.set_grad_enabled(what == "choices" or rank == 0):
            index, weights = torch.zeros(2, k, dtype=torch.long), torch.ones(2, k)
            sharded_experts("experts", compute, x, index, weights, (), (2, 2), place)

    with pytest.raises(CommFuseError, match=words) as found:
        in_world(2, body)
    assert isinstance(found.value, MismatchError)
