"""What tests whose ranks are threads stand on."""

from __future__ import annotations

import threading
import time
from unittest import mock

import torch

from tests.support.threads import run_ranks


def test_threads_that_ask_for_an_op_at_once_get_the_same():
    """Without the lock each gets its own, and all but one are freed while C++ still points to them."""
    library = torch.library.Library("commfuse_threads", "DEF")
    make = torch._C._get_schema

    def pausing(*arguments: str) -> torch.FunctionSchema:
        time.sleep(0.01)  # so that all are in the middle of it
        return make(*arguments)

    try:
        library.define("once(Tensor x) -> Tensor")
        together = threading.Barrier(4)
        with mock.patch.object(torch._C, "_get_schema", pausing):

            def ask(rank: int, exchange: object) -> int:
                together.wait()
                return id(torch.ops.commfuse_threads.once.default)

            assert len(set(run_ranks(4, ask))) == 1
    finally:
        library._destroy()
