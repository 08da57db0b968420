"""What windows and messages of the lockstep transport share: the device, exchanges with the peers, checksums, the watchdog."""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence

import torch

from commfuse_dp.device.base import Device, Event, Stream, Word, as_int32
from commfuse_dp.errors import TransportError, Where
from commfuse_dp.probe import RECEIVE, SEND, Probe
from commfuse_dp.transport.base import CHANNEL_GRAD, CHANNEL_PARAM, GRAD_LANE, PARAM_LANE
from commfuse_dp.transport.closing import CLOSE_S, done_within
from commfuse_dp.transport.grouped.exchange import GroupedExchange, Labels, Part
from commfuse_dp.transport.grouped.watch import ExchangeWatch, Label, Step
from commfuse_dp.transport.membership import Membership
from commfuse_dp.transport.streams.core import StreamCore

NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_KINDS = 5  # of what is exchanged, one more than there are channels
LABEL_WORDS = 16  # int32: a checksum, and what was exchanged last
_IDENTITY = struct.Struct("<I6q")


class Account:
    """What went from one rank to another so far; both ends keep it."""

    __slots__ = ("checksum", "latest")

    def __init__(self) -> None:
        self.checksum = 0
        self.latest: deque[int] = deque([0] * (LABEL_WORDS - 1), maxlen=LABEL_WORDS - 1)

    def add(self, lane: int, identity: Sequence[int]) -> None:
        """identity: up to five integers: the key, of a layer or a call, and of a message its channel, come first."""
        self.checksum = zlib.crc32(_IDENTITY.pack(self.checksum, lane, *identity, *(0,) * (5 - len(identity))))
        word = _KINDS * identity[0] + (identity[1] if lane == GRAD_LANE else CHANNEL_PARAM)
        if self.latest[-1] != word:
            self.latest.append(word)


class Core(StreamCore):
    """State of one rank that both halves use."""

    no_graph = "its steps are taken together with the peers"
    watch: ExchangeWatch

    def __init__(self, grouped: GroupedExchange, device: Device, *, name: str, deadline_s: float, probe: Probe) -> None:
        membership = Membership(grouped.world_size, grouped.numbers)
        super().__init__(grouped.rank, membership, grouped.world_size, name=name, device=device, probe=probe)
        self._given = [Account() for _ in range(self.world_size)]  # by peer
        self._taken = [Account() for _ in range(self.world_size)]
        self._labels: Labels | None = None  # out, into: used by one stream, hence one at a time
        self.layers: Callable[[], Sequence[str]] = tuple  # names of keys
        self.grouped = grouped
        self.watch = ExchangeWatch(
            self.rank,
            membership,
            device,
            deadline_s=deadline_s,
            abort=grouped.abort,
            ballot=grouped.ballot,
            name=name,
            say=self._say,
        )

    def end(self, streams: Sequence[Stream], patience_s: float) -> bool:
        """Wait until they have done what was enqueued, as slower peers need this rank for that; after patience_s, or a failure,
        abort the exchanges. True if nothing is left: memory may be freed. The core is `closed`."""
        idle = False
        try:
            events = [self.device.record(stream) for stream in streams]
            failed = self.watch.failure is not None
            idle = done_within(events, patience_s, lambda: not failed and self.watch.failure is not None)
            if not idle:
                self.grouped.abort()
                idle = done_within(events, CLOSE_S)
        finally:
            self.watch.stop()
            if not idle or not self.watch.all_compared:
                self.grouped.abort()  # communicators with something left open are not used again
            self.grouped.close()
        return idle

    def layer(self, key: int, otherwise: str) -> str:
        layers = self.layers()
        return layers[key] if key < len(layers) else otherwise

    def mirror(self, peer: int) -> int:
        """Who does with this rank what this rank does with `peer`."""
        return (2 * self.rank - peer) % self.world_size

    def trade(
        self,
        stream: Stream,
        lane: int,
        give: Part,
        take: Part,
        where: Where,
        given: Sequence[int],
        taken: Sequence[int],
    ) -> tuple[Event, Step | None]:
        """One exchange behind what is in `stream`, which then waits until it is through: the event at that place. Exchanges
        of gradients are all on one stream.

        given, taken: what it is, beside its bytes, in up to four integers, the key of its layer first; the peer says the same
        of it."""
        device = self.device
        sends, receives = [[part] if part[1].numel() else [] for part in (give, take)]
        peers = tuple(sorted({peer for peer, _ in (*sends, *receives)}))
        if not peers:
            return self.record(stream), None
        for parts, accounts, identity in ((sends, self._given, given), (receives, self._taken, taken)):
            for peer, data in parts:
                accounts[peer].add(lane, (*identity, data.nbytes))
        step = Step(self.record(stream), peers, where, take[1])
        labels = self._label(stream, step, sends, receives) if lane == GRAD_LANE else None
        self.watch.note(lane, step)
        with device.on(stream):
            try:
                exchanged = self.grouped.exchange(lane, sends, receives, labels=labels, where=where)
                exchanged.wait(where)
            except TransportError:
                self.watch.check()  # it was aborted just now: why
                raise
        step.exchanged = exchanged
        if step.label is not None:
            device.wait_value(stream, step.label.pad, 0, step.label.checksum, exact=True)
        step.end = event = self.record(stream)
        timing = self.probe.timing if self.probe.sink is not None else None
        if timing is not None and step.start.timed:
            name = "slice" if lane == PARAM_LANE else "message"
            for track, parts in ((SEND, sends), (RECEIVE, receives)):
                for peer, data in parts:
                    timing.span(track, name, step.start, event, {"nbytes": data.nbytes, "peer": peer})
        return event, step

    def tell(self, epoch: int) -> None:
        """Have the ranks compare what they exchanged up to here."""
        given, taken = ([account.checksum for account in accounts] for accounts in (self._given, self._taken))
        self.watch.tell(epoch, given, taken)

    def _label(self, stream: Stream, step: Step, sends: Sequence[Part], receives: Sequence[Part]) -> Labels:
        """See [Note: Labels] in watch.py."""
        device = self.device
        if self._labels is None:
            with torch.inference_mode(False):
                out, into = (torch.zeros(LABEL_WORDS, dtype=torch.int32, device=device.torch_device) for _ in range(2))
            device.wait_event(stream, device.record(device.current_stream()))
            self._labels = out, into
        out, into = self._labels
        for peer, _ in sends:
            account = self._given[peer]
            words = (as_int32(account.checksum), *account.latest)
            device.write_values(stream, [Word(out, place, value) for place, value in enumerate(words)])
        for peer, _ in receives:
            account = self._taken[peer]
            step.label = Label(into, account.checksum, peer, tuple(account.latest))
        return out, into

    def _say(self, words: Sequence[int]) -> str:
        told = []
        for key, channel in (divmod(word, _KINDS) for word in words if word > 0):
            if channel in (CHANNEL_PARAM, CHANNEL_GRAD):
                kind = "parameters" if channel == CHANNEL_PARAM else "gradient"
                told.append(f"{kind} of layer {self.layer(key, f'(key {key})')!r}")
            else:
                told.append(f"a message of call {key}")
        return ", ".join(told) or "nothing"
