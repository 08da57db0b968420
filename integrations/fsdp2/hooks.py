"""FSDP2's own groups over CommFuse's collectives, through FSDP2's public hooks.

The all-gather returns a pending Work, so that FSDP2's prefetch overlaps it with compute also where FSDP2 itself would block
(on CPU). FSDP2 ignores what the reduce-scatter hook returns and reads the output at once, so that one blocks on CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from commfuse_dp.engine.collective_port import CollectivePort
from commfuse_dp.errors import CommFuseError

# Renamed, with a warning, after torch 2.11.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Allocate:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class StreamAllGather(_Allocate):
    """For `FSDPModule.set_custom_all_gather`."""

    def __init__(self, port: CollectivePort) -> None:
        self._port = port

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if group.size() != self._port.world_size:  # reshard_after_forward=int: the second all-gather is among fewer ranks
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return self._port.all_gather(output_tensor, input_tensor)


class StockCollective(_Allocate):
    """What FSDP2 does by itself. `remove` sets it where the public names do not say what was set before."""

    def __init__(self, collective: Callable[..., dist.Work | None]) -> None:
        """collective: `all_gather` or `reduce_scatter`."""
        self._collective = collective

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **how: Any) -> dist.Work | None:
        return self._collective(output_tensor, input_tensor, **how)


class StreamReduceScatter(_Allocate):
    """For `FSDPModule.set_custom_reduce_scatter`. Sums in rank order in a wide type."""

    def __init__(self, port: CollectivePort) -> None:
        self._port = port

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._port.reduce_scatter(output_tensor, input_tensor, self._divisor(op, group))
        self._port.settle_replicas()  # FSDP2's own all-reduce over them comes next: it would not see that one has gone

    @staticmethod
    def _divisor(op: Any, group: dist.ProcessGroup) -> float | None:
        """FSDP2 asks for SUM, AVG, or PREMUL_SUM with the factor 1/d."""
        if op == dist.ReduceOp.SUM:
            return None
        if op == dist.ReduceOp.AVG:
            return float(group.size())
        factor = getattr(op, "__getstate__", lambda: (None, None))()[1]
        if isinstance(factor, (int, float)) and factor:
            return 1.0 / factor
        raise CommFuseError(
            f"FSDP2 asked for a reduce-scatter with {op}, which cannot be served; allowed are SUM, AVG and PREMUL_SUM. "
            "Exclude the module from CommFuse, or set no custom gradient divide factor for it."
        )
