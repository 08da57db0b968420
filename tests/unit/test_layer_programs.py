"""The programs of a layer and of a step, over random worlds: proved with channels of one message, by every way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_dp.program.hosts import Hosts
from commfuse_dp.program.layer import backward, forward, step, through
from commfuse_dp.program.layout import Tensor
from commfuse_dp.program.operations import Collective, Consume, Problem, Produce, Program, Reduce, Send
from commfuse_dp.program.simulate import Costs, compute_per_row, estimate
from commfuse_dp.program.verify import VerificationError, minimum_rows, verify

WAYS = [("pairwise", ""), ("ring", "direct"), ("ring", "ring"), ("hierarchical", "")]


@st.composite
def worlds(draw: st.DrawFn, largest: int = 64) -> dict[str, object]:
    order, way = draw(st.sampled_from(WAYS))
    hosts = None
    n = draw(st.integers(1, largest))
    if order == "hierarchical":
        per_host, count = draw(st.sampled_from([(2, 2), (3, 2), (2, 4), (4, 3), (8, 8)]))
        n = per_host * count if per_host * count <= largest else 4
        ranks = list(range(n))
        random.Random(draw(st.integers(0, 9))).shuffle(ranks)  # hosts need not have ranks in a row
        hosts = Hosts.of([ranks[rank] // (per_host if n == per_host * count else 2) for rank in range(n)])
    return {"n": n, "order": order, "way": way, "hosts": hosts, "m": draw(st.integers(1, 4)), "seed": draw(st.integers(0, 999))}


def problem(world: dict, collective: Collective, name: str, *, layer: int = 0) -> Problem:
    rng = random.Random(world["seed"] * 100 + layer)
    top = rng.choice([0, 1, 5, 7])
    sizes = world.get("sizes") or tuple(rng.randint(0, top) for _ in range(world["n"]))
    return Problem(
        collective,
        sizes,
        world["order"],
        world["m"],
        way=world["way"] if collective == "reduce_scatter" else "hosts" if world["hosts"] else "direct",
        hosts=world["hosts"],
        tensor=Tensor(name, "gradients" if collective == "reduce_scatter" else "parameters"),
    )


def layer(world: dict, number: int, rank: int, *, trained: bool = True, read: bool = True) -> tuple[Program, Program]:
    gather = problem(world, "all_gather", f"layer {number}, forward", layer=number)
    again = problem(world, "all_gather", f"layer {number}, backward", layer=number) if read else None
    gradients = problem(world, "reduce_scatter", f"gradient of layer {number}", layer=number) if trained else None
    return forward(gather, rank), backward(again, gradients, rank)


def prove(world: dict, credit: int = 1) -> None:
    ranks = range(world["n"])
    for trained, read in ((True, True), (True, False), (False, True)):
        for programs in zip(*(layer(world, 0, rank, trained=trained, read=read) for rank in ranks), strict=True):
            proof = verify(programs, credit=credit)
            assert sum(proof.rows_sent) == sum(map(minimum_rows, programs[0].problems))


def experts(world: dict, rank: int) -> Program:
    rows, results = (problem(world, kind, kind, layer=0) for kind in ("all_gather", "reduce_scatter"))
    return through(rows, results, rank)


def whole_step(world: dict, rank: int) -> Program:
    layers = [layer(world, number, rank, trained=number != 1) for number in range(3)]
    return step([there for there, _ in layers] + [back for _, back in reversed(layers)])


@settings(max_examples=20)
@given(world=worlds(largest=16), credit=st.integers(1, 2))
def test_every_layer_is_proved(world: dict, credit: int) -> None:
    prove(world, credit)


@settings(max_examples=20)
@given(world=worlds(largest=16), credit=st.integers(1, 2), seed=st.integers(0, 2**32))
def test_what_goes_through_a_function_is_proved(world: dict, credit: int, seed: int) -> None:
    """And what is produced for a slice comes behind its rows."""
    programs = [experts(world, rank) for rank in range(world["n"])]
    assert verify(programs, credit=credit) == verify(programs, credit=credit, pick=random.Random(seed))
    for program in programs:
        seen = set()
        for op in program.compute_lane:
            if isinstance(op, Consume):
                seen.add((op.piece.slice.owner, op.piece.slice.index))
            elif isinstance(op, Produce):
                assert (op.slice.owner, op.slice.index) in seen


@pytest.mark.slow
@pytest.mark.parametrize(("order", "way"), WAYS)
def test_64_ranks(order: str, way: str) -> None:
    hosts = Hosts.of([rank // 8 for rank in range(64)]) if order == "hierarchical" else None
    prove({"n": 64, "order": order, "way": way, "hosts": hosts, "m": 1, "seed": 5})


@settings(max_examples=20)
@given(world=worlds(largest=9), seed=st.integers(0, 2**32))
def test_a_step_needs_no_barrier_between_layers(world: dict, seed: int) -> None:
    programs = [whole_step(world, rank) for rank in range(world["n"])]
    assert verify(programs, ends=False, pick=random.Random(seed)) == verify(programs, ends=False)


# ---- damage ----------------------------------------------------------------------------------------------------------
WORLD = {"n": 4, "order": "pairwise", "way": "", "hosts": None, "m": 2, "seed": 3, "sizes": (5, 4, 3, 6)}
HOSTS = {**WORLD, "order": "hierarchical", "hosts": Hosts(((0, 1), (2, 3)))}
CHAIN = {**WORLD, "order": "ring", "way": "ring"}


def kinds(program: Program, kind: type) -> list[int]:
    return [at for at, op in enumerate(program.operations) if isinstance(op, kind)]


def dropped(program: Program, kind: type, which: int) -> Program:
    gone = kinds(program, kind)[which]
    return replace(program, operations=tuple(op for at, op in enumerate(program.operations) if at != gone))


def swapped(program: Program, kind: type, a: int, b: int) -> Program:
    ops, at = list(program.operations), kinds(program, kind)
    ops[at[a]], ops[at[b]] = ops[at[b]], ops[at[a]]
    return replace(program, operations=tuple(ops))


def another_order(program: Program) -> Program:
    return replace(
        program,
        operations=tuple(replace(op, inputs=op.inputs[::-1]) if isinstance(op, Reduce) else op for op in program.operations),
    )


@pytest.mark.parametrize("world", [WORLD, HOSTS, CHAIN], ids=["direct", "hosts", "chain"])
def test_damage_to_a_backward_is_found(world: dict) -> None:
    programs = [layer(world, 0, rank)[1] for rank in range(4)]
    verify(programs)
    damage = {
        "lacks this operation": lambda p: dropped(p, Consume, 1),
        "does not send it|at this point": lambda p: dropped(p, Send, -1),
        "never summed|neither received": lambda p: dropped(p, Reduce, -1),
        "own slice must be produced last": lambda p: swapped(p, Produce, 0, -1),
        "adds up in the order|neither received": another_order,
    }
    for message, change in damage.items():
        with pytest.raises(VerificationError, match=message):
            verify([change(program) if program.rank == 1 else program for program in programs])


def test_a_step_whose_layers_are_swapped_on_one_rank_is_found() -> None:
    def build(rank: int) -> Program:
        layers = [layer(WORLD, number, rank) for number in (0, 1)]
        order = reversed(layers) if rank != 2 else layers
        return step([there for there, _ in layers] + [back for _, back in order])

    programs = [build(rank) for rank in range(4)]
    with pytest.raises(VerificationError, match=r"expected rank 2|at this point"):
        verify(programs, ends=False)


# ---- time ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("order", "way"), WAYS[:3])
def test_a_step_is_as_long_as_its_compute_where_the_link_keeps_up(order: str, way: str) -> None:
    """A slice's transfer takes as long as one product of a slice: nothing of it is exposed but what no schedule can hide."""
    gather = [
        Problem("all_gather", (8,) * 4, order, way="direct", tensor=Tensor(name, "parameters")) for name in ("there", "back")
    ]
    gradients = Problem("reduce_scatter", (8,) * 4, order, way=way, tensor=Tensor("gradient", "gradients"))
    programs = [step([forward(gather[0], rank), backward(gather[1], gradients, rank)]) for rank in range(4)]
    verify(programs, ends=False)
    found = estimate(programs, Costs(1.0, 1.0, 0.0, compute_per_row(produce_s=1.0, consume_s=1.0)))
    assert all(timeline.compute_s == 3 * 32 for timeline in found.timelines)
    assert found.makespan_s <= 3 * 32 + 8, found.makespan_s
