"""DeepSpeed's communication backend with its collectives over CommFuse's transport: for all that is not fused.

[Note: Other blocking collectives]
While this rank is blocked in a collective of torch.distributed it sums no gradients and gives no credit back, and a peer that
is behind may need credit to reach that collective at all. So whatever is not served here first finishes the gradients of the
layers that this rank has passed (`Engine.settle`): slower, never stuck.

[Note: Collectives beside streams]
Where the engine's waits stand in streams (GPUs) nothing is served here but the deferred all-gather: plain collectives are
pumped by a host that looks at what has come, and there is nothing to look at. DeepSpeed's stay with its own backend (NCCL), and
nothing has to settle before them. Say a collective has place p in the program, the same on all ranks; its stream stands until
every rank has come to p. Before it, a rank's compute waits for slices of parameters that were published before p, and for sums
of layers before p; those wait for nothing behind p on any rank, as everything of a layer is enqueued, credits included, before
the layer's call returns. So the host may wait for a collective, too: it holds nothing back. And a kernel that waits for slices,
on all multiprocessors, waits for no collective: slices are published when a step begins.

[Note: Whose call it is]
All DeepSpeed engines of a process share one backend, and a call does not say for which engine it is made. It is taken to be
for the engine whose forward began last (`activate`); an engine without CommFuse thus keeps DeepSpeed's own collectives. A wrong
guess changes who moves the bytes, never the result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from commfuse_dp.integrations.deepspeed.deferred import DeferredGather

from commfuse_dp.engine.collective_port import CollectivePort
from commfuse_dp.engine.engine import Engine

_BLOCKING = (
    "all_gather",
    "all_gather_base",
    "all_gather_coalesced",
    "all_gather_object",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "inference_all_reduce",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)
SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class _Done(dist.distributed_c10d.Work):
    """A collective that was complete when it returned."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class RingBackend:
    """Stands where DeepSpeed's backend stood; everything that is not served here goes on to that one."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self._active: Engine | None = None
        self._deferred: dict[int, DeferredGather] = {}  # by id(engine)
        self._ports: dict[tuple[int, ...], tuple[Engine, CollectivePort | None]] = {}
        self._ranks: dict[
            int, tuple[Any, tuple[int, ...]]
        ] = {}  # id(group) -> (group, kept so that the id stays its own; ranks)

    def serve(self, engine: Engine, port: CollectivePort | None, ranks: tuple[int, ...]) -> None:
        """Collectives of the group of these global ranks go through `port` from now on. None: only deferred all-gathers do."""
        self._ports[ranks] = (engine, port)
        self._active = engine

    def activate(self, engine: Engine | None) -> None:
        """The calls to come are for this engine; None: for one that CommFuse does not serve."""
        self._active = engine

    def defer(self, engine: Engine, gather: DeferredGather) -> None:
        """All-gathers of `gather`'s groups, made for this engine, are started and finish when they are needed."""
        self._deferred[id(engine)] = gather

    def release(self, engine: Engine) -> bool:
        """The engine ends. True if nobody is served any more."""
        self._deferred.pop(id(engine), None)
        self._ports = {ranks: entry for ranks, entry in self._ports.items() if entry[0] is not engine}
        return not self._ports

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.original, name)
        if name not in _BLOCKING:
            return value

        def settled(*args: Any, **kwargs: Any) -> Any:
            self._settle()
            return value(*args, **kwargs)

        return settled

    # ---- what is served ----------------------------------------------------------------------------------------------
    def all_gather_into_tensor(self, output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        served = self._serves(group, output_tensor, input_tensor)
        gather = self._deferred.get(id(self._active)) if served else None
        index = gather.index_of(output_tensor) if gather is not None else None
        if gather is not None and index is not None:
            gather.start(index)
            return _Done() if async_op else None
        port = self._port(group, output_tensor, input_tensor)
        if port is None:
            self._settle()
            return self.original.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        work = port.all_gather(output_tensor.view(-1), input_tensor.view(-1))
        if async_op:
            return work
        work.wait()
        return None

    def reduce_scatter_tensor(
        self, output_tensor: Any, input_tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        port = self._port(group, output_tensor, input_tensor) if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) else None
        if port is None or input_tensor.dtype not in SUMMED:
            self._settle()
            return self.original.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        divisor = float(port.world_size) if op == dist.ReduceOp.AVG else None
        port.reduce_scatter(output_tensor.view(-1), input_tensor.view(-1), divisor)
        return _Done() if async_op else None

    def all_reduce(self, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        port = self._port(group, tensor) if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) else None
        if port is None or tensor.dtype not in SUMMED or tensor.numel() < port.world_size:
            self._settle()
            return self.original.all_reduce(tensor, op=op, group=group, async_op=async_op)
        port.all_reduce(tensor, float(port.world_size) if op == dist.ReduceOp.AVG else None)
        return _Done() if async_op else None

    # ---- helpers -----------------------------------------------------------------------------------------------------
    def _serves(self, group: Any, *tensors: torch.Tensor) -> bool:
        engine = self._ports.get(self._ranks_of(group), (None, None))[0]
        if engine is None or engine is not self._active:
            return False
        return all(t.is_contiguous() and t.device.type == engine.device.type and t.numel() > 0 for t in tensors)

    def _port(self, group: Any, *tensors: torch.Tensor) -> CollectivePort | None:
        return self._ports[self._ranks_of(group)][1] if self._serves(group, *tensors) else None

    def _ranks_of(self, group: Any) -> tuple[int, ...]:
        found = self._ranks.get(id(group))
        if found is None:
            members = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
            found = self._ranks[id(group)] = (group, tuple(members))
        return found[1]

    def _settle(self) -> None:
        for engine, _ in self._ports.values():
            if not engine.transport.device_ordered:
                engine.settle()
