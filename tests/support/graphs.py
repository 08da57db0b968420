"""What a test of torch.compile starts from, in a process that has run others before it."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def fresh() -> None:
    """Forgets what was compiled, what was counted, and what DTensor has found out about its ops.

    That last cache takes equal meshes for one: a result may have the mesh object of an earlier test. torch 2.13 fails to
    compile a graph that returns a DTensor whose mesh object none of its inputs has ("Node tangents_3 was invalid, but is
    output"), with and without CommFuse.
    """
    torch.compiler.reset()
    counters.clear()
    _clear_sharding_prop_cache()
