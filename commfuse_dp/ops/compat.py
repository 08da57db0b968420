"""Names of torch that are private: looked up here only."""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

log = logging.getLogger("commfuse_dp")


# Inside torch.func's grad, vjp, jvp, vmap and what is made of them: tensors may be wrapped, and have no memory. The function
# itself, for every layer asks: one of ours around it would be a frame more.
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def in_dual_level() -> bool:
    """Inside `torch.autograd.forward_ad.dual_level`: tensors may have tangents. True if this torch does not say."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def untransformed() -> AbstractContextManager[object]:
    """What the body computes has no part in the transforms of torch.func that are active: its tensors are not wrapped."""
    return torch._C._DisableFuncTorch() if transforms_active() else nullcontext()


class FlashAttention(NamedTuple):
    """forward(q, k, v, dropout, is_causal, scale=) -> (o, lse); backward(do, q, k, v, o, lse, dropout, is_causal, scale=)."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


@functools.cache
def cpu_flash_attention() -> FlashAttention | None:
    """torch's flash attention for CPUs; None, said once, if this torch has none under the name known here.

    As of torch 2.13 both take any float dtype, grouped queries and any strides but of the last dimension, which must be dense
    (it is not checked), and no empty tensors: those end the process (SIGFPE)."""
    forward = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    backward = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
    if forward is None or backward is None:
        log.warning("CommFuse: this torch has no flash attention for CPUs: blocks of scores are held in memory instead")
        return None
    return FlashAttention(forward, backward)


def constant_in_graphs(fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compiler.assume_constant_result without importing the compiler: dynamo calls `fn` while it traces."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


_traces = itertools.count(1)


@constant_in_graphs
def trace_number() -> int:
    """Of the graph that dynamo is tracing: another one in what it traces behind a graph break. 0 if this torch does not say."""
    context = getattr(getattr(torch, "_guards", None), "TracingContext", None)
    found: Any = context.try_get() if context is not None else None
    if found is None:
        return 0
    if not hasattr(found, "commfuse_trace"):
        found.commfuse_trace = next(_traces)
    number: int = found.commfuse_trace
    return number


OPS = "commfuse-ops-6"  # rises with every change of a registered op's signature


def prepare_compiler() -> None:
    """Have inductor leave calls in the order of the program, in this process: see [Note: Calls in graphs] in operands.py. And
    have it take no graph from its cache on disk that calls ops as they were before."""
    caching = importlib.import_module("torch.compiler.config")
    if OPS not in getattr(caching, "cache_key_tag", OPS):
        caching.cache_key_tag += OPS  # type: ignore[attr-defined]
    config = importlib.import_module("torch._inductor.config")
    if getattr(config, "reorder_for_peak_memory", False):
        config.reorder_for_peak_memory = False  # type: ignore[attr-defined]
        log.info(
            "CommFuse: torch._inductor.config.reorder_for_peak_memory is off from now on: it reorders the communication of "
            "layers by sizes, which may differ from rank to rank"
        )
