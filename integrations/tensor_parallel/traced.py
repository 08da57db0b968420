"""The input of a group of column-parallel layers in graphs of torch.compile, where no `StandIn` can be made.

attention(x)    its pre-hook hands on the gathered x, by an op that the compiler drops if nobody uses what it returns
  wq(x)         the first member of the group that gets it computes all of them, by an op that gathers slice by slice
  wk(x), wv(x)  fetch their outputs
  x * 2         any other operation: uses the gathered x

What the members need beside x is an attribute of x: to dynamo that is no change of anything outside of the graph, which it
would refuse in a checkpoint. Where the graph ends in between, members compute from the gathered x: dynamo would hand on the
attribute, but the gathered x, which then is an output of the graph before, would miss its gradient (torch 2.13 raises for a
DTensor).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from commfuse_dp.ops.compat import trace_number
from commfuse_dp.ops.sequence.rows import GraphPlace

_ATTRIBUTE = "_commfuse_traced"


class Traced:
    """Of one gathered input."""

    def __init__(self, local: torch.Tensor, sizes: tuple[int, ...], group: Any) -> None:
        """local: this rank's shard. sizes: positions of every rank."""
        self.local, self.sizes, self.group = local, sizes, group
        self.trace = trace_number()
        self.outputs: tuple[torch.Tensor, ...] | None = None  # of the members; None: nothing has been computed


def hand_on(
    local: torch.Tensor, dim: int, group: Any, place: GraphPlace, mesh: DeviceMesh, *, local_output: bool
) -> torch.Tensor:
    """The gathered x, as the module that the group is in gets it; every rank has as many positions."""
    from commfuse_dp.ops.sequence.graph_ops import gather_in_graph

    x = gather_in_graph(local, dim, place)
    if not local_output:
        x = DTensor.from_local(x, mesh, (Replicate(),), run_check=False)
    setattr(x, _ATTRIBUTE, Traced(local, (local.shape[dim],) * place.world_size, group))
    return x


def traced(x: Any, group: Any = None) -> Traced | None:
    """Of an input that was handed on (to this group)."""
    found: Traced | None = getattr(x, _ATTRIBUTE, None)
    if found is None or found.trace != trace_number() or (group is not None and found.group is not group):
        return None
    return found
