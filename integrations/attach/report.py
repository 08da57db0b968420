"""What CommFuse does with every parameter of a model, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from commfuse_dp.integrations.attach.rows import lines_of
from torch import nn

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.probe import Probe
from commfuse_dp.transport.budget import Footprint

Path = Literal["fused", "gathered", "hooks", "column", "row", "stock", "plain"]

MEANING = {
    "fused": "GEMM by slices: forward, dgrad and wgrad overlap their own communication",
    "gathered": "gathered whole in the same stream of slices, prefetched; compute unfused",
    "hooks": "gathered and reduced whole by the framework, over CommFuse's all-gather and reduce-scatter",
    "column": "tensor-parallel by output features: GEMM by slices of the sequence as they arrive; backward likewise",
    "row": "tensor-parallel by input features: GEMM by slices of the sequence, sent as they are computed; backward likewise",
    "stock": "left to the framework as it was",
    "plain": "claimed, but CommFuse is off: blocking collectives, compute unfused",
}

FROZEN = "frozen: it has no gradient"


class ParameterRow(NamedTuple):
    name: str
    path: Path
    reason: str
    numel: int


@dataclass(eq=False, repr=False)
class Report:
    """Result of `apply`. `print(report)` shows the path and the reason of every parameter, equal ones together."""

    rows: list[ParameterRow]
    _: KW_ONLY
    transport: str
    transport_reason: str
    config: CommFuseConfig
    probe: Probe
    world_size: int
    minimum_bytes_per_step: int
    """Bytes one rank receives in a textbook step: (N-1)/N x (parameters of every all-gather + gradients), with two all-gathers
    of whatever is resharded after forward and has a backward. The window can go below it: engine/window.py."""
    kernels: Callable[[], Sequence[Any]] = tuple
    """On a GPU: what computes each product of the fused layers so far, and why; rows of kernels/choice.py."""
    reads: Mapping[str, int] = field(default_factory=dict)
    """Layer -> how often so far it was gathered whole because a forward read its parameters beside the layer's own call."""
    footprint: Callable[[], Footprint | None] = lambda: None
    """See `memory`."""
    deferred_gather: Footprint | None = None
    """ZeRO-1/2 with defer_gather: bytes for it, beside `memory`."""
    gathered_inputs: Mapping[str, int] = field(default_factory=dict)
    """Tensor parallelism: module -> how often so far the framework gathered its input after all, because a forward used it
    beside the layers that share it."""
    tensor_parallel: Report | None = None
    """Of a model that is sharded by data parallelism over tensor parallelism: the latter's own report."""

    @classmethod
    def untouched(cls, rows: list[ParameterRow], config: CommFuseConfig, why: str, world_size: int) -> Report:
        """Of a model of which nothing is served."""
        return cls(
            rows,
            transport="none",
            transport_reason=why,
            config=config,
            probe=Probe(),
            world_size=world_size,
            minimum_bytes_per_step=0,
        )

    @property
    def memory(self) -> Footprint | None:
        """Bytes that CommFuse takes on this rank, as they were announced before; None: nothing. Rings of tensor parallelism on
        GPUs grow with the first calls."""
        return self.footprint()

    def numel_by_path(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for row in self.rows:
            total[row.path] += row.numel
        return dict(total)

    @property
    def summary(self) -> str:
        """What goes before the list of parameters: a line for each path."""
        return str(self).partition("\n\n")[0]

    def __str__(self) -> str:
        whole = sum(row.numel for row in self.rows) or 1
        lines = [f"CommFuse: {self.world_size} ranks, transport {self.transport} ({self.transport_reason})"]
        if self.memory is not None:
            lines.append(f"  memory: {self.memory}")
        if self.deferred_gather is not None:
            lines.append(f"  memory of the deferred gather: {self.deferred_gather}")
        if self.tensor_parallel is not None:
            tensor = self.tensor_parallel
            lines.append(
                f"  over tensor parallelism: {tensor.world_size} ranks, transport {tensor.transport} "
                f"({tensor.transport_reason})"
            )
            if tensor.memory is not None:
                lines.append(f"  memory: {tensor.memory}")
        for path, numel in sorted(self.numel_by_path().items(), key=lambda item: -item[1]):
            lines.append(f"  {path:<9}{numel:>14,} parameters {100 * numel / whole:5.1f} %  {MEANING[path]}")
        lines.append("")
        lines += lines_of(self.rows)
        width = max((len(name) for name in (*self.reads, *self.gathered_inputs)), default=4)
        if self.reads:
            lines += ["", "  read beside their layer's own call so far, and gathered whole and reduced once more for that"]
            lines += ["  (exclude=[name] leaves a layer to the framework, which may be cheaper):"]
            lines += [f"    {name:<{width}}  {count} times" for name, count in self.reads.items()]
        if self.probe.bound_for:
            why = ", ".join(f"{count} for {reason}" for reason, count in self.probe.bound_for.items())
            lines += ["", f"  backward passes of layers so far: {self.probe.counters.replayed} replayed, bound anew: {why}"]
        if self.gathered_inputs:
            lines += ["", "  inputs that were gathered once more so far, as something beside their column layers used them:"]
            lines += [f"    {name:<{width}}  {count} times" for name, count in self.gathered_inputs.items()]
        products = self.kernels()
        if products:
            lines += ["", "  products so far (tokens x columns x rows of all slices):"]
            for row in products:
                product = f"{row.op:<8} {row.product:<22} {row.dtype:<18} {row.slices:>3} slices"
                lines.append(f"  {product}  {row.backend:<7}{row.tiles}  {row.why}")
        return "\n".join(lines)


def frozen_first(model: nn.Module) -> set[str]:
    """Names of the parameters before the first that is trained, by order of registration: layers with no others have no
    backward, and are gathered once."""
    return {name for name, _ in takewhile(lambda item: not item[1].requires_grad, model.named_parameters())}
