"""Part (g): a training step of one rank whose peers' memory is the host's: what of the transfers is exposed.

The whole engine runs over CUDA's own streams, copy engines and kernels: a stack of linears, forward and backward, rank 0 of
RANKS. Its peers do nothing (benchmarks/one_rank.py): their shards come from pinned host memory, over PCIe in place of NVLink,
gradients leave to there, and words that peers would write are not waited for. Everything else is as in training. Beside it, of
the same weights and over the same link:

| variant | |
| --- | --- |
| compute | whole weights are there: cuBLAS, nothing is transferred |
| transfers | nothing is computed: all that comes, and beside it all that leaves |
| in turn | each layer: weight comes, products, gradient leaves; nothing overlaps |
| by layers | whole weights come one layer ahead in a stream of their own, whole gradients leave in another, as FSDP2 does it |
| commfuse | the engine: slices, in the order in which they come; one Triton kernel for a product |
| commfuse blas | the same, with cuBLAS slice by slice |

A step takes at least the larger of compute and transfers.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from benchmarks.gpu import checkout
from benchmarks.gpu.clock import GpuClock
from benchmarks.gpu.figures import paired_ratio, spread
from benchmarks.gpu.part import Options, Reporter, run_part
from commfuse_dp.kernels import tiles

if TYPE_CHECKING:  # it needs pydantic, which a GPU machine may not have
    from benchmarks.one_rank import OneRank

RANKS, WIDTH, LAYERS, WINDOW = 8, 4096, 8, 3
TOKENS = (24576, 16384, 8192)  # on an H200 over PCIe transfers take a third of compute, half of it, about as long
ROUNDS, WARM_UP = 9, 4
MOST_CANDIDATES = 2  # tiles; each costs seconds of compilation
TARGET = 1.08  # of the larger of compute and transfers

Call = Callable[[], object]


def run(report: Reporter, options: Options) -> None:
    """A step of one rank with peers in the host's memory."""
    if options.device != "cuda":
        report.skip("transfers beside compute need a GPU")
        return
    advice = checkout.advice()
    if advice is not None:
        report.skip(advice)
        return
    from benchmarks.one_rank import UnwaitingDevice

    torch.cuda.set_device(0)
    for tokens in TOKENS:
        if report.enough(8.0, f"{tokens} tokens"):
            with report.guarded(f"{tokens} tokens"):
                measure(report, UnwaitingDevice(), tokens)


def measure(report: Reporter, device: Any, tokens: int, width: int = WIDTH, layers: int = LAYERS) -> None:
    """One row: all variants, taking turns."""
    from benchmarks.one_rank import OneRank

    where = device.torch_device
    backends = {"commfuse": "triton", "commfuse blas": "blas"} if where.type == "cuda" else {"commfuse": "blas"}
    with ExitStack() as stack:
        likeliest = lambda *about, known=tiles.candidates: known(*about)[:MOST_CANDIDATES]  # noqa: E731
        stack.enter_context(mock.patch.object(tiles, "candidates", likeliest))
        ranks = {}
        for name, kernels in backends.items():
            config = {"kernels": kernels}
            ranks[name] = OneRank(device, RANKS, layers=layers, width=width, window=WINDOW, config=config, random=0.02)
            stack.callback(ranks[name].close)
        x = torch.randn(tokens, width, device=where).to(torch.bfloat16).requires_grad_()
        grad = torch.randn(tokens, width, device=where).to(torch.bfloat16)
        calls = ByHand(x.detach(), grad, layers, device).variants()
        calls |= {name: partial(step, rank, x, grad) for name, rank in ranks.items()}
        times = GpuClock(where).rounds(calls, ROUNDS, warm_up=WARM_UP)
    middle = {name: statistics.median(values) for name, values in times.items()}
    bound = max(middle["compute"], middle["transfers"])
    report.row(
        kind="overlap",
        tokens=tokens,
        layers=layers,
        **{f"{name.replace(' ', '_')}_ms": spread(values) for name, values in times.items()},
        bound_ms=bound,
        commfuse_over_bound=middle["commfuse"] / bound,
        by_layers_over_commfuse=paired_ratio(times["by layers"], times["commfuse"]),
        in_turn_over_commfuse=paired_ratio(times["in turn"], times["commfuse"]),
    )
    report.target(f"a step at {tokens} tokens / max(compute, transfers)", middle["commfuse"] / bound, TARGET, at_least=False)


def step(rank: OneRank, x: torch.Tensor, grad: torch.Tensor) -> None:
    rank.engine.begin_step()
    rank.forward(x).backward(grad)
    x.grad = None


class ByHand:
    """The same layers without the engine. Weights on the GPU are random, and so is what comes to lie over them."""

    def __init__(self, x: torch.Tensor, grad: torch.Tensor, layers: int, device: Any) -> None:
        width, self.device = x.shape[1], device
        self.inputs = [x, *(torch.empty_like(x) for _ in range(layers))]
        self.grads = [grad, torch.empty_like(grad)]
        self.weights = [torch.randn(width, width, device=x.device).mul_(0.02).to(x.dtype) for _ in range(layers)]
        self.dw = [torch.empty_like(self.weights[0]) for _ in range(2)]
        rows = width - width // RANKS  # all but the own ones
        pinned = x.is_cuda
        self.host = torch.randn(rows, width).mul_(0.02).to(x.dtype)
        self.left = torch.empty_like(self.host)
        if pinned:
            self.host, self.left = self.host.pin_memory(), self.left.pin_memory()
        self.rows = rows

    def variants(self) -> dict[str, Call]:
        return {"compute": self.compute, "transfers": self.transfers, "in turn": self.in_turn, "by layers": self.by_layers}

    def compute(self) -> None:
        for layer in range(len(self.weights)):
            self.forward(layer)
        for layer in reversed(range(len(self.weights))):
            self.backward(layer)

    def in_turn(self) -> None:
        for layer in range(len(self.weights)):
            self.come(layer)
            self.forward(layer)
        for layer in reversed(range(len(self.weights))):
            self.come(layer)
            self.backward(layer)
            self.leave(layer)

    def transfers(self) -> None:
        self._beside(lambda: [self.come(layer) for layer in (*range(len(self.weights)), *range(len(self.weights)))], "gather")
        self._beside(lambda: [self.leave(layer) for layer in range(len(self.weights))], "scatter")
        self._join()

    def by_layers(self) -> None:
        """A weight comes when the layer before the one ahead of it has been computed: two are there at a time."""
        device, layers = self.device, len(self.weights)
        order = [(layer, self.forward) for layer in range(layers)]
        order += [(layer, self.backward) for layer in reversed(range(layers))]
        come = [self._beside(lambda: self.come(order[0][0]), "gather")]
        for at, (layer, work) in enumerate(order):
            if at + 1 < len(order):
                come.append(self._beside(lambda ahead=order[at + 1][0]: self.come(ahead), "gather"))  # type: ignore[misc]
            device.wait_event(device.current_stream(), come[at])
            work(layer)
            if work == self.backward:
                self._beside(lambda layer=layer: self.leave(layer), "scatter")  # type: ignore[misc]
        self._join()

    def forward(self, layer: int) -> None:
        torch.mm(self.inputs[layer], self.weights[layer].t(), out=self.inputs[layer + 1])

    def backward(self, layer: int) -> None:
        torch.mm(self.grads[0].t(), self.inputs[layer], out=self.dw[layer % 2])
        torch.mm(self.grads[0], self.weights[layer], out=self.grads[1])  # its input stays the random one: no step is like zeros

    def come(self, layer: int) -> None:
        self.weights[layer][: self.rows].copy_(self.host, non_blocking=True)

    def leave(self, layer: int) -> None:
        self.left.copy_(self.dw[layer % 2][: self.rows], non_blocking=True)

    def _beside(self, work: Callable[[], object], name: str) -> Any:
        """In a stream of its own, behind what is in the current one; the event behind it."""
        device = self.device
        stream = device.side_stream(name)
        device.wait_event(stream, device.record(device.current_stream()))
        with device.on(stream):
            work()
        return device.record(stream)

    def _join(self) -> None:
        device = self.device
        for name in ("gather", "scatter"):
            device.wait_event(device.current_stream(), device.record(device.side_stream(name)))


if __name__ == "__main__":
    sys.exit(run_part("overlap", run))
