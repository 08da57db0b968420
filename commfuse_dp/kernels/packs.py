"""Number types and packs of the CUDA C++ kernels, as cuda/numbers.cuh has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

Implementation = Literal["auto", "kernel", "reference"]

THREADS = 256  # of a block
TYPE_NAMES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bf16", torch.float16: "fp16"}


def common_head(pointers: Sequence[tuple[int, int]], pack: int) -> int | None:
    """Elements to skip until every (address, element size) is aligned to its access of min(16, pack * size) bytes at once.

    0 <= head < pack; None if the pointers never agree.
    """
    for head in range(pack):
        if all((pointer + head * size) % min(16, pack * size) == 0 for pointer, size in pointers):
            return head
    return None
