"""Windows of transport `symmetric`: published parameters that peers copy. Timelines and hazards: see symmetric.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commfuse_dp.device.base import Event, Word
from commfuse_dp.errors import TransportError, Where
from commfuse_dp.probe import RECEIVE
from commfuse_dp.transport.accounts import pull_bytes, window_bytes
from commfuse_dp.transport.base import NOWHERE, Transfer
from commfuse_dp.transport.parts import check_same_sizes
from commfuse_dp.transport.ring import align
from commfuse_dp.transport.symmetric_core import Core
from commfuse_dp.transport.symmetric_watch import Condition, Wait

SIGNAL_WORDS = 1024  # arrival words of pulls, used in turn
NEVER = 1 << 30  # epochs ahead: words are compared cyclically


class Pull(Transfer):
    """A copy that is enqueued."""

    __slots__ = ("_core", "_out", "_wait", "arrival", "landed")

    landed: Event

    def __init__(self, core: Core, out: torch.Tensor, event: Event, wait: Wait | None, arrival: Word | None) -> None:
        self._core, self._out, self.landed, self._wait = core, out, event, wait
        self.arrival = arrival

    def concerns(self, where: Where) -> None:
        if self._wait is not None:
            self._wait.where = where

    def done(self) -> bool:
        self._core.check()
        return True

    def wait(self, where: Where = NOWHERE) -> torch.Tensor:
        if where is not NOWHERE:
            self.concerns(where)
        stream = self._core.enter()
        self._core.device.wait_event(stream, self.landed)
        self._core.check()  # as in Core.behind
        return self._out


class Windows:
    """Segments of all ranks, and this rank's pulls from them."""

    def __init__(self, core: Core, *, kernels_may_wait: bool) -> None:
        self._core = core
        self._kernels_may_wait = kernels_may_wait
        self._gather = core.device.side_stream("gather")
        self._sizes: list[tuple[int, ...]] | None = None
        self._segments: list[list[torch.Tensor]] = []  # [owner][key]
        self._pads: list[torch.Tensor] = []  # of every rank: published[owner * keys + key] = epoch
        self._published: dict[int, int] = {}  # key -> epoch, of this rank
        self._awaited: dict[tuple[int, int], int] = {}  # (owner, key) -> epoch that "gather" stands behind
        self._signals: torch.Tensor | None = None
        self._pulls = 0
        self._free_to_write = 0  # peers have finished this epoch, in the order of the stream that asked
        self._own_finished = 0
        self._direct = False

    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        core = self._core
        core.enter()
        if self._sizes is not None:
            raise TransportError("expose() was called twice: a transport exposes its windows once; open another for others")
        table = [tuple(int(n) for n in row) for row in sizes]
        for key, row in enumerate(table):
            if len(row) != core.world_size or min(row) < 0:
                raise ValueError(f"expose: sizes[{key}] = {row}: one size >= 0 for each of {core.world_size} ranks is needed")
        check_same_sizes(table, core.exchange(table))
        words = align(4 * core.world_size * len(table)) or 64
        totals = [sum(align(row[owner]) for row in table) for owner in range(core.world_size)]
        blocks = core.memory.allocate(words + totals[core.rank], f"the published shards ({len(table)} windows)")
        for owner, block in enumerate(blocks):
            self._pads.append(block.narrow(0, 0, words).view(torch.int32))
            start, segments = words, []
            for row in table:
                segments.append(block.narrow(0, start, row[owner]))
                start += align(row[owner])
            self._segments.append(segments)
        self._sizes = table

    def segment(self, key: int) -> torch.Tensor:
        self._size(self._core.rank, key)
        return self._segments[self._core.rank][key]

    def publish(self, key: int, epoch: int, *, more: bool) -> None:
        core = self._core
        stream = core.enter(flush=False)
        self._size(core.rank, key)
        before = self._published.get(key, 0)
        if epoch != before + 1:
            raise ValueError(f"publish(key {key}, epoch {epoch}): epochs rise by one and {before} was the last")
        if core.peers and self._free_to_write < epoch - 1:
            raise TransportError(
                f"publish(key {key}, epoch {epoch}): ranks {sorted(core.peers)} may still read epoch {epoch - 1}; "
                f"call wait_finished({epoch - 1}) before writing the segment"
            )
        self._published[key] = epoch
        place = self._place(core.rank, key)
        core.hold(stream, [Word(pad, place, epoch) for pad in self._pads], more=more)

    def pull(
        self, owner: int, key: int, epoch: int, start: int, nbytes: int | None, out: torch.Tensor | None, after: Event | None
    ) -> Pull:
        core = self._core
        stream = core.enter()
        size = self._size(owner, key)
        nbytes = pull_bytes(owner, key, epoch, start=start, nbytes=nbytes, published=size, finished=self._own_finished)
        if out is None or out.dtype != torch.uint8 or out.dim() != 1 or out.numel() != nbytes or not out.is_contiguous():
            given = "None" if out is None else f"{out.dtype} of shape {tuple(out.shape)}"
            raise ValueError(f"pull: transport {core.name} needs out = contiguous uint8 of {nbytes} bytes; {given} was given")
        device, gather = core.device, self._gather
        # See [Note: Out of the allocator's hands].
        device.wait_event(gather, after if after is not None else device.record(stream))
        wait = None
        if self._awaited.get((owner, key)) != epoch:  # once is enough: the stream is in order
            self._awaited[owner, key] = epoch
            where = Where(f"(window {key})", epoch, f"bytes {start} to {start + nbytes}", nbytes)
            wait = core.stand(gather, (self._published_by(owner, key, epoch),), where, "to publish a parameter slice")
        timing = core.probe.timing if core.probe.sink is not None else None
        begun = timing.mark(gather) if timing is not None else None
        device.copy(out, self._segments[owner][key].narrow(0, start, nbytes), gather)
        arrival = self._signal() if self._kernels_may_wait else None
        event = core.behind(gather, wait) if wait is not None else core.record(gather)
        if timing is not None and begun is not None:
            timing.span(RECEIVE, "slice", begun, event, {"nbytes": nbytes, "peer": owner})
        if owner != core.rank:
            core.probe.counters.param_bytes_received += nbytes
        return Pull(core, out, event, wait, arrival)

    def direct(self, owner: int, key: int, epoch: int, where: Where) -> torch.Tensor:
        core = self._core
        stream = core.enter()
        self._size(owner, key)
        self._direct = True
        core.behind(stream, core.stand(stream, (self._published_by(owner, key, epoch),), where, "to publish a window"))
        return self._segments[owner][key]

    def finish(self, epoch: int) -> None:
        core = self._core
        stream = core.enter()
        if epoch <= self._own_finished:
            raise ValueError(f"finish({epoch}): epoch {self._own_finished} is finished already; epochs rise")
        if self._direct:  # copies run in "gather"; what the current stream has read itself must be over, too
            self._direct = False
            core.device.wait_event(self._gather, core.device.record(stream))
        self._tell_finished(epoch)

    def _tell_finished(self, epoch: int) -> None:
        core = self._core
        self._own_finished = epoch
        core.device.write_values(self._gather, [Word(core.blocks[peer].finished, core.rank, epoch) for peer in core.peers])

    def wait_finished(self, epoch: int, where: Where) -> None:
        core, device = self._core, self._core.device
        stream = core.enter()
        if epoch <= 0:
            return
        self._free_to_write = max(self._free_to_write, epoch)
        device.wait_event(stream, device.record(self._gather))  # this rank's copies of its own segments
        conditions = tuple(Condition(peer, core.own.finished, peer, epoch) for peer in core.peers)
        if conditions:
            core.behind(stream, core.stand(stream, conditions, where, f"to finish reading epoch {epoch}"))

    def leave(self) -> None:
        """At the end: nothing is read from now on, whatever epoch the peers may still come to."""
        self._tell_finished(self._own_finished + NEVER)

    def forget(self) -> None:
        """Let go of all memory."""
        self._segments, self._pads, self._signals = [], [], None

    # ---- helpers -----------------------------------------------------------------------------------------------------
    def _place(self, owner: int, key: int) -> int:
        return owner * len(self._segments[owner]) + key

    def _published_by(self, owner: int, key: int, epoch: int) -> Condition:
        return Condition(owner, self._pads[self._core.rank], self._place(owner, key), epoch)

    def _signal(self) -> Word:
        """A word of this rank that is reached when everything in "gather" is done. Used in turn, and only rising."""
        device = self._core.device
        if self._signals is None:
            with torch.inference_mode(False):
                self._signals = torch.zeros(SIGNAL_WORDS, dtype=torch.int32, device=device.torch_device)
            device.wait_event(self._gather, device.record(device.current_stream()))
        self._pulls += 1
        word = Word(self._signals, self._pulls % SIGNAL_WORDS, self._pulls)
        device.write_value(self._gather, *word)
        return word

    def _size(self, owner: int, key: int) -> int:
        return window_bytes(self._sizes, owner, key, self._core.world_size)
