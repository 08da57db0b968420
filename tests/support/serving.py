"""Models that CommFuse serves for the length of a block, with settings for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from commfuse_dp.integrations import tensor_parallel
from torch import nn

import commfuse_dp
from commfuse_dp import CommFuseConfig


def config(**settings: Any) -> CommFuseConfig:
    """Little memory, and a deadline that a busy machine keeps."""
    return CommFuseConfig(**{"deadline_s": 30.0, "inbox_bytes": 1 << 20, "prefetch_bytes": 1 << 20, **settings})


@contextmanager
def applied(model: nn.Module, **settings: Any) -> Iterator[Any]:
    """apply()'s report; nothing of it is left for the next test. A model that the test has given back itself may stay so."""
    report = commfuse_dp.apply(model, config(**settings))
    try:
        yield report
        dist.barrier()  # where an error was caught: a rank that is behind meets its own, not one of a peer that is gone
    finally:
        if tensor_parallel.applied(model):
            commfuse_dp.remove(model)
