"""Credit that travels in company (`release(more=True)`) is held back for a quarter of a ring at most."""

from __future__ import annotations

import pytest

from commfuse_dp.errors import Where
from commfuse_dp.transport.base import CHANNEL_GRAD, Tag
from commfuse_dp.transport.shm.transport import ShmTransport
from commfuse_dp.transport.waiting import wait_until
from tests.support import single
from tests.support.threads import ExchangeFn, run_ranks

INBOX, MESSAGE = 1024, 64


@pytest.mark.parametrize("nbytes", [MESSAGE, 0], ids=["bytes", "nothing but a place"])
def test_a_sender_gets_room_though_the_receiver_waits_for_company(nbytes: int) -> None:
    """The receiver is busy elsewhere from then on: it neither makes progress nor releases what is left."""
    count = INBOX // MESSAGE
    tags = [Tag(CHANNEL_GRAD, 1, 1, part) for part in range(count)]
    releases = INBOX // 4 // MESSAGE + 1

    def body(rank: int, exchange: ExchangeFn) -> None:
        transport = ShmTransport(rank, 2, exchange, inbox_bytes=INBOX, deadline_s=20.0)
        try:
            if rank == 0:
                for tag in tags:
                    single.send(transport, 1, tag, single.reserve(transport, 1, nbytes))
                assert not transport.reserve([1], [MESSAGE]), "the ring is full"
                exchange("sent")
                exchange("released")
                where = Where("fc", 1)
                wait_until(transport, lambda: bool(transport.reserve([1], [MESSAGE])), peer=1, where=where, doing="for room")
            else:
                exchange("sent")
                for tag in tags:
                    single.receive(transport, 0, tag)
                for tag in tags[:releases]:
                    single.release(transport, 0, tag, more=True)
                exchange("released")
            exchange("end")
        finally:
            transport.close()

    run_ranks(2, body, timeout_s=60)
