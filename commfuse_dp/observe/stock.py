"""StockMeter: measures stock FSDP2 with the same probe as CommFuse, so that both are read by one and the same ruler.

[Note: What is wrapped]
FSDP2 looks its collectives up as attributes of the package `torch.distributed` at every call (`all_gather_single` and
`reduce_scatter_single` since torch 2.13, `all_gather_into_tensor` and `reduce_scatter_tensor` before, `all_reduce` for HSDP).
While the meter is on, those attributes are wrapped and the time the calling thread spends inside is exposed communication.
Only the package's attributes are replaced, not the functions in `distributed_c10d`, so a new name that forwards to an old one
is counted once. An asynchronous call is followed to its `Work.wait`, whose blocking time is what counts. All is put back on
exit; while the meter is off nothing is wrapped and nothing is spent.

[Note: What is not counted]
FSDP2's copies into and out of its flat buffers: they are work that communication causes, but compute is not *blocked* then.
On CUDA a collective returns as soon as it is queued: the blocked time is on the device's streams, and this meter would read
nearly zero. It refuses such groups.

[Note: Bytes]
Payload received by this rank according to the algorithm that the backend runs. Gloo has no reduce-scatter of its own:
torch runs an all-reduce and keeps one part, which moves twice the bytes. Read `observe.interface` for the wire itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from commfuse_dp.probe import RECEIVE, SEND, Probe, now_ns

_KINDS = {
    "all_gather_single": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_single": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
}
_FRAMES = 6  # from a wrapped collective up to FSDP2's parameter group: three today


class _Flight(NamedTuple):
    """An asynchronous collective under way. `work` is kept so that its id stays its own."""

    work: Any
    kind: str
    layer: str
    start_ns: int
    nbytes: int


def payload_received(kind: str, nbytes: int, world_size: int, *, backend: str = "gloo") -> int:
    """Bytes one rank receives in a collective over a full (unsharded) tensor of `nbytes`; ring algorithms throughout."""
    once = nbytes * (world_size - 1) // world_size
    if kind == "all-reduce" or (kind == "reduce-scatter" and backend == "gloo"):
        return 2 * once
    return once


class StockMeter:
    """Context manager; `probe` then holds exposed time, bytes and (with a sink attached) spans like an engine's probe.

    meter = StockMeter()
    steps = StepMeter(meter.probe)
    with meter:
        for batch in data:
            with steps.step():
                ...
    """

    def __init__(self, probe: Probe | None = None) -> None:
        self.probe = probe if probe is not None else Probe()
        self.collectives: dict[str, int] = {}  # kind -> number of calls
        self._originals: dict[str, Callable[..., Any]] = {}
        self._work_wait: Callable[..., Any] | None = None
        self._flights: dict[int, _Flight] = {}

    def __enter__(self) -> StockMeter:
        if self._originals:
            raise RuntimeError("this StockMeter is already on.")
        for name, kind in _KINDS.items():
            original = getattr(dist, name, None)
            if original is not None:
                self._originals[name] = original
                setattr(dist, name, self._wrap(original, kind))
        self._work_wait = dist.Work.wait
        dist.Work.wait = self._wrap_wait(self._work_wait)  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)
        self._originals.clear()
        if self._work_wait is not None:
            dist.Work.wait = self._work_wait  # type: ignore[method-assign]
            self._work_wait = None
        self._flights.clear()

    def _wrap(self, original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            backend = dist.get_backend(group)
            if backend != "gloo":
                raise RuntimeError(
                    f"StockMeter measures gloo groups only, this one is {backend!r}: its collectives are asynchronous on the "
                    "device, so blocked host time says nothing. Use torch.profiler there."
                )
            layer = _calling_layer()
            nbytes = max((a.nbytes for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), default=0)
            start = now_ns()
            work = original(*args, **kwargs)
            end = now_ns()
            self.collectives[kind] = self.collectives.get(kind, 0) + 1
            received = payload_received(kind, nbytes, dist.get_world_size(group), backend=backend)
            self._count(kind, received)
            self._blocked(kind, layer, start, end)
            if isinstance(work, dist.Work):
                self._flights[id(work)] = _Flight(work, kind, layer, start, received)
            else:
                self._transferred(kind, layer, start, end, received)
            return work

        return measured

    def _wrap_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        flights = self._flights

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            flight = flights.pop(id(work), None)
            if flight is None:
                return original(work, *args, **kwargs)
            start = now_ns()
            result = original(work, *args, **kwargs)
            end = now_ns()
            self._blocked(flight.kind, flight.layer, start, end)
            self._transferred(flight.kind, flight.layer, flight.start_ns, end, flight.nbytes)
            return result

        return wait

    def _blocked(self, kind: str, layer: str, start_ns: int, end_ns: int) -> None:
        self.probe.exposed(layer, start_ns, end_ns)
        if kind == "reduce-scatter":  # the last one of a step ends its backward
            self.probe.ended(start_ns, end_ns)

    def _count(self, kind: str, nbytes: int) -> None:
        # Every algorithm here is symmetric: a rank sends as much as it receives.
        counters = self.probe.counters
        if kind == "all-gather":
            counters.param_bytes_received += nbytes
            counters.param_bytes_sent += nbytes
        else:
            counters.grad_bytes_received += nbytes
            counters.grad_bytes_sent += nbytes

    def _transferred(self, kind: str, layer: str, start_ns: int, end_ns: int, nbytes: int) -> None:
        """A collective sends and receives all the while; what it does when inside is not visible from here."""
        if self.probe.sink is not None:
            for lane in (SEND, RECEIVE):
                self.probe.sink(lane, f"{kind} {layer}", start_ns, end_ns, {"nbytes": nbytes})


def _calling_layer() -> str:
    """Name of the module whose parameter group asked for the collective, read off the calling frames; '?' if it was not FSDP2.

    `_module_fqn` is a private name of FSDP2; it is only read, and without it the layer is merely unnamed.
    """
    frame = sys._getframe(2)
    for _ in range(_FRAMES):
        owner = frame.f_locals.get("self")
        name = getattr(owner, "_module_fqn", None)
        if isinstance(name, str):
            return name or "root"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "?"
