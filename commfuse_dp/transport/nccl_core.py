"""What windows and messages of the mirrored transport share: the device, exchanges with the peers, checksums, the watchdog."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence

import torch

from commfuse_dp.device.base import Device, Event, Stream
from commfuse_dp.errors import TransportError, Where
from commfuse_dp.probe import RECEIVE, SEND, Probe
from commfuse_dp.transport.base import PARAM_LANE
from commfuse_dp.transport.exchange_watch import Ballot, ExchangeWatch, Step
from commfuse_dp.transport.grouped import GroupedExchange, Part

NOTHING = torch.empty(0, dtype=torch.uint8)
_IDENTITY = struct.Struct("<I6q")


class Core:
    """State of one rank that both halves use. Every call of the transport begins with `check` or `enter`."""

    def __init__(
        self, grouped: GroupedExchange, device: Device, *, name: str, deadline_s: float, ballot: Ballot | None, probe: Probe
    ) -> None:
        self.rank, self.world_size = grouped.rank, grouped.world_size
        self.name, self.device, self.probe = name, device, probe
        self.peers = [(self.rank + shift) % self.world_size for shift in range(1, self.world_size)]
        self.closed = False
        self.given, self.taken = [0] * self.world_size, [0] * self.world_size  # checksums by peer
        self.before_work: Callable[[], None] = lambda: None  # marks what was published
        self.layers: Callable[[], Sequence[str]] = tuple  # names of keys
        self.grouped = grouped
        self.watch = ExchangeWatch(self.rank, deadline_s=deadline_s, abort=grouped.abort, ballot=ballot, name=name)

    def check(self) -> None:
        if self.closed:
            raise TransportError(f"transport {self.name} of rank {self.rank} is closed")
        self.watch.check()

    def enter(self, *, mark: bool = True) -> Stream:
        """Raises what is wrong. mark: what was published is, up to here. Returns the current stream."""
        self.check()
        if self.device.capturing():
            raise TransportError(
                f"transport {self.name} cannot be captured into a CUDA graph: its steps are taken together with the peers. "
                "Capture without CommFuse's layers, or use them outside the graph."
            )
        if mark:
            self.before_work()
        return self.device.current_stream()

    def check_peer(self, peer: int) -> None:
        if peer == self.rank or not 0 <= peer < self.world_size:
            raise ValueError(
                f"rank {peer} is no peer of rank {self.rank} in a group of {self.world_size}: peers are {sorted(self.peers)}"
            )

    def layer(self, key: int, otherwise: str) -> str:
        layers = self.layers()
        return layers[key] if key < len(layers) else otherwise

    def mirror(self, peer: int) -> int:
        """Who does with this rank what this rank does with `peer`."""
        return (2 * self.rank - peer) % self.world_size

    def trade(self, stream: Stream, lane: int, give: Part, take: Part, where: Where) -> tuple[Event, Step | None]:
        """One exchange behind what is in `stream`, which then stands until it is through: the event at that place."""
        device = self.device
        sends, receives = [[part] if part[1].numel() else [] for part in (give, take)]
        peers = tuple(sorted({peer for peer, _ in (*sends, *receives)}))
        if not peers:
            return self.record(stream), None
        step = Step(self.record(stream), peers, where)
        self.watch.note(lane, step)
        with device.on(stream):
            self.grouped.exchange(lane, sends, receives, where=where).wait(where)
        step.end = event = self.record(stream)
        timing = self.probe.timing if self.probe.sink is not None else None
        if timing is not None and step.start.timed:
            name = "slice" if lane == PARAM_LANE else "message"
            for track, parts in ((SEND, sends), (RECEIVE, receives)):
                for peer, data in parts:
                    timing.span(track, name, step.start, event, {"nbytes": data.nbytes, "peer": peer})
        return event, step

    def record(self, stream: Stream) -> Event:
        """Behind all that is in the stream now. Keeps the time while somebody watches."""
        return self.device.record(stream, timing=self.probe.timing is not None)

    def gave(self, peer: int, *identity: int) -> None:
        """Up to six integers that say what was given; the peer says the same of what it took."""
        self.given[peer] = _checksum(self.given[peer], identity)

    def took(self, peer: int, *identity: int) -> None:
        self.taken[peer] = _checksum(self.taken[peer], identity)


def _checksum(before: int, identity: tuple[int, ...]) -> int:
    return zlib.crc32(_IDENTITY.pack(before, *identity, *(0,) * (6 - len(identity))))


def raise_failures(answers: Sequence[str | None]) -> None:
    """answers: of all ranks; None: no failure. Raises TransportError on all ranks alike."""
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(answers) if text]
    if failures:
        raise TransportError("; ".join(failures) + ". Use more ranks, or lower inbox_bytes or prefetch_bytes.")
