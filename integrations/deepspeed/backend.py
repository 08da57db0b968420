"""DeepSpeed's communication backend with its collectives over CommFuse's transport: for all that is not fused.

[Note: Other blocking collectives]
While this rank is blocked in a collective of torch.distributed it sums no gradients and gives no credit back, and a peer that
is behind may need credit to reach that collective at all. So whatever is not served here first finishes the gradients of the
layers that this rank has passed (`Engine.settle`): slower, never stuck.

[Note: Collectives beside streams]
Where streams wait for the engine (GPUs) nothing is served here but the deferred all-gather: plain collectives are
pumped by a host that looks at what has come, and there is nothing to look at. DeepSpeed's stay with its own backend (NCCL), and
nothing has to settle before them. Say a collective has place p in the program, the same on all ranks; its stream waits until
every rank has come to p. Before it, a rank's compute waits for slices of parameters that were published before p, and for sums
of layers before p; those wait for nothing behind p on any rank, as everything of a layer is enqueued before the layer's call
returns, but for credit of the last sum, which no message before p needs. So the host may wait for a collective, too: it holds
nothing else back. And a kernel that waits for slices, on all multiprocessors, waits for no collective: slices are published
when a step begins.

[Note: Whose call it is]
All DeepSpeed engines of a process share one backend, and a call does not say for which engine it is made. It is an engine's if
it comes out of that engine's step: its forward, a backward if it is the engine whose forward began last (`activate`), and what
DeepSpeed does behind a backward and in `engine.step()`. Every other call, between steps or of an engine without CommFuse, goes
to DeepSpeed's own backend: a step that is lost concerns none of those. A wrong guess changes who moves the bytes, never the
result.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.transaction import Transaction
from commfuse_dp.integrations.deepspeed import compat
from commfuse_dp.integrations.deepspeed.deferred import DeferredGather

from commfuse_dp.collectives.end_of_backward import in_backward
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
SMALL = 1 << 16  # bytes
SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


# DeepSpeed engines of this process without CommFuse.
_stock: weakref.WeakSet[Any] = weakref.WeakSet()


def standing() -> RingBackend | None:
    """The backend that stands in now, if there is one."""
    found = compat.get_backend()
    return found if isinstance(found, RingBackend) else None


def serve(transaction: Transaction, zero: Any, client: Client) -> None:
    """From now on the collectives of a DeepSpeed engine are those of `client`. The undo leaves it to DeepSpeed."""
    backend = standing()
    if backend is None:
        backend = RingBackend(compat.get_backend())
        transaction.do(functools.partial(compat.set_backend, backend), backend.end_if_unused)
    transaction.do(functools.partial(_stock.discard, zero), functools.partial(leave_alone, zero))
    backend.adopt(zero)
    for other in list(_stock):
        backend.leave_alone(other)
    backend.serve(transaction, client)


def leave_alone(zero: Any) -> None:
    """Have an engine without CommFuse keep DeepSpeed's own collectives, though another engine of this process is or will be
    served."""
    _stock.add(zero)
    backend = standing()
    if backend is not None:
        backend.leave_alone(zero)


def activate(client: Client | None) -> None:
    """The calls to come are for this client: see [Note: Whose call it is]. None: for an engine without CommFuse."""
    backend = standing()
    if backend is not None:
        backend.activate(client)


def settle() -> None:
    """What every collective does that is not served here and blocks: see above. For those that others bring along."""
    backend = standing()
    if backend is not None:
        backend.settle()


class _Done(dist.distributed_c10d.Work):
    """A collective that was complete when it returned."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _name(op: Any) -> str | None:
    """Of a reduction. DeepSpeed's own enumeration has torch's names, but is equal to nothing of torch."""
    return getattr(op, "name", None)


def _nobody() -> None:
    return None


class Client:
    """One engine of CommFuse that the backend serves. Its attachment holds it; the backend does not."""

    def __init__(
        self, engine: Engine, port: CollectivePort | None, ranks: tuple[int, ...], deferred: DeferredGather | None
    ) -> None:
        self.engine = engine
        self.port = port
        """Serves the collectives of the group of `ranks` (global ones). None: only deferred all-gathers are served."""
        self.ranks = ranks
        self.deferred = deferred
        """All-gathers of its groups are started, and finish when they are needed."""
        self._inside = 0

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """The collectives in here are of this engine's step."""
        backend = standing()
        before = backend.active() if backend is not None else None
        activate(self)
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            activate(before)

    @property
    def in_step(self) -> bool:
        """Whether a call made now is of this engine's step, if its forward began last."""
        return self._inside > 0 or self.engine.in_forward or in_backward()

    def settle(self) -> None:
        """Before something blocks that does not poll the engine: finish the gradients of all layers passed. A step that was
        broken off has none to finish, and what comes behind it goes on without it; peers that wait for this rank hear of it."""
        engine = self.engine
        if engine.transport.device is not None:
            return
        under_way = self._inside > 0 or engine.in_forward or engine.in_own_backward
        if engine.broken_off and not under_way:
            engine.breakage.leave(unfinished=engine.unfinished)
        else:
            engine.settle()


class RingBackend:
    """Stands where DeepSpeed's backend stood; everything that is not served here goes on to that one.

    It holds its clients, DeepSpeed's engines and process groups by weak references: what is dropped is served no more.
    """

    def __init__(self, original: Any) -> None:
        self.original = original
        self._clients: list[weakref.ref[Client]] = []  # in the order in which they came: alike on all ranks
        self.active: Callable[[], Client | None] = _nobody
        self._members: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()  # of each process group
        self._others: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # engine -> handle of its hook

    @property
    def clients(self) -> list[Client]:
        found = [reference() for reference in self._clients]
        return [client for client in found if client is not None]

    def serve(self, transaction: Transaction, client: Client) -> None:
        """Collectives for this client's engine go through its port from now on, until it is released or has gone."""
        transaction.on_undo(lambda: self.release(client))
        self._clients = [weakref.ref(known) for known in (*self.clients, client)]
        weakref.finalize(client, self.end_if_unused).atexit = False
        self.activate(client)

    def release(self, client: Client) -> None:
        self._clients = [weakref.ref(known) for known in self.clients if known is not client]
        self.end_if_unused()

    def activate(self, client: Client | None) -> None:
        """The calls to come are for this client; None: for an engine that CommFuse does not serve."""
        self.active = _nobody if client is None else weakref.ref(client)

    def leave_alone(self, zero: Any) -> None:
        """Have a DeepSpeed engine without CommFuse keep DeepSpeed's own collectives, as long as this backend stands."""
        if zero not in self._others:
            self._others[zero] = zero.module.register_forward_pre_hook(lambda module, args: self.activate(None))

    def adopt(self, zero: Any) -> None:
        """The opposite: CommFuse is about to serve this engine, too."""
        handle = self._others.pop(zero, None)
        if handle is not None:
            handle.remove()

    def end_if_unused(self) -> None:
        """Nobody is served any more: DeepSpeed gets its own backend back, and engines left alone forget this one."""
        if self.clients:
            return
        for handle in self._others.values():
            handle.remove()
        self._others.clear()
        if compat.get_backend() is self:
            compat.set_backend(self.original)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.original, name)
        if name not in _BLOCKING:
            return value

        def settled(*args: Any, **kwargs: Any) -> Any:
            self.settle()
            return value(*args, **kwargs)

        return settled

    # ---- what is served ----------------------------------------------------------------------------------------------
    def all_gather_into_tensor(self, output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        for gather in [client.deferred for client in self.clients if client.deferred is not None]:
            index = gather.index_of(output_tensor)
            if index is not None:
                gather.start(index)
                return _Done() if async_op else None
        port = self._port(group, output_tensor, input_tensor)
        if port is None:
            self.settle()
            return self.original.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        work = port.all_gather(output_tensor.view(-1), input_tensor.view(-1))
        if async_op:
            return work
        work.wait()
        return None

    def reduce_scatter_tensor(
        self, output_tensor: Any, input_tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        port = self._port(group, output_tensor, input_tensor) if _name(op) in ("SUM", "AVG") else None
        if port is None or input_tensor.dtype not in SUMMED:
            self.settle()
            return self.original.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        divisor = float(port.world_size) if _name(op) == "AVG" else None
        port.reduce_scatter(output_tensor.view(-1), input_tensor.view(-1), divisor)
        return _Done() if async_op else None

    def all_reduce(self, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        port = self._port(group, tensor) if _name(op) in ("SUM", "AVG") else None
        if port is None or tensor.dtype not in SUMMED or tensor.numel() < port.world_size:
            self.settle()
            return self.original.all_reduce(tensor, op=op, group=group, async_op=async_op)
        port.all_reduce(tensor, float(port.world_size) if _name(op) == "AVG" else None)
        return _Done() if async_op else None

    def broadcast(self, tensor: Any, src: int, group: Any = None, async_op: bool = False) -> Any:
        """Served if small: ZeRO-3 compares the orders of fetches that ranks have recorded, in the middle of a step, and whoever
        waits for a rank that has broken it off has to hear of that. Every rank sends its own."""
        tensor = tensor.detach()
        if tensor.numel() == 0:
            return _Done() if async_op else None
        client = self._client(group, tensor) if tensor.nbytes <= SMALL else None
        if client is None or client.port is None:
            self.settle()
            return self.original.broadcast(tensor, src, group=group, async_op=async_op)
        told = tensor.new_empty(client.port.world_size, tensor.numel())
        client.port.all_gather(told.view(-1), tensor.view(-1)).wait()
        tensor.copy_(told[client.ranks.index(src)].view_as(tensor))
        return _Done() if async_op else None

    # ---- helpers -----------------------------------------------------------------------------------------------------
    def _client(self, group: Any, *tensors: torch.Tensor) -> Client | None:
        """Whose collective this is, if it can be served."""
        client = self.active()
        if client is None or not client.in_step or client.ranks != self._ranks_of(group):
            return None
        kind = client.engine.device.type
        return client if all(t.is_contiguous() and t.device.type == kind and t.numel() > 0 for t in tensors) else None

    def _port(self, group: Any, *tensors: torch.Tensor) -> CollectivePort | None:
        client = self._client(group, *tensors)
        return client.port if client is not None else None

    def _ranks_of(self, group: Any) -> tuple[int, ...]:
        group = dist.group.WORLD if group is None else group
        found = self._members.get(group)
        if found is None:
            found = self._members[group] = tuple(dist.get_process_group_ranks(group))
        return found

    def settle(self) -> None:
        for client in self.clients:
            client.settle()
