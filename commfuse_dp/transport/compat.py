"""Names of torch.distributed that are private: looked up here only."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator

import torch.distributed as dist

log = logging.getLogger("commfuse_dp")


def default_store() -> dist.Store | None:
    """The store that torch.distributed was set up with; None, if this torch has another name for it."""
    found = getattr(dist.distributed_c10d, "_get_default_store", None)
    return found() if found is not None else None


@contextlib.contextmanager
def group_named(name: str) -> Iterator[None]:
    """`dist.new_group(..., use_local_synchronization=True)` in the body, by this thread, makes a group of this name.

    torch (2.13) names such a group after its ranks and the number of groups that this process is in. Ranks that are in
    unequally many would wait for each other under different names. If this torch has another name for it, groups are named as
    it names them, which is said once."""
    module, thread = dist.distributed_c10d, threading.get_ident()
    stock = getattr(module, "_hash_ranks_to_str", None)
    if stock is None:
        _say_unnamed()
        yield
        return
    module._hash_ranks_to_str = lambda ranks: name if threading.get_ident() == thread else stock(ranks)
    try:
        yield
    finally:
        module._hash_ranks_to_str = stock


@functools.cache
def _say_unnamed() -> None:
    log.warning("CommFuse: this torch names process groups in a way not known here: all ranks must be in equally many of them")
