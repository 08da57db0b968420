"""The thread of a communication hook, over a transport that does nothing."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
from commfuse_dp.integrations.comm_hooks import CollectiveThread

from commfuse_dp.errors import CommFuseError


class Nowhere:
    closed = False

    def close(self, reason: str = "") -> None:
        self.closed = True


class Memory:
    pass


def test_a_failure_gives_the_transport_and_its_memory_back_at_once():
    transport: Any = Nowhere()
    thread = CollectiveThread(transport, "commfuse-test")
    seen = []

    def fail() -> None:
        view = Memory()
        seen.append(weakref.ref(view))
        raise OSError("the peer has gone")

    first = thread.submit(fail)
    with pytest.raises(OSError, match="the peer has gone"):
        first.wait()
    second = thread.submit(lambda: None)
    with pytest.raises(CommFuseError, match=r"earlier collective.*the peer has gone"):
        second.wait()
    assert transport.closed and seen[0]() is None
    thread.close()
