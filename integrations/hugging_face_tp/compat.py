"""What transformers (5.23) leaves on a model that it shards, and names of it that are needed: looked up here only.

| style of the plan | on the module | read from it |
| --- | --- | --- |
| colwise, rowwise, ... | `forward` in its dictionary: a closure over style, mesh and own forward | all three |
| moe_tp_experts | likewise; parameters of the module are sharded by styles of their own | likewise |
| replicated_with_grad_allreduce | likewise, over its own forward | that it is one |

Another version may keep it otherwise. Then nothing is found, or what is found has the kind `OTHER`, and its module stays
as it is, with this reason in the report.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

from commfuse_dp.integrations.attach.forwards import own_class
from commfuse_dp.integrations.tensor_parallel.compat import closure_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

HOME = "transformers.distributed.tensor_parallel"
COLUMN, ROW, EXPERTS = "ColwiseParallel", "RowwiseParallel", "MoeExpertsParallel"
REPLICATED, OTHER = "ReplicatedWithGradAllReduce", "another style"


class HuggingFaceStyle(NamedTuple):
    """A style of transformers' plan that was applied to a module."""

    kind: str
    name: str  # of the style's class
    mesh: DeviceMesh | None
    stock: Callable[..., Any]  # the forward that transformers has put into the module's dictionary
    finish: Callable[..., Any] | None = None  # (module, DTensor, mesh) -> output in the layout that the style promises
    own: Callable[..., Any] | None = None  # of experts: the forward that the module had
    whole: bool = False  # a column-parallel layer's output, a row-parallel one's input: every rank has all features of it
    why: str | None = None  # a layout that is not served


def style_of(module: nn.Module) -> HuggingFaceStyle | None:
    forward = vars(module).get("forward")
    if not isinstance(forward, FunctionType) or forward.__module__ != HOME:
        return None
    found = closure_of(forward)
    style, mesh, original = found.get("self"), found.get("mesh"), found.get("original_forward")
    if getattr(original, "__func__", None) is not own_class(module).forward or found.get("module") is not module:
        return HuggingFaceStyle(OTHER, type(style).__name__, None, forward)
    if forward.__qualname__.startswith(f"{REPLICATED}."):
        return HuggingFaceStyle(REPLICATED, REPLICATED, None, forward)
    kind, finish = type(style).__name__, getattr(style, "transform_output_post_forward", None)
    if kind == EXPERTS and isinstance(mesh, DeviceMesh):
        return HuggingFaceStyle(EXPERTS, kind, mesh, forward, own=original)
    layouts = getattr(style, "input_layouts", None), getattr(style, "output_layouts", None)
    if kind not in (COLUMN, ROW) or not isinstance(mesh, DeviceMesh) or finish is None or not all(layouts):
        known = isinstance(mesh, DeviceMesh)
        return HuggingFaceStyle(OTHER, kind, mesh if known else None, forward)
    whole = isinstance(layouts[1 if kind == COLUMN else 0], Replicate)
    return HuggingFaceStyle(kind, kind, mesh, forward, finish, whole=whole, why=_layout_obstacle(kind, *layouts))


def _layout_obstacle(kind: str, inputs: Any, outputs: Any) -> str | None:
    """Which of its layouts is not one of those that are served."""
    if kind == COLUMN and not isinstance(inputs, Replicate):
        return f"its input is laid out as {inputs}, not replicated"
    if kind == ROW and inputs not in (Shard(-1), Replicate()):
        return f"its input is laid out as {inputs}, neither replicated nor sharded along its features"
    if kind == ROW and not isinstance(outputs, Replicate):
        return f"its output is laid out as {outputs}, not replicated"
    return None


def sharded(model: nn.Module) -> bool:
    """Whether transformers has applied a style of its own to anything in the model."""
    return HOME in sys.modules and any(style_of(module) is not None for module in model.modules())


def hooks_of_fsdp(hooks: Mapping[int, Any]) -> list[int]:
    """Which of a module's hooks `fully_shard` has put there, in order."""
    return [key for key, hook in hooks.items() if str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")]


def wants_hidden_states(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether this call of a transformers model returns what goes in and out of its decoder layers."""
    own = getattr(getattr(module, "config", None), "output_hidden_states", False)
    return bool(kwargs.get("output_hidden_states") or own)


def wants_router_logits(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether this call of a transformers model returns the scores by which tokens are given to experts."""
    own = getattr(getattr(module, "config", None), "output_router_logits", False)
    return bool(kwargs.get("output_router_logits") or own)


def holds_compiled(module: nn.Module) -> bool:
    """Whether a module in it is compiled, in place (`compile()`), wrapped, or in its forward (`torch.compile` of either)."""
    return any(
        part._compiled_call_impl is not None
        or "_orig_mod" in part._modules
        or hasattr(vars(part).get("forward"), "_torchdynamo_orig_callable")
        for part in module.modules()
    )
