"""Transport `symmetric` over the simulated device: memory that all ranks see, and the cluster of the conformance suite."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from commfuse_dp.device.base import reached
from commfuse_dp.errors import Where
from commfuse_dp.transport.base import NOWHERE, Tag, Transport
from commfuse_dp.transport.checks import raise_failures
from commfuse_dp.transport.shm.sockets import SocketChannel, connect_mesh
from commfuse_dp.transport.symmetric.core import pair_of
from commfuse_dp.transport.symmetric.memory import SymmetricMemory
from commfuse_dp.transport.symmetric.ring import ARRIVAL_WORDS
from commfuse_dp.transport.symmetric.transport import SymmetricTransport
from tests.support.fake_device import FakeDevice, FakeWorld
from tests.support.threads import ExchangeFn


class FakeSymmetricMemory(SymmetricMemory):
    """Blocks of CPU memory, which threads see anyway. `room`: bytes that this rank can have in all."""

    def __init__(self, world: FakeWorld, rank: int, exchange: ExchangeFn, *, room: int | None = None) -> None:
        self.world, self.rank, self.exchange, self.room = world, rank, exchange, room
        self.closed = 0

    def allocate(self, nbytes: int, purpose: str) -> list[torch.Tensor]:
        size = max(self.exchange(nbytes))
        error = None
        if self.room is not None:
            self.room -= size
            if self.room < 0:
                error = f"cannot get {size} bytes of symmetric memory for {purpose}"
        raise_failures(self.exchange, self.exchange(error))
        whole = torch.zeros(size + 64, dtype=torch.uint8)
        block = whole.narrow(0, -whole.data_ptr() % 64, size)
        self.world.keep(block)
        return self.exchange(block)

    def close(self) -> None:
        self.closed += 1


def open_fake(
    world: FakeWorld,
    rank: int,
    exchange: ExchangeFn,
    *,
    inbox_bytes: int,
    deadline_s: float,
    kind: type[SymmetricTransport] = SymmetricTransport,
    room: int | None = None,
    members: Sequence[FakeDevice] | None = None,
    **settings: Any,
) -> Any:
    """Collective: one rank's transport, with real sockets for control messages. members: its ranks' devices; None: all."""
    devices = world.devices if members is None else members
    return kind(
        rank,
        len(devices),
        exchange,
        device=devices[rank],
        memory=FakeSymmetricMemory(world, rank, exchange, room=room),
        channel=SocketChannel(connect_mesh(rank, range(len(devices)), exchange, 20.0)),
        inbox_bytes=inbox_bytes,
        deadline_s=deadline_s,
        **settings,
    )


class AskingTransport(SymmetricTransport):
    """Says the truth about what is here and about room, as the suite's programs go by it: they consume while there is none.
    For that it asks the device, and lets it work."""

    name: ClassVar[str] = "symmetric"

    def reserve(self, dsts: Sequence[int], sizes: Sequence[int], room: int = 0) -> list[Any]:
        for dst, nbytes in zip(dsts, sizes, strict=True):
            ring = self._staging.rings.of.get(dst)
            if ring is not None and 0 <= nbytes <= self.message_limit:
                self.advance()
                behind = copy.deepcopy(ring._places).place(nbytes).behind
                if any(not r.left.done() for number, r in ring._live.items() if number <= behind and r.left is not None):
                    self.progress()
                    return []
        return super().reserve(dsts, sizes, room)

    def receive(self, srcs: Sequence[int], tag: Tag, where: Where = NOWHERE, *, wait: bool = True) -> list[Any]:
        if not wait:
            self._core.enter()
            self.advance()
        for src in srcs if not wait else ():
            self._core.check_peer(src)
            entry = self._inboxes[tag.channel].of[src].expected.get(tag)
            if entry is None:
                return []
            message, _ = entry
            index = pair_of(src, tag.channel) * ARRIVAL_WORDS + message.word
            if not reached(self.device.peek(self._core.own.arrival[index : index + 1])[0], message.value, exact=True):
                return []
        return super().receive(srcs, tag, where)

    def progress(self, timeout_s: float = 0.0) -> None:
        self.advance()
        super().progress(min(timeout_s, 0.002))

    def advance(self) -> None:
        self.device.world.advance()  # type: ignore[attr-defined]


@contextmanager
def dying(transport: Transport) -> Iterator[None]:
    """A rank that fails in here ends at once, without waiting for streams that stand for ever."""
    try:
        yield
    except BaseException:
        die(transport)
        raise


def die(transport: Transport) -> None:
    """End a rank without a goodbye, as kill -9 does: its thread and its sockets go, its streams stop."""
    watch = transport._watch  # type: ignore[attr-defined]
    watch._stopping.set()
    if watch._thread is not threading.current_thread():
        watch._thread.join()
    transport._channel.close()  # type: ignore[attr-defined]
    transport._core.closed = True  # type: ignore[attr-defined]
