"""What the FSDP2 of the installed torch has: 2.11 is supported, and lacks some of what 2.13 has."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import FSDPModule

RESETS = hasattr(FSDPModule, "reset_iter_state")  # the same versions refuse a weight that is tied over groups
# Seen with 2.11.0: cells of test_backends.py whose ranks are threads crash, inside of torch's own groups.
NEEDS_THREADS = pytest.mark.skipif(not RESETS, reason="torch 2.11 crashes in its own process groups of threads")
NEEDS_RESET = pytest.mark.skipif(not RESETS, reason="what FSDP2 has with FSDPModule.reset_iter_state: torch 2.13")
