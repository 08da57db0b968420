"""How the two seams of a tensor-parallel layer communicate: one class a variant, all over the same transport.

A seam is `column` (a sequence shard is gathered for products with own rows of weights) or `row` (products with own columns of a
weight are summed and scattered). Shapes: a shard is [s, D], a whole sequence [S, ...]; one batch entry.

| variant | column | row |
| --- | --- | --- |
| compute | the gathered rows are there already | other ranks' partials are dropped |
| vanilla | all-gather, then GEMMs | GEMM, then reduce-scatter |
| slicing-C | a thread gathers chunk c + 1 of C while chunk c is computed | a thread scatters chunk c while c + 1 is computed |
| commfuse | ops.column_parallel | ops.row_parallel, ops.row_parallel_attention |

vanilla and slicing keep the gathered rows for backward, commfuse gathers them again (`save="shard"`), commfuse-gathered keeps
them. slicing has no backward: the paper measured forward only, and so does this variant.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from commfuse_dp.collectives import all_gather, reduce_scatter
from commfuse_dp.ops import column_parallel, row_parallel, row_parallel_attention
from commfuse_dp.ops.adjoint import adjoint
from commfuse_dp.transport.base import Transport


class Seams(Protocol):
    def column(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[Any]: ...

    def row(self, x: Any, weight: torch.Tensor) -> torch.Tensor: ...

    def attention(self, q: Any, k: Any, v: Any, weight: torch.Tensor) -> torch.Tensor: ...

    def each(self, function: Callable[..., torch.Tensor], *tensors: Any) -> Any:
        """function, position by position, over what `column` gave."""

    def exposed_ns(self) -> int | None: ...


class _Whole(ABC):
    """Base: what `column` gives are whole tensors."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank, self.ranks = transport.rank, transport.world_size

    def each(self, function: Callable[..., torch.Tensor], *tensors: Any) -> Any:
        return function(*tensors)

    def attention(self, q: Any, k: Any, v: Any, weight: torch.Tensor) -> torch.Tensor:
        """q, k, v: [S, h, d], own heads."""
        heads = [t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
        o = F.scaled_dot_product_attention(*heads)
        return self.row(o.squeeze(0).transpose(0, 1).flatten(1), weight)

    @abstractmethod
    def row(self, x: Any, weight: torch.Tensor) -> torch.Tensor:
        """Own rows of the sum over the ranks."""

    def exposed_ns(self) -> int | None:
        return None


class Compute(_Whole):
    """Nothing is communicated: the bound."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._rows: dict[tuple[int, ...], torch.Tensor] = {}

    def column(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        rows, size = self._buffer(x, "x"), x.shape[0]
        at = self.rank * size
        whole = adjoint(x, lambda _: rows.view_as(rows), lambda grad: grad.narrow(0, at, size))
        return [F.linear(whole, weight) for weight in weights]

    def row(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, weight)
        size = y.shape[0] // self.ranks
        dy = self._buffer(y[:size], "dy")
        return adjoint(y, lambda whole: whole.narrow(0, self.rank * size, size), lambda _: dy)

    def _buffer(self, shard: torch.Tensor, what: str) -> torch.Tensor:
        key = (len(what), *shard.shape)
        if key not in self._rows:
            self._rows[key] = torch.randn(shard.shape[0] * self.ranks, shard.shape[1], dtype=shard.dtype)
        return self._rows[key]


class Vanilla(_Whole):
    """One collective, then compute; or the other way round."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._spent = 0

    def column(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        whole = adjoint(x, self.gather, self.scatter)
        return [F.linear(whole, weight) for weight in weights]

    def row(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return adjoint(F.linear(x, weight), self.scatter, lambda grad: self.gather(grad.contiguous()))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        start = time.monotonic_ns()
        whole = all_gather(x, sizes=(x.shape[0],) * self.ranks, transport=self.transport)
        self._spent += time.monotonic_ns() - start
        assert whole is not None
        return whole

    def scatter(self, y: torch.Tensor) -> torch.Tensor:
        start = time.monotonic_ns()
        own = reduce_scatter(y.contiguous(), sizes=(y.shape[0] // self.ranks,) * self.ranks, transport=self.transport)
        self._spent += time.monotonic_ns() - start
        return own

    def exposed_ns(self) -> int:
        return self._spent


class Slicing(_Whole):
    """Data slicing: chunks of every rank's shard go through a communication thread beside the compute of their neighbours."""

    def __init__(self, transport: Transport, chunks: int) -> None:
        super().__init__(transport)
        self.chunks = chunks
        self._spent = 0
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._communicate, name="slicing", daemon=True)
        self._thread.start()

    def column(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        parts = x.chunk(self.chunks)
        coming = [self._later(lambda part=part: self._gather(part)) for part in parts]  # type: ignore[misc]
        ys: list[list[torch.Tensor]] = [[] for _ in weights]
        for place in coming:
            rows = self._wait(place)
            for y, weight in zip(ys, weights, strict=True):
                y.append(F.linear(rows, weight))
        return ys

    def each(self, function: Callable[..., torch.Tensor], *tensors: Any) -> Any:
        return [function(*chunks) for chunks in zip(*tensors, strict=True)]

    def row(self, x: list[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
        coming = []
        for chunk in x:
            y = F.linear(chunk, weight)
            coming.append(self._later(lambda y=y: self._scatter(y)))  # type: ignore[misc]
        return torch.cat([self._wait(place) for place in coming])

    def attention(self, q: Any, k: Any, v: Any, weight: torch.Tensor) -> torch.Tensor:
        whole = [torch.cat(t).transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
        o = F.scaled_dot_product_attention(*whole).squeeze(0).transpose(0, 1).flatten(1)
        return self.row(list(o.split([len(chunk) for chunk in q])), weight)

    def exposed_ns(self) -> int:
        return self._spent

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        whole = all_gather(part, sizes=(part.shape[0],) * self.ranks, transport=self.transport)
        assert whole is not None
        return whole

    def _scatter(self, y: torch.Tensor) -> torch.Tensor:
        return reduce_scatter(y, sizes=(y.shape[0] // self.ranks,) * self.ranks, transport=self.transport)

    def _later(self, job: Callable[[], Any]) -> queue.SimpleQueue[Any]:
        place: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._jobs.put((job, place))
        return place

    def _wait(self, place: queue.SimpleQueue[Any]) -> Any:
        start = time.monotonic_ns()
        found = place.get()
        self._spent += time.monotonic_ns() - start
        if isinstance(found, BaseException):
            raise found
        return found

    def _communicate(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job[1].put(job[0]())
            except BaseException as error:  # the compute thread raises it
                job[1].put(error)


class CommFuse(_Whole):
    saves = "shard"

    def __init__(self, transport: Transport, slices: int | None) -> None:
        super().__init__(transport)
        self._how: dict[str, Any] = {"slices_per_rank": slices, "transport": transport}

    def column(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sizes = (x.shape[0],) * self.ranks
        return list(column_parallel(x, list(weights), dim=0, sizes=sizes, save=self.saves, **self._how))

    def row(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return row_parallel(x, weight, dim=0, sizes=(x.shape[0] // self.ranks,) * self.ranks, **self._how)

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        heads = [t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
        y = row_parallel_attention(*heads, weight, causal=False, **self._how)
        return y.squeeze(0)

    def exposed_ns(self) -> int:
        return self.transport.probe.counters.exposed_ns


class RowOnly(CommFuse):
    """As commfuse, with the attention whole before the row-parallel projection: what query-split attention is compared with."""

    attention = _Whole.attention


class Gathered(CommFuse):
    """As commfuse, with the gathered sequence kept for backward: a gather less, for as many times the memory as ranks."""

    saves = "gathered"


OURS = {"commfuse": CommFuse, "commfuse-row": RowOnly, "commfuse-gathered": Gathered}
