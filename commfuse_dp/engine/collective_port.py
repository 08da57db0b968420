"""Plain collectives on the engine's transport, for parameters that stay in a framework's own groups.

[Note: Sharing one transport]
A rank that waits in a plain collective must go on summing the fused layers' gradients: a peer further behind may be blocked
for want of credit in this rank's inbox, and would never reach the collective (see [Note: Credit and deadlock] in
gradients.py). And the other way round: whoever waits for anything takes in, and sends on, what belongs to collectives under
way (`GradientStream.make_progress`), and so does every layer that passes. So a collective of any size moves before its `wait`,
as far as credit goes.

[Note: Program order in a ring]
Collectives and gradients share the ring of a pair. What a rank sends leaves in the order of its program: a gradient does not
overtake what is still to be sent of a collective that was begun before it (`Reserver`), nor one collective another. So whatever
fills an inbox comes before what its owner may be waiting for, and the owner that is furthest behind finds everything that it
needs in front.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from commfuse_dp.collectives.summation import sum_in_rank_order
from commfuse_dp.engine.broken import ROOM
from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.programs import flat_order
from commfuse_dp.errors import BrokenStepError, Where
from commfuse_dp.ops.compat import hidden
from commfuse_dp.probe import now_ns
from commfuse_dp.program.orders import gather_owners, scatter_owners
from commfuse_dp.transport.base import CHANNEL_COLLECTIVE, CHANNEL_PARAM, Sending, Tag, Transport
from commfuse_dp.transport.waiting import wait_until

_ROUND_LIMIT = 1 << 31


class _Messages:
    """What is still to be sent and taken in for one collective.

    outgoing: (destination, tag, bytes), in the order of sending. incoming: (source, tag, bytes that it is copied to)."""

    def __init__(
        self,
        transport: Transport,
        what: str,
        outgoing: Sequence[tuple[int, Tag, torch.Tensor]],
        incoming: Sequence[tuple[int, Tag, torch.Tensor]],
    ) -> None:
        self._transport = transport
        self.what = what
        self._outgoing: dict[int, deque[tuple[Tag, torch.Tensor]]] = {}
        for dst, tag, data in outgoing:
            self._outgoing.setdefault(dst, deque()).append((tag, data))
        self._incoming: dict[int, deque[tuple[Tag, torch.Tensor]]] = {}
        for src, tag, out in incoming:
            transport.expect((src,), tag, out.numel())
            self._incoming.setdefault(src, deque()).append((tag, out))
        self.lost = ""  # why it will never be complete

    @property
    def done(self) -> bool:
        return not self._outgoing and not self._incoming

    def sends_to(self, dst: int) -> bool:
        return dst in self._outgoing

    def awaits(self) -> tuple[int, str, int]:
        """(peer, what of it, bytes) that is waited for first."""
        if self._incoming:
            peer, left = next(iter(self._incoming.items()))
            return peer, f"its part of an {self.what}", sum(out.numel() for _, out in left)
        peer, rest = next(iter(self._outgoing.items()))
        return peer, ROOM, sum(data.numel() for _, data in rest)

    def owes(self, peer: int) -> bool:
        """What `awaits` named is still missing."""
        return peer in self._incoming if self._incoming else peer in self._outgoing

    def send(self, blocked: set[int]) -> None:
        """Send as many as there is credit for, to none of `blocked`, which grows by those without credit."""
        for dst, left in list(self._outgoing.items()):
            while left and dst not in blocked:
                tag, data = left[0]
                found = self._transport.reserve((dst,), (data.numel(),))
                if not found:
                    break
                self._transport.send((Sending(dst, tag, found[0].copy_(data)),))
                left.popleft()
            if not left:
                del self._outgoing[dst]
            else:
                blocked.add(dst)  # later messages to it must not overtake

    def take_in(self) -> None:
        """Copy what has arrived."""
        for src, left in list(self._incoming.items()):
            while left and (came := self._transport.receive((src,), left[0][0], wait=False)):
                tag, out = left.popleft()
                out.copy_(came[0])
                self._transport.release((src,), tag)
            if not left:
                del self._incoming[src]


class PendingAllGather(dist.distributed_c10d.Work):
    """An all-gather under way; `wait` completes it. A Work, as FSDP2 expects one."""

    def __init__(self, port: CollectivePort, messages: _Messages) -> None:
        super().__init__()
        self._port = port
        self._messages = messages

    def is_completed(self) -> bool:
        return self._messages.done

    def wait(self, timeout: object = None) -> bool:
        """Raises BrokenStepError if its step was broken off, and ranks do not agree about it."""
        if not self._messages.done and not self._port.giving_up:
            self._port.complete(self._messages)
        return True


class CollectivePort:
    """All-gather and reduce-scatter of equal, padded shards over the engine's transport. All ranks call alike."""

    def __init__(self, engine: Engine, whose: str, fix: str) -> None:
        """whose, fix: for errors: "an FSDP2 group", say, and what its user does after a step that was broken off."""
        self._engine = engine
        self._whose, self._fix = whose, fix
        self.transport = engine.transport
        self.rank, self.world_size = engine.rank, engine.world_size
        self.order = flat_order(engine.config)
        self.calls = 0
        self.in_doubt = False  # an exception came between two messages
        self.giving_up = False  # nobody wants what is under way any more
        self.under_way: list[_Messages] = []  # in the order of calls
        engine.ports.append(self)

    def _spans(self, nbytes: int) -> list[tuple[int, int]]:
        """Cut nbytes into messages; a quarter of the limit each, so that several are under way."""
        step = max(64, self.transport.message_limit // 4 // 64 * 64)
        return [(start, min(start + step, nbytes)) for start in range(0, nbytes, step)]

    def _next_call(self) -> int:
        self._engine.ensure_exposed()
        call = self.calls
        self.calls = (self.calls + 1) % _ROUND_LIMIT
        return call

    @hidden
    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> PendingAllGather:
        """output [N * n] <- shards [n] of all ranks. Starts at once; until `wait()` has completed it, output is written to."""
        call = self._next_call()
        parts = output.view(torch.uint8).view(self.world_size, -1)
        own, data = parts[self.rank], shard.view(torch.uint8)
        if own.data_ptr() != data.data_ptr():
            own.copy_(data)
        spans = self._spans(own.numel())
        peers = gather_owners(self.rank, self.world_size, self.order)[1:]
        named = [(Tag(CHANNEL_PARAM, 0, call, part), slice(*span)) for part, span in enumerate(spans)]
        outgoing = [(peer, tag, own[span]) for peer in peers for tag, span in named]
        incoming = [(peer, tag, parts[peer][span]) for peer in peers for tag, span in named]
        messages = _Messages(self.transport, "all-gather", outgoing, incoming)
        self.under_way.append(messages)
        self.progress()
        return PendingAllGather(self, messages)

    @hidden
    def reduce_scatter(self, output: torch.Tensor, partials: torch.Tensor, divisor: float | None) -> None:
        """output [n] <- sum over ranks of their partials [N * n], in rank order in a wide type, over `divisor`. Blocks."""
        call = self._next_call()
        parts = partials.view(self.world_size, -1)
        received = {peer: torch.empty_like(output) for peer in range(self.world_size) if peer != self.rank}
        named = [(Tag(CHANNEL_COLLECTIVE, 1, call, part), slice(*span)) for part, span in enumerate(self._spans(output.nbytes))]
        outgoing = [
            (owner, tag, parts[owner].view(torch.uint8)[span])
            for owner in scatter_owners(self.rank, self.world_size, self.order)[:-1]
            for tag, span in named
        ]
        incoming = [
            (peer, tag, received[peer].view(torch.uint8)[span])
            for peer in scatter_owners(self.rank, self.world_size, "ring")[:-1]
            for tag, span in named
        ]
        messages = _Messages(self.transport, "reduce-scatter", outgoing, incoming)
        self.under_way.append(messages)
        self.complete(messages)
        received[self.rank] = parts[self.rank]
        ordered = [received[rank] for rank in range(self.world_size)]
        sum_in_rank_order(output, ordered, own_rank=self.rank, scale_divisor=divisor)

    def settle_replicas(self) -> None:
        """Before something blocks until the replicas take part: be sure that they are still with this one."""
        if self._engine.gradients.replicated:
            self._engine.settle_replicas()

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

    def any_of(self, own: bool) -> bool:
        """A vote: True on all ranks if it is on one. Who waits hears of a peer that has left the step."""
        votes = torch.empty(self.world_size, dtype=torch.uint8, device=self._engine.device)
        self.all_gather(votes, torch.full_like(votes[:1], own)).wait()
        return bool(votes.any())

    # ---- messages ----------------------------------------------------------------------------------------------------
    def sends_to(self, dst: int) -> bool:
        """Something of a collective is still to be sent to `dst`."""
        return any(messages.sends_to(dst) for messages in self.under_way)

    def progress(self) -> None:
        """Send what there is credit for, take in what has come, of all collectives under way. Never blocks."""
        if not self.under_way or self.in_doubt:  # a message might be sent twice
            return
        try:
            blocked: set[int] = set()
            for messages in self.under_way:
                messages.send(blocked)
                messages.take_in()
            self.under_way = [messages for messages in self.under_way if not messages.done]
        except BaseException as error:
            self._doubt(self.under_way[0].what, error)
            raise

    @hidden
    def complete(self, messages: _Messages) -> None:
        """Send and receive until a collective is complete, summing fused gradients meanwhile."""
        if messages.lost:
            here = self.transport.membership.called(self.rank)
            raise BrokenStepError(
                f"rank {here}: an {messages.what} of {self._whose} was not completed: {messages.lost}. {self._fix}",
                rank=here,
                peer=here,
            )
        self._engine.gradients.make_progress()
        if messages.done:
            return
        start = now_ns()
        try:
            self._wait(messages, self._engine.gradients.make_progress, heed=True)
        except BaseException as error:
            self._doubt(messages.what, error)
            raise
        self._engine.probe.exposed(f"({messages.what})", start, now_ns())

    def _wait(self, messages: _Messages, advance: Callable[[], object], *, heed: bool) -> None:
        while not messages.done:  # one peer after the other: one that has done its part may leave while others still owe theirs
            peer, doing, nbytes = messages.awaits()
            where = Where(f"({messages.what} of {self._whose})", self._engine.step, "all", nbytes)

            def served(peer: int = peer, doing: str = doing, where: Where = where) -> bool:
                def come() -> bool:
                    advance()
                    return messages.done or not messages.owes(peer)

                if come():
                    return True
                if heed:
                    self._engine.breakage.heed(peer, where, doing, come)
                    self._engine.gradients.heed_sums()
                return False

            wait_until(self.transport, served, peer=peer, where=where, doing=doing)

    def _doubt(self, what: str, error: BaseException) -> None:
        self.in_doubt = True
        self._engine.breakage.by(f"({what} of {self._whose})", error)

    def recover(self, *, complete: bool) -> None:
        """All ranks have left a step that was broken off, and do this. complete: all have begun the same collectives, which are
        finished; else they are dropped."""
        if complete:
            while self.under_way:
                self._wait(self.under_way[0], self.progress, heed=False)
        for messages in self.under_way:
            messages.lost = "its step was broken off, and not all ranks had begun it"
        self.under_way = []
        self.calls = 0
        self.in_doubt = False
