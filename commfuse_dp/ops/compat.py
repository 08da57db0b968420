"""Names of torch that are private: looked up here only."""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

log = logging.getLogger("commfuse_dp")

P = ParamSpec("P")
T = TypeVar("T")


# Inside torch.func's grad, vjp, jvp, vmap and what is made of them: tensors may be wrapped, and have no memory. The function
# itself, for every layer asks: one of ours around it would be a frame more.
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def in_dual_level() -> bool:
    """Inside `torch.autograd.forward_ad.dual_level`: tensors may have tangents. True if this torch does not say."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def untransformed() -> AbstractContextManager[object]:
    """What the body computes has no part in the transforms of torch.func that are active: its tensors are not wrapped."""
    return torch._C._DisableFuncTorch() if transforms_active() else nullcontext()


def transformed(what: str) -> RuntimeError:
    """For who asks `transforms_active` before its first message: see there."""
    return RuntimeError(
        f"{what} cannot be called inside a transform of torch.func (grad, vjp, jvp, vmap, ...): what it exchanges with other "
        "ranks would be out of the transform's sight. Call it outside, and differentiate with torch.autograd (loss.backward())."
    )


# How many modes of __torch_dispatch__ are active; the function itself, as above.
modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack


def hides_inside() -> bool:
    """Of the modes that are active: none wants to see what fused ops are made of (an attribute `sees_inside_commfuse`)."""
    return not any(getattr(mode, "sees_inside_commfuse", False) for mode in _python_dispatch._get_current_dispatch_mode_stack())


def unseen() -> AbstractContextManager[object]:
    """No mode of `__torch_dispatch__` sees what the body does: see [Note: Dispatch modes] in announced.py."""
    return _python_dispatch._disable_current_modes() if modes_active() and hides_inside() else nullcontext()


def hidden(fn: Callable[P, T]) -> Callable[P, T]:
    """A function whose calls are `unseen`."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with unseen():
            return fn(*args, **kwargs)

    return call


def _no_hooks() -> None:
    return None


_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
if _top_hooks is None:
    log.warning(
        "CommFuse: this torch has no _top_saved_tensors_default_hooks: the last layer of a checkpointed block is computed again"
    )

# (pack, unpack) of the innermost `torch.autograd.graph.saved_tensors_hooks`, or None.
saved_tensors_hooks: Callable[[], tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None] = (
    functools.partial(_top_hooks, False) if _top_hooks is not None else _no_hooks
)


def keeps_graph() -> bool:
    """Whether the backward under way was called with retain_graph=True. True if this torch does not say."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if asked is None else bool(asked())


class FlashAttention(NamedTuple):
    """torch's kernels, for one kind of device. q, o [B, h, s, d]; k, v [B, g, t, d], h a multiple of g; lse [B, h, s], float32
    or wider; causal: s == t, and a query sees the keys up to its own position.

    As of torch 2.13 those for CPUs take any strides but of the last dimension, which must be dense (it is not checked), and no
    empty tensors: those end the process (SIGFPE). Those for CUDA are called within the same limits."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]  # (q, k, v, causal, scale) -> (o, lse)
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # (do, q, k, v, o, lse, causal, scale)


def flash_attention(q: torch.Tensor) -> FlashAttention | None:
    """For queries like these. None: torch has none for them, and blocks of scores are held in memory."""
    kind = q.device.type
    if kind == "cpu":
        return _flash_on_cpus()
    if kind == "cuda" and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        return _flash_on_gpus(q.device)
    return None


def holds_scores(q: torch.Tensor) -> bool:
    """Whether a GPU would hold the scores of a block of queries like these, which the framework's own attention does not."""
    return q.device.type != "cpu" and flash_attention(q) is None


@functools.cache
def _flash_on_cpus() -> FlashAttention | None:
    ops = _named("_scaled_dot_product_flash_attention_for_cpu")
    if ops is None:
        return None
    run, run_backward = ops

    def forward(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
        return run(q, k, v, 0.0, causal, scale=scale)

    def backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, causal: bool, scale: float) -> Any:
        return run_backward(do, q, k, v, o, lse, 0.0, causal, scale=scale)

    return FlashAttention(forward, backward)


@functools.cache
def _flash_on_gpus(device: torch.device) -> FlashAttention | None:
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    ops = _named("_scaled_dot_product_flash_attention")
    if ops is None:
        return None
    run, run_backward = ops
    # Of the dropout, which there is none of: as the forward returns them.
    seed, offset = (torch.empty(shape, dtype=torch.uint64, device=device) for shape in ((2,), ()))

    def forward(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
        o, lse, *_ = run(q, k, v, 0.0, causal, scale=scale)
        return o, lse

    def backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, causal: bool, scale: float) -> Any:
        lengths = None, None, q.shape[2], k.shape[2]
        # Its kernels take lse for contiguous without asking.
        return run_backward(do, q, k, v, o.to(q.dtype), lse.contiguous(), *lengths, 0.0, causal, seed, offset, scale=scale)

    return FlashAttention(forward, backward)


def _named(name: str) -> tuple[Any, Any] | None:
    """An op and its backward; None, said once, if this torch has none under the name known here."""
    ops = getattr(torch.ops.aten, name, None), getattr(torch.ops.aten, f"{name}_backward", None)
    if None in ops:
        log.warning("CommFuse: this torch has no aten::%s: blocks of scores are held in memory instead", name)
        return None
    return ops


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
