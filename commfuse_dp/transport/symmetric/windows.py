"""Windows of transport `symmetric`: published parameters that peers copy. Timelines and hazards: see transport.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from commfuse_dp.device.base import Event, Span, Word
from commfuse_dp.errors import Where
from commfuse_dp.probe import RECEIVE
from commfuse_dp.transport.base import NOWHERE, WHOLE, Outcome, Part, PullRequest, Transfer, Transport
from commfuse_dp.transport.checks import (
    check_finish,
    check_out,
    check_publications,
    check_pull,
    check_sizes,
)
from commfuse_dp.transport.one_sided.parts import check_same_sizes, cut
from commfuse_dp.transport.one_sided.ring import align
from commfuse_dp.transport.symmetric.core import Core
from commfuse_dp.transport.symmetric.watch import Condition, Wait

SIGNAL_WORDS = 1024  # arrival words of slices come in pads of so many
NEVER = 1 << 30  # epochs ahead: words are compared cyclically


class Pull(Transfer):
    """A copy that is enqueued. With `arrival` it is known by its word, else by `landed`, an event that several may share."""

    __slots__ = ("_out", "_place", "_wait", "_windows", "arrival", "landed")

    def __init__(self, windows: Windows, out: torch.Tensor, arrival: Word | None) -> None:
        self._windows, self._out, self.arrival = windows, out, arrival
        self.landed: Event | None = None
        self._wait: Wait | None = None  # for the owner to publish
        self._place = 0  # in it

    def done(self) -> bool:
        self._windows._core.check()
        return True

    def wait(self, where: Where = NOWHERE) -> torch.Tensor:
        if where is not NOWHERE and self._wait is not None:
            self._wait.places[self._place] = where
        self._windows.await_pull(self)
        return self._out


class _Source:
    """A slice of a peer, or slices of several that come as one, which are pulled again and again."""

    __slots__ = ("lying", "nbytes", "others", "own", "pad", "parts", "place", "pulls", "received")

    def __init__(self, parts: list[Part], segments: list[torch.Tensor], others: tuple[Part, ...], rank: int) -> None:
        """segments: in which the parts lie."""
        self.parts, self.others = parts, others
        self.lying = [(part.at, segment, part.start, part.nbytes) for part, segment in zip(parts, segments, strict=True)]
        self.nbytes = parts[-1].at + parts[-1].nbytes  # of the buffer
        self.own = any(part.owner == rank for part in parts)  # what this rank has passed on
        self.received = sum(part.nbytes for part in parts if part.owner != rank)
        self.pad: torch.Tensor | None = None  # of its arrival word, whose value is the number of its pulls
        self.place = 0
        self.pulls = 0


class Windows(Transport):
    """Segments of all ranks, and this rank's pulls from them."""

    kernels_may_wait: bool  # see [Note: Kernels that wait] in transport.py
    _core: Core

    def _open_windows(self) -> None:
        self._gather = self._core.device.side_stream("gather")
        self._pulling = self._core.device.batch(self._gather)
        self._segments: list[list[torch.Tensor]] = []  # [owner][key]
        self._shards: list[torch.Tensor] = []  # [owner]: all segments
        self._pads: list[
            torch.Tensor
        ] = []  # of every rank: published[owner * keys + key] = epoch, then complete[owner] = epoch
        self._published: dict[int, int] = {}  # key -> epoch, of this rank
        self._awaited: dict[tuple[int, int], int] = {}  # (owner, key), -1 for all -> epoch that "gather" waits for
        self._complete_awaited = 0, 0  # epoch, and of how many peers "gather" waits for all that they publish in it
        self._all_awaited = 0  # the latest epoch of which that is so for all peers
        self._all_published = 0  # epoch of which this rank has published all
        self._complete = 0  # the same once it has pulled: the first slices may be there before their owners' last
        self._sources: dict[tuple[int, int, int, int], _Source] = {}  # (owner, key, start, nbytes)
        self._signals: list[torch.Tensor] = []
        self._behind: Event | None = None  # the event that "gather" was made to wait for last
        self._landed: tuple[object, Event] | None = None  # (stream, event) of the last wait for a copy
        self._free_to_write = 0  # peers have finished this epoch, in the order of the stream that asked
        self._own_finished = 0

    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        core = self._core
        core.enter()
        table = check_sizes(sizes, self.sizes, core.world_size)
        check_same_sizes(table, core.exchange(table), core.exchange)
        words = align(4 * core.world_size * (len(table) + 1))
        totals = [sum(align(row[owner]) for row in table) for owner in range(core.world_size)]
        blocks = core.memory.allocate(words + totals[core.rank], f"the published shards ({len(table)} windows)")
        for owner, block in enumerate(blocks):
            self._pads.append(block.narrow(0, 0, words).view(torch.int32))
            self._segments.append(cut(block, [row[owner] for row in table], words))
            self._shards.append(block.narrow(0, words, totals[owner]))
        self.sizes, self.segments = table, self._segments[core.rank]

    def publish(self, keys: Sequence[int], epoch: int, *, last: bool = False) -> None:
        """last: one word more, for all of this rank's keys that are published in `epoch`."""
        core = self._core
        stream = core.enter(flush=False)
        readers = (
            f"ranks {sorted(map(self.membership.called, core.peers))}" if core.peers and self._free_to_write < epoch - 1 else ""
        )
        check_publications(self, keys, epoch, self._published, readers)
        self._published.update(dict.fromkeys(keys, epoch))
        if last:
            self._all_published = epoch
        places = [self._place(core.rank, key) for key in (*keys, *((-1,) if last else ()))]
        core.hold(stream, [(pad, place, epoch) for place in places for pad in self._pads], more=False)

    def pull(self, epoch: int, requests: Sequence[PullRequest]) -> list[Pull]:
        """In the order of the requests, each with its own word; see [Note: Words for pulls]. Of requests whose `after` is None,
        `out` may be fresh from the allocator: such a copy runs behind all that is in the current stream."""
        core = self._core
        stream = core.enter()
        device, gather, batch = core.device, self._gather, self._pulling
        sources: list[_Source] = []  # before anything is enqueued
        for owner, key, start, nbytes, out, _, _, others in requests:
            source = self._sources.get((owner, key, start, nbytes))
            if source is None or source.others is not others:
                source = self._source(epoch, Part(owner, key, start, nbytes, 0), others)
            if epoch <= self._own_finished:
                raise ValueError(f"pull: epoch {epoch} is over: this rank has finished epoch {self._own_finished}")
            if (
                out is None
                or out.numel() != source.nbytes
                or out.dtype != torch.uint8
                or not out.is_contiguous()
                or out.dim() != 1
            ):
                check_out(out, source.nbytes, core.name)
            sources.append(source)
        conditions: list[Condition] = []
        pulls: list[Pull] = []
        spans: list[Span] = []
        wait: Wait | None = None
        fresh: Event | None = None
        received = 0
        timing, begun = core.probe.timing, None
        try:
            for request, source in zip(requests, sources, strict=True):
                after = request.after
                if after is None:  # see [Note: Out of the allocator's hands]
                    after = fresh = fresh if fresh is not None else device.record(stream)
                if after is not self._behind:
                    batch.submit()
                    device.wait_event(gather, after)
                    self._behind = after
                arrival: Word | None = None
                if self.kernels_may_wait:
                    source.pulls += 1
                    arrival = tuple.__new__(Word, (source.pad, source.place, source.pulls))
                out = request.out
                assert out is not None
                pull = Pull(self, out, arrival)
                pulls.append(pull)
                if self._all_awaited != epoch or source.own:
                    for owner, key, start, nbytes, _ in source.parts:
                        condition = self._publication(owner, key, epoch)
                        if condition is None:
                            continue
                        if wait is None:
                            wait = Wait(conditions, (), "to publish a parameter slice")
                        pull._wait, pull._place = wait, len(conditions)
                        wait.places.append(partial(self.describe, owner, key, epoch, start, nbytes))
                        conditions.append(condition)
                        if len(conditions) == 1:
                            core.watch.note(gather, wait)
                        batch.wait(condition.pad, condition.place, condition.value)
                if timing is not None and core.probe.sink is not None:
                    batch.submit()
                    begun = timing.mark(gather)
                for at, segment, start, nbytes in source.lying:
                    spans.append((out, at, segment, start, nbytes))
                if arrival is not None or timing is not None:
                    if len(spans) == 1:
                        batch.copy(*spans[0])
                    else:
                        batch.copy_all(spans)
                    spans = []
                if arrival is not None:
                    batch.write(*arrival)
                if timing is not None:  # somebody looks: every slice has an event of its own, which keeps the time
                    batch.submit()
                    pull.landed = core.record(gather)
                    if begun is not None:
                        about: dict[str, object] = {"nbytes": source.received, "peer": source.parts[0].owner}
                        timing.span(RECEIVE, "slice", begun, pull.landed, about)
                received += source.received
            if spans:
                batch.copy_all(spans)
        finally:
            batch.submit()
        self._complete = self._all_published
        core.probe.counters.param_bytes_received += received
        if wait is not None or spans:
            landed = core.behind(gather, wait)
            for pull in pulls if timing is None else ():
                pull.landed = landed
        return pulls

    def await_pull(self, pull: Pull) -> None:
        """The current stream waits until the bytes are there."""
        core = self._core
        stream = core.enter()
        if pull.arrival is not None:
            core.device.wait_value(stream, *pull.arrival)
        elif self._landed is None or self._landed[0] != stream or self._landed[1] is not pull.landed:
            assert pull.landed is not None
            self._landed = stream, pull.landed
            core.device.wait_event(stream, pull.landed)
        if core.closed or core.watch.failure is not None:
            core.check()  # as in Core.behind

    def finish(self, epoch: int, outcome: Outcome = WHOLE) -> None:
        self._core.enter()
        check_finish(epoch, self._own_finished)
        self._tell_finished(epoch)

    def _tell_finished(self, epoch: int) -> None:
        core = self._core
        self._own_finished = epoch
        core.device.write_values(self._gather, [(core.blocks[peer].finished, core.rank, epoch) for peer in core.peers])

    def wait_finished(self, epoch: int, where: Where = NOWHERE, *, meanwhile: Callable[[], object] | None = None) -> None:
        core, device = self._core, self._core.device
        stream = core.enter()
        if epoch <= 0:
            return
        self._free_to_write = max(self._free_to_write, epoch)
        device.wait_event(stream, device.record(self._gather))  # this rank's copies of its own segments
        conditions = tuple(Condition(peer, core.own.finished, peer, epoch) for peer in core.peers)
        if conditions:
            core.wait_for(stream, conditions, (where,), "to finish reading epoch", about=epoch)

    def _leave(self) -> None:
        """At the end: nothing is read from now on, whatever epoch the peers may still come to."""
        self._tell_finished(self._own_finished + NEVER)

    def _memory_of(self, owner: int) -> Sequence[torch.Tensor]:
        """What is copied from a rank."""
        return self._shards[owner : owner + 1]

    def _forget_windows(self) -> None:
        """Let go of all memory."""
        self.segments = ()
        self._segments, self._pads, self._signals, self._shards = [], [], [], []
        self._sources.clear()

    # ---- helpers -----------------------------------------------------------------------------------------------------
    def _place(self, owner: int, key: int) -> int:
        """Of the word that says that a key is published; -1: that all are."""
        keys = len(self._segments[owner])
        return owner * keys + key if key >= 0 else self._core.world_size * keys + owner

    def _publication(self, owner: int, key: int, epoch: int) -> Condition | None:
        """What "gather" must wait for before it reads; None: it waits for that already, and is in order."""
        if self._complete == epoch:
            key = -1 if self._awaited.get((owner, key)) != epoch else key
        if self._awaited.get((owner, key)) == epoch:
            return None
        self._awaited[owner, key] = epoch
        if key < 0 and owner != self._core.rank:
            before, count = self._complete_awaited
            self._complete_awaited = epoch, count + 1 if before == epoch else 1
            if self._complete_awaited[1] == len(self._core.peers):
                self._all_awaited = epoch
        return Condition(owner, self._pads[self._core.rank], self._place(owner, key), epoch)

    def _source(self, epoch: int, first: Part, others: tuple[Part, ...]) -> _Source:
        """What is pulled for the first time. Raises ValueError for bytes that nobody publishes."""
        parts = [first, *others]
        for part in parts:
            check_pull(self, part, epoch, self._own_finished)
        before = self._sources.get(first[:4])
        segments = [self._segments[part.owner][part.key] for part in parts]
        source = self._sources[first[:4]] = _Source(parts, segments, others, self._core.rank)
        if before is not None:
            source.pad, source.place, source.pulls = before.pad, before.place, before.pulls
        elif self.kernels_may_wait:
            source.pad, source.place = self._signal(len(self._sources) - 1)
        return source

    def _signal(self, number: int) -> tuple[torch.Tensor, int]:
        """The arrival word of a source: (pad, place). Its values only rise: whoever waits for an older one is not held up."""
        pad, place = divmod(number, SIGNAL_WORDS)
        if pad == len(self._signals):
            device = self._core.device
            with torch.inference_mode(False):
                self._signals.append(torch.zeros(SIGNAL_WORDS, dtype=torch.int32, device=device.torch_device))
            device.wait_event(self._gather, device.record(device.current_stream()))
        return self._signals[pad], place
