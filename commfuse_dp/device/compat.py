"""Names of torch.cuda that are private: looked up here only."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

log = logging.getLogger("commfuse_dp")


def _by_name(index: int) -> int:
    handle: int = torch.cuda.current_stream(index).cuda_stream
    return handle


def _raw() -> Callable[[int], int]:
    found = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if found is None and torch.version.cuda is not None:
        log.warning("CommFuse: this torch has no _cuda_getCurrentRawStream: current_stream() is asked, 3 us more for each call")
    return found or _by_name


raw_stream: Callable[[int], int] = _raw()  # index of a device -> handle of its current stream; a tenth of current_stream's time
