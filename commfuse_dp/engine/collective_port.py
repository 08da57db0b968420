"""Plain collectives on the engine's transport, for parameters that stay in a framework's own groups.

[Note: Sharing one transport]
A rank that waits in a plain collective must go on summing the fused layers' gradients: a peer further behind may be blocked
for want of credit in this rank's inbox, and would never reach the collective (see [Note: Credit and deadlock] in
gradients.py). `CollectivePort` is the transport as collectives see it: every wait polls the gradient stream first.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from commfuse_dp.collectives.summation import sum_in_rank_order
from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.parameters import flat_order
from commfuse_dp.errors import Where
from commfuse_dp.probe import now_ns
from commfuse_dp.schedule.orders import gather_owners, scatter_owners
from commfuse_dp.transport.base import CHANNEL_COLLECTIVE, CHANNEL_PARAM, Tag

_ROUND_LIMIT = 1 << 31


class _Outgoing:
    """One message still to be sent."""

    __slots__ = ("data", "dst", "tag")

    def __init__(self, dst: int, tag: Tag, data: torch.Tensor) -> None:
        self.dst, self.tag, self.data = dst, tag, data


class PendingAllGather(dist.distributed_c10d.Work):
    """An all-gather whose sends are under way; `wait` takes in the peers' shards. A Work, as FSDP2 expects one."""

    def __init__(self, port: CollectivePort, output: torch.Tensor, shard: torch.Tensor, call: int) -> None:
        super().__init__()
        self._port = port
        self._output = output.view(torch.uint8).view(port.world_size, -1)
        self._call = call
        own = self._output[port.rank]
        data = shard.view(torch.uint8)
        if own.data_ptr() != data.data_ptr():
            own.copy_(data)
        self._spans = port.spans(own.numel())
        self._outgoing = [
            _Outgoing(peer, Tag(CHANNEL_PARAM, 0, call, part), own[start:stop])
            for peer in gather_owners(port.rank, port.world_size, port.order)[1:]
            for part, (start, stop) in enumerate(self._spans)
        ]
        for peer in range(port.world_size):
            if peer != port.rank:
                for part, (start, stop) in enumerate(self._spans):
                    port.transport.expect(peer, Tag(CHANNEL_PARAM, 0, call, part), stop - start)
        if own.numel() <= port.eager_limit:  # small enough never to fill an inbox while nobody waits
            port.push(self._outgoing)

    def is_completed(self) -> bool:
        return self._output is None

    def wait(self, timeout: object = None) -> bool:
        if self._output is not None:
            output, self._output = self._output, None  # type: ignore[assignment]
            wanted = [
                (owner, Tag(CHANNEL_PARAM, 0, self._call, part), output[owner][start:stop])
                for owner in gather_owners(self._port.rank, self._port.world_size, self._port.order)[1:]
                for part, (start, stop) in enumerate(self._spans)
            ]

            def consume(src: int, tag: Tag, data: torch.Tensor) -> None:
                target = next(out for owner, known, out in wanted if owner == src and known == tag)
                target.copy_(data)

            self._port.run(self._outgoing, [(owner, tag, out.numel()) for owner, tag, out in wanted], consume, "all-gather")
        return True


class CollectivePort:
    """All-gather and reduce-scatter of equal, padded shards over the engine's transport. All ranks call alike."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.transport = engine.transport
        self.rank, self.world_size = engine.rank, engine.world_size
        self.order = flat_order(engine.config)
        self._calls = 0

    @property
    def eager_limit(self) -> int:
        return self.transport.message_limit // 8

    def spans(self, nbytes: int) -> list[tuple[int, int]]:
        """Cut nbytes into messages; a quarter of the limit each, so that several are under way."""
        step = max(64, self.transport.message_limit // 4 // 64 * 64)
        return [(start, min(start + step, nbytes)) for start in range(0, nbytes, step)]

    def _next_call(self) -> int:
        self._engine.ensure_exposed()
        call = self._calls
        self._calls = (self._calls + 1) % _ROUND_LIMIT
        return call

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> PendingAllGather:
        """output [N * n] <- shards [n] of all ranks. Starts at once; `wait()` completes it."""
        return PendingAllGather(self, output, shard, self._next_call())

    def reduce_scatter(self, output: torch.Tensor, partials: torch.Tensor, divisor: float | None) -> None:
        """output [n] <- sum over ranks of their partials [N * n], in rank order in a wide type, over `divisor`. Blocks."""
        call = self._next_call()
        parts = partials.view(self.world_size, -1)
        spans = self.spans(output.nbytes)
        outgoing = [
            _Outgoing(owner, Tag(CHANNEL_COLLECTIVE, 1, call, part), parts[owner].view(torch.uint8)[start:stop])
            for owner in scatter_owners(self.rank, self.world_size, self.order)[:-1]
            for part, (start, stop) in enumerate(spans)
        ]
        received = {peer: torch.empty_like(output) for peer in range(self.world_size) if peer != self.rank}
        wanted = [
            (peer, Tag(CHANNEL_COLLECTIVE, 1, call, part), stop - start)
            for peer in scatter_owners(self.rank, self.world_size, "ring")[:-1]
            for part, (start, stop) in enumerate(spans)
        ]
        for peer, tag, nbytes in wanted:
            self.transport.expect(peer, tag, nbytes)

        def consume(src: int, tag: Tag, data: torch.Tensor) -> None:
            start, stop = spans[tag.part]
            received[src].view(torch.uint8)[start:stop].copy_(data)

        self.run(outgoing, wanted, consume, "reduce-scatter")
        received[self.rank] = parts[self.rank]
        ordered = [received[rank] for rank in range(self.world_size)]
        sum_in_rank_order(output, ordered, own_rank=self.rank, scale_divisor=divisor)

    def all_reduce(self, tensor: torch.Tensor, divisor: float | None) -> None:
        """tensor <- sum over ranks, in rank order in a wide type, over `divisor`. In place, any shape, contiguous. Blocks."""
        flat = tensor.view(-1)
        share = -(-flat.numel() // self.world_size)
        whole = flat
        if share * self.world_size != flat.numel():
            whole = flat.new_zeros(share * self.world_size)
            whole[: flat.numel()] = flat
        own = whole[self.rank * share : (self.rank + 1) * share]
        self.reduce_scatter(own, whole, divisor)
        self.all_gather(whole, own).wait()
        if whole is not flat:
            flat.copy_(whole[: flat.numel()])

    # ---- messages ----------------------------------------------------------------------------------------------------
    def push(self, outgoing: list[_Outgoing]) -> bool:
        """Send as many as there is credit for. True if any went."""
        sent = False
        blocked: set[int] = set()
        for item in list(outgoing):
            if item.dst in blocked:
                continue
            buffer = self.transport.try_reserve(item.dst, item.data.numel())
            if buffer is None:
                blocked.add(item.dst)  # later messages to it must not overtake: a smaller one would starve this one
                continue
            buffer.copy_(item.data)
            self.transport.send(item.dst, item.tag, buffer)
            outgoing.remove(item)
            sent = True
        return sent

    def run(self, outgoing: list[_Outgoing], wanted: list[tuple[int, Tag, int]], consume, what: str) -> None:
        """Send and receive until both lists are empty, summing fused gradients meanwhile."""
        start = now_ns()
        waiting = list(wanted)

        def advance() -> bool:
            self._engine.gradients.relieve()
            self.push(outgoing)
            for src, tag, _ in list(waiting):
                if self.transport.arrived(src, tag):
                    consume(src, tag, self.transport.receive(src, tag))
                    self.transport.release(src, tag)
                    waiting.remove((src, tag, _))
            return not outgoing and not waiting

        if advance():
            return
        while not advance():  # one peer after the other: one that has done its part may leave while others still owe theirs
            peer = waiting[0][0] if waiting else outgoing[0].dst

            def served(peer: int = peer) -> bool:
                done = advance()
                owing = [item[0] for item in waiting] if waiting else [item.dst for item in outgoing]
                return done or peer not in owing

            nbytes = sum(item[2] for item in waiting)
            where = Where(f"({what} of an FSDP2 group)", self._engine.step, "all", nbytes)
            self.transport.wait_until(served, peer=peer, where=where, doing=f"its part of an {what}")
        self._engine.probe.exposed(f"({what})", start, now_ns())
