"""Ranks that describe a call differently are told so, whatever the lengths of their descriptions."""

from __future__ import annotations

from typing import Any

import pytest

from commfuse_dp.collectives.agreement import BRIEF, agree
from commfuse_dp.errors import MismatchError
from tests.support.inproc import InprocWorld
from tests.support.threads import run_ranks


@pytest.mark.parametrize("length", [BRIEF.size - 1, BRIEF.size, BRIEF.size + 1])
def test_a_description_of_any_length_is_compared_by_name(length: int) -> None:
    """Rank 0 describes its call in about as many bytes as a brief has, rank 1 in others."""
    name = "x" * (length - len("call\n=0"))
    world = InprocWorld(2)

    def body(rank: int, exchange: Any) -> str:
        transport = world.transport(rank)
        try:
            with pytest.raises(MismatchError) as caught:
                agree(transport, "call", {name: 0 if rank == 0 else 1000})
            exchange(None)  # nobody leaves before both have been told
            return str(caught.value)
        finally:
            transport.close()

    for text in run_ranks(2, body):  # of what a rank finds itself, or of what the peer says that was quicker
        assert f"do not fit together: {name}=" in text, text
