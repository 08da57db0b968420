"""The engine with the fused linear over ranks as threads: random programs against autograd over whole weights in float64.

Every message is late by a random number of polls; inboxes and windows may hold hardly more than one slice, so that ranks run
out of credit; programs skip, repeat and reorder layers, accumulate, and evaluate in between.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.operand import UnitOperand
from commfuse_dp.engine.plan import Unit
from commfuse_dp.errors import ConfigError
from commfuse_dp.ops.linear import fused_linear, replicated_linear
from commfuse_dp.program.layout import chunk_bounds
from commfuse_dp.transport.base import ExchangeFn, Sending, Transport
from tests.support.copying import CopyingTransport
from tests.support.inproc import Faults, InprocTransport, InprocWorld
from tests.support.threads import run_ranks

WIDTH = 5


@dataclass
class Policy:
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    keep_after_forward: bool = False
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    divide_factor: float | None = None


@dataclass
class Slot:
    name: str
    whole: torch.Tensor
    rank: int
    world_size: int
    requires_grad: bool = True
    flat: list[tuple[int, int]] | None = None  # flat range of every rank
    grad: torch.Tensor | None = None
    replaced: bool = False
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.shape = tuple(self.whole.shape)
        self._local = self.shard(self.whole).clone()

    def shard(self, whole: torch.Tensor) -> torch.Tensor:
        bounds = self.flat if self.flat is not None else chunk_bounds(self.shape[0], self.world_size)
        low, high = bounds[self.rank]
        return (whole.view(-1) if self.flat is not None else whole)[low:high]

    def local(self) -> torch.Tensor:
        return self._local

    def published(self) -> bool:
        return False

    def wants(self) -> tuple[bool, torch.dtype]:
        return self.requires_grad, self._local.dtype

    @property
    def keeps_delivered(self) -> bool:
        return self.flat is None  # as FSDP2 and ZeRO-3 do

    def deliver(self, grad: torch.Tensor) -> None:
        assert grad.shape == self._local.shape and grad.dtype == self._local.dtype
        self.grad = grad.clone() if self.grad is None else self.grad + grad


@dataclass
class Step:
    layers: list[int]
    training: bool = True
    reduce: bool = True


def weights(layers: int, seed: int, bias: bool) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)]
        + ([torch.randn(WIDTH, generator=generator, dtype=torch.float64)] if bias else [])
        for _ in range(layers)
    ]


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def plain_linear(x: torch.Tensor, layer: list[torch.Tensor], layout: str = "rows") -> torch.Tensor:
    """layout: "transposed": the weight is [in, out], cut along `in`."""
    weight, *bias = layer
    return F.linear(x, weight.t() if layout == "transposed" else weight, *bias)


def expected(
    params: list[list[torch.Tensor]], steps: list[Step], world_size: int, layout: str = "rows"
) -> list[list[torch.Tensor]]:
    """Sums over steps of the mean over ranks. Unreduced steps come in with the next reduced use of a layer, if any."""
    totals = [[torch.zeros_like(p) for p in layer] for layer in params]
    waiting = [[torch.zeros_like(p) for p in layer] for layer in params]
    for number, step in enumerate(steps):
        if not step.training or not step.layers:
            continue
        for rank in range(world_size):
            whole = [[p.clone().requires_grad_() for p in layer] for layer in params]
            x = data(rank, number)
            for layer in step.layers:
                x = torch.tanh(plain_linear(x, whole[layer], layout))
            x.sum().backward()
            for layer in set(step.layers):
                for part, p in enumerate(whole[layer]):
                    waiting[layer][part] += p.grad / world_size
        if step.reduce:
            for layer in set(step.layers):
                for part in range(len(params[layer])):
                    totals[layer][part] += waiting[layer][part]
                    waiting[layer][part].zero_()
    return totals


def bounds_of(case: dict[str, Any]) -> list[tuple[int, int]] | None:
    """Flat ranges: ZeRO-3's, which start in the middle of rows, or any, as ZeRO-1/2 have them; half of them whole rows."""
    n, numel = case["world_size"], WIDTH * WIDTH
    if case["layout"] in ("rows", "transposed"):
        return None
    if case["layout"] == "zero3":
        return list(chunk_bounds(numel, n))
    choose = random.Random(case["seed"])
    step = WIDTH if case["seed"] % 2 else 1
    edges = [0, *sorted(step * choose.randint(0, numel // step) for _ in range(n - 1)), numel]
    return list(itertools.pairwise(edges))


def run_program(
    case: dict[str, Any],
    open_transport: Callable[[int, ExchangeFn], Transport] | None = None,
    watching: Callable[[Transport], AbstractContextManager[object]] = nullcontext,
) -> None:
    """open_transport: None: in-process, with the faults of the case. watching: around everything that a rank does."""
    n = case["world_size"]
    params = weights(case["layers"], case["seed"], case["bias"])
    wanted = expected(params, case["steps"], n, case["layout"])
    if open_transport is None:
        world = InprocWorld(
            n, inbox_bytes=case["bytes"], deadline_s=20.0, faults=Faults(seed=case["seed"], max_delay=case["delay"])
        )
        kind = CopyingTransport if case["copying"] else InprocTransport

        def open_transport(rank: int, exchange: ExchangeFn) -> Transport:
            return kind(rank, world)

    def body(rank: int, exchange: ExchangeFn) -> None:
        transport = open_transport(rank, exchange)
        with watching(transport):
            run_rank(case, transport, params, wanted)

    run_ranks(n, body, timeout_s=60)


def run_rank(
    case: dict[str, Any], transport: Transport, params: list[list[torch.Tensor]], wanted: list[list[torch.Tensor]]
) -> None:
    rank, n, steps = transport.rank, case["world_size"], case["steps"]
    config = CommFuseConfig(
        prefetch_bytes=case["bytes"],
        inbox_bytes=case["bytes"],
        slices_per_rank=case["slices"],
        order=case["order"],
        kernels=case.get("kernels", "auto"),
    )
    policy = Policy(keep_after_forward=case["keep"])
    flat, replicated = bounds_of(case), case["layout"] == "replicated"
    slots = [[Slot(f"{i}.{j}", p, rank, n, flat=flat) for j, p in enumerate(layer)] for i, layer in enumerate(params)]
    units = [
        Unit(i, f"layer{i}", layer, policy, config.slices_per_rank, flat_bounds=flat, replicated=replicated)
        for i, layer in enumerate(slots)
    ]
    engine = Engine(transport, units, config, device=torch.device("cpu"), replicas=None)
    operands = [UnitOperand(engine, unit, transposed=case["layout"] == "transposed") for unit in units]

    def linear(x: torch.Tensor, layer: int) -> torch.Tensor:
        if replicated:
            return replicated_linear(x, params[layer][0], operands[layer])
        return fused_linear(x, operands[layer], 0)

    for number, step in enumerate(steps):
        policy.reduce_grads = step.reduce
        with torch.set_grad_enabled(step.training):
            engine.begin_step()
            x, plain = data(rank, number), data(rank, number)
            for layer in step.layers:
                x = torch.tanh(linear(x, layer))
                plain = torch.tanh(plain_linear(plain, params[layer], case["layout"]))
            assert torch.allclose(x, plain, rtol=1e-12, atol=1e-12)
            engine.end_forward(x.requires_grad)
        if x.requires_grad:
            x.sum().backward()
            assert engine.gradients.idle
    for layer, reference in zip(slots, wanted, strict=True):
        for slot, total in zip(layer, reference, strict=True):
            found = slot.grad if slot.grad is not None else torch.zeros_like(slot.local())
            assert torch.allclose(found, slot.shard(total), rtol=1e-10, atol=1e-10), (slot.name, steps)
    engine.close()


@st.composite
def cases(draw):
    layers = draw(st.integers(1, 4))
    step = st.builds(
        Step,
        st.lists(st.integers(0, layers - 1), min_size=1, max_size=6),
        st.booleans(),
        st.booleans(),
    )
    layout = draw(st.sampled_from(["rows", "transposed", "zero3", "ranges", "replicated"]))
    bias = layout in ("rows", "transposed") and draw(st.booleans())
    return {
        "layout": layout,
        "world_size": draw(st.integers(1, 4)),
        "layers": layers,
        "steps": draw(st.lists(step, min_size=1, max_size=4)),
        "bias": bias,
        "slices": draw(st.integers(1, 3)),
        "order": draw(st.sampled_from(["pairwise", "ring"])),
        # one slice at most: head of 5 doubles on a cache line, and 5 rows of 5; and room for a few
        "bytes": draw(st.sampled_from([64 + 200, 600, 1 << 16])),
        "keep": draw(st.booleans()),
        "copying": draw(st.booleans()),
        "delay": draw(st.integers(0, 5)),
        "seed": draw(st.integers(0, 2**31 - 1)),
    }


@settings(max_examples=70)
@given(cases())
def test_random_programs_give_the_gradients_of_autograd(case):
    run_program(case)


@pytest.mark.slow
@settings(max_examples=200)
@given(cases())
def test_more_random_programs(case):
    run_program(case)


def base_case(**more: Any) -> dict[str, Any]:
    case = {
        "layout": "rows",
        "world_size": 3,
        "layers": 4,
        "bias": True,
        "slices": 2,
        "order": "pairwise",
        "bytes": 264,
        "keep": False,
    }
    return {**case, "steps": [Step([0, 1, 2, 3])] * 3, "copying": True, "delay": 3, "seed": 1, **more}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("copying", [False, True])
def test_no_deadlock_with_credit_for_one_slice(copying, seed):
    run_program(base_case(seed=seed, copying=copying, steps=[Step([0, 1, 2, 3])] * 4, slices=3, world_size=(2, 4, 8)[seed]))


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("trigger", [0, 2])
def test_a_backward_broken_off_is_forgotten_by_the_next_step(trigger, replicated):
    """All ranks raise at the same layer; partials that were sent before are taken in and dropped."""
    n, params = 3, weights(4, 9, not replicated)
    flat = [(0, 7), (7, 25), (25, 25)] if replicated else None
    wanted = expected(params, [Step([]), Step([0, 1, 2, 3])], n)
    world = InprocWorld(n, inbox_bytes=4096, deadline_s=20.0, faults=Faults(seed=2, max_delay=3))
    config = CommFuseConfig(inbox_bytes=4096, prefetch_bytes=4096)

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("in the middle")

    def body(rank: int, exchange) -> None:
        slots = [[Slot(f"{i}.{j}", p, rank, n, flat=flat) for j, p in enumerate(layer)] for i, layer in enumerate(params)]
        units = [
            Unit(i, f"layer{i}", layer, Policy(), None, flat_bounds=flat, replicated=replicated)
            for i, layer in enumerate(slots)
        ]
        engine = Engine(CopyingTransport(rank, world), units, config, device=torch.device("cpu"), replicas=None)
        operands = [UnitOperand(engine, unit) for unit in units]
        for number, broken in enumerate((True, False)):
            engine.begin_step()
            x = data(rank, number)
            for layer, operand in enumerate(operands):
                if replicated:
                    x = torch.tanh(replicated_linear(x, params[layer][0], operand))
                else:
                    x = torch.tanh(fused_linear(x, operand, 0))
                if broken and layer == trigger:
                    x.register_hook(fail)
            engine.end_forward(True)
            if broken:
                with pytest.raises(ValueError, match="in the middle"):
                    x.sum().backward()
                for layer in slots:
                    for slot in layer:
                        slot.grad = None  # as zero_grad does: layers above the trigger may have theirs
            else:
                x.sum().backward()
        for layer, reference in zip(slots, wanted, strict=True):
            for slot, total in zip(layer, reference, strict=True):
                assert torch.allclose(slot.grad, slot.shard(total), rtol=1e-10, atol=1e-10)
        engine.close()

    run_ranks(n, body)


@pytest.mark.parametrize("owner", [0, 1, 3])
def test_a_chain_loads_every_link_once(owner):
    """ZeRO-1/2 among four ranks, one owner of all layers: each rank sends to the next one only, and the owner to nobody."""
    n, layers = 4, 3
    params = weights(layers, 3, False)
    world = InprocWorld(n, inbox_bytes=1 << 16)
    flat = [(0, 0) if rank < owner else (0, WIDTH * WIDTH) if rank == owner else (WIDTH * WIDTH,) * 2 for rank in range(n)]
    sent: dict[int, list[int]] = {rank: [] for rank in range(n)}

    def body(rank: int, exchange) -> torch.Tensor | None:
        transport = InprocTransport(rank, world)
        send = transport.send

        def noted(sendings: Sequence[Sending]) -> None:
            sent[rank] += [sending.dst for sending in sendings]
            send(sendings)

        transport.send = noted  # type: ignore[method-assign]
        slots = [[Slot(f"{i}", layer[0], rank, n, flat=flat)] for i, layer in enumerate(params)]
        units = [Unit(i, str(i), own, Policy(), 1, flat_bounds=flat, replicated=True) for i, own in enumerate(slots)]
        config = CommFuseConfig(inbox_bytes=1 << 16)
        engine = Engine(transport, units, config, device=torch.device("cpu"), replicas=None)
        operands = [UnitOperand(engine, unit) for unit in units]
        engine.begin_step()
        x = data(rank, 0).requires_grad_()
        for layer, operand in zip(params, operands, strict=True):
            x = replicated_linear(x, layer[0], operand)
        x.sum().backward()
        received = engine.probe.counters.grad_bytes_received
        assert received == (0 if rank == (owner + 1) % n else layers * WIDTH * WIDTH * 8)
        engine.close()
        return slots[0][0].grad

    grads = run_ranks(n, body)
    for rank in range(n):
        assert sent[rank] == ([] if rank == owner else [(rank + 1) % n] * layers)
        assert (grads[rank] is not None and grads[rank].numel() > 0) == (rank == owner)


def test_bytes_are_the_minimum():
    """2 all-gathers and 1 reduce-scatter, less what the window kept over the turn; head alignment on top."""
    n, layers = 3, 4
    params = weights(layers, 3, False)
    world = InprocWorld(n, inbox_bytes=1 << 16)
    config = CommFuseConfig(inbox_bytes=1 << 16, prefetch_bytes=1 << 16)

    def body(rank: int, exchange) -> tuple[int, int, int]:
        slots = [[Slot(f"{i}.{j}", p, rank, n) for j, p in enumerate(layer)] for i, layer in enumerate(params)]
        units = [Unit(i, f"layer{i}", layer, Policy(), None) for i, layer in enumerate(slots)]
        engine = Engine(InprocTransport(rank, world), units, config, device=torch.device("cpu"), replicas=None)
        operands = [UnitOperand(engine, unit) for unit in units]
        engine.begin_step()
        x = data(rank, 0).requires_grad_()
        for operand in operands:
            x = fused_linear(x, operand, 0)
        x.sum().backward()
        counters = engine.probe.counters
        engine.close()
        return slots[0][0].local().shape[0], counters.param_bytes_received, counters.grad_bytes_received

    row = WIDTH * 8
    for own_rows, params_in, grads_in in run_ranks(n, body):
        assert params_in == 2 * layers * (WIDTH - own_rows) * row
        assert grads_in == layers * (n - 1) * own_rows * row


def test_a_slice_larger_than_the_window_names_the_layer_and_the_fix():
    world = InprocWorld(2, inbox_bytes=1 << 16)
    config = CommFuseConfig(prefetch_bytes=100, inbox_bytes=1 << 16, slices_per_rank=1)

    def body(rank: int, exchange) -> str:
        unit = Unit(0, "layer0", [Slot("0.0", weights(1, 0, False)[0][0], rank, 2)], Policy(), 1)
        engine = Engine(InprocTransport(rank, world), [unit], config, device=torch.device("cpu"), replicas=None)
        with pytest.raises(ConfigError) as error:
            engine.begin_step()
        engine.close()
        return str(error.value)

    for text in run_ranks(2, body):
        assert "'layer0'" in text and "120 bytes" in text and "slices_per_rank to 2" in text and "prefetch_bytes=100" in text
