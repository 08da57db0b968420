"""The connections of a wire, and what they carry: frames that come, transfers that go."""

from __future__ import annotations

import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from commfuse_dp.transport.one_sided.messages import HEADER_BYTES
from commfuse_dp.transport.tcp.pace import Pace

HEADER = struct.Struct(f"<BBxxIQ{HEADER_BYTES}s")  # magic, lane, payload bytes of this frame, offset, message
CONTROL_LANE, COLLECTIVE_LANE, PARAM_LANE, GRAD_LANE = 0, 1, 2, 3  # by falling priority
DATA_LANES = (COLLECTIVE_LANE, PARAM_LANE, GRAD_LANE)
CONTROL_ROLE, DATA_ROLE = 0, 1  # of a connection


class Frame(NamedTuple):
    """A header as it was received."""

    lane: int
    nbytes: int  # payload bytes that follow this header
    offset: int  # the chunk's place in its transfer
    message: bytes


@dataclass
class Outgoing:
    """One transfer in a data lane."""

    lane: int
    message: bytes
    view: memoryview  # what is sent
    done: int = 0
    start_ns: int = 0
    number: int = 0  # in which order the wire was given it


@dataclass(eq=False)
class Link:
    """One connection. The control connection uses `control` only, the other one `lanes` only."""

    peer: int
    role: int
    sock: socket.socket
    pace: Pace
    written: int = 0  # bytes that the kernel has taken
    control: deque[bytes] = field(default_factory=deque)
    lanes: dict[int, deque[Outgoing]] = field(default_factory=lambda: {lane: deque() for lane in DATA_LANES})
    pending: memoryview | None = None  # header and control bytes under way
    chunk: Outgoing | None = None  # whose payload follows `pending`
    chunk_left: int = 0
    writing: bool = False  # registered for EVENT_WRITE
    head: bytearray = field(default_factory=lambda: bytearray(HEADER.size))
    head_got: int = 0
    frame: Frame | None = None  # payload of this frame is being received
    sink: memoryview | None = None
    sink_got: int = 0
    lowat: int = 1
    open: bool = True

    def under_way(self) -> bool:
        """A frame has been begun and not been given to the kernel whole."""
        return self.pending is not None or self.chunk is not None

    def next_up(self) -> tuple[int, int] | None:
        """Priority and number of the transfer that the next frame is of: what is smaller goes first."""
        for number, lane in self.lanes.items():
            if lane:
                return number, lane[0].number
        return None

    def sends_collective(self) -> bool:
        """What is under way, or comes next, is of a collective."""
        if self.chunk is not None and self.chunk.lane == COLLECTIVE_LANE:
            return True
        return bool(self.lanes[COLLECTIVE_LANE])

    def next_is_empty(self) -> bool:
        """That frame has no payload."""
        return next((not len(lane[0].view) for lane in self.lanes.values() if lane), False)

    def idle(self) -> bool:
        return not (self.pending or self.chunk or self.control or any(self.lanes.values()))
