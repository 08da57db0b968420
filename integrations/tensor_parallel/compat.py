"""What the styles of torch.distributed.tensor.parallel have left on a module, read from its hooks.

| style | hook | where the layouts are |
| --- | --- | --- |
| Colwise, Rowwise, SequenceParallel | two functions of `distribute_module` | closure: `device_mesh`, `input_fn` / `output_fn` |
| PrepareModuleInput | one function of its `_apply` | closure: `device_mesh`, and `self`, the style |

(`input_fn` and `output_fn` are partials of the style's methods.) Names of closures are private: they are looked up here only. A
hook that looks like a style's but cannot be read is reported, and its module is left as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import PrepareModuleInput
from torch.distributed.tensor.placement_types import Placement
from torch.nn.modules import module as _modules

COLUMN, ROW, SEQUENCE, INPUT = "ColwiseParallel", "RowwiseParallel", "SequenceParallel", "PrepareModuleInput"
_DISTRIBUTED = (COLUMN, ROW, SEQUENCE)


class Style(NamedTuple):
    """One style that was applied to a module, and the hook that stands for its input side."""

    kind: str
    mesh: DeviceMesh
    hook_id: int  # of the forward pre-hook
    hook: Callable[..., Any]
    inputs: tuple[Placement | None, ...]  # as the caller gives them
    wanted: tuple[Placement | None, ...]  # as the module gets them
    outputs: tuple[Placement, ...] = ()
    keywords: tuple[tuple[Placement | None, Placement | None], ...] = ()  # (given, wanted) of keyword arguments
    local_output: bool = False  # PrepareModuleInput: the module gets a plain tensor


def styles_of(module: nn.Module) -> list[Style]:
    found = []
    for hook_id, hook in module._forward_pre_hooks.items():
        style = _read(module, hook_id, hook)
        if style is not None:
            found.append(style)
    return found


def unreadable(module: nn.Module) -> bool:
    """`distribute_module` was applied, but no hook of it says how: by hand, or by another version of torch."""
    return bool(getattr(module, "_distribute_module_applied", False)) and not styles_of(module)


def _read(module: nn.Module, hook_id: int, hook: Any) -> Style | None:
    variables = closure_of(hook)
    mesh = variables.get("device_mesh")
    if not isinstance(mesh, DeviceMesh):
        return None
    prepare = variables.get("self")
    if isinstance(prepare, PrepareModuleInput):
        inputs, wanted = prepare.input_layouts or (), prepare.desired_input_layouts or ()
        into = prepare.desired_input_kwarg_layouts
        keywords = tuple((given, into.get(name)) for name, given in prepare.input_kwarg_layouts.items())
        return Style(INPUT, mesh, hook_id, hook, inputs, wanted, (), keywords, prepare.use_local_output)
    kind, arguments = _method(variables.get("input_fn"), "_prepare_input_fn")
    if kind not in _DISTRIBUTED:
        return None
    if kind == SEQUENCE:
        (layouts,) = arguments
        return Style(SEQUENCE, mesh, hook_id, hook, layouts, layouts)
    inputs, wanted = arguments
    for after in module._forward_hooks.values():
        if _method(closure_of(after).get("output_fn"), "_prepare_output_fn")[0] == kind:
            outputs = _method(closure_of(after)["output_fn"], "_prepare_output_fn")[1][0]
            return Style(str(kind), mesh, hook_id, hook, inputs, wanted, outputs)
    return None


def hooked(modules: Iterable[nn.Module | None]) -> bool:
    """Whether a backward hook is to see the gradients of what one of these modules takes in and gives: the framework's. For
    that torch puts a function of autograd around the module, behind its forward pre-hooks."""
    if _modules._global_backward_hooks or _modules._global_backward_pre_hooks:
        return True
    return any(module is not None and (module._backward_hooks or module._backward_pre_hooks) for module in modules)


def closure_of(function: Any) -> dict[str, Any]:
    """Variables of the functions around a function, by name."""
    if not isinstance(function, FunctionType) or function.__closure__ is None:
        return {}
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    return found


def _method(value: Any, name: str) -> tuple[str | None, tuple[Any, ...]]:
    """(class, arguments) of a partial of a style's method."""
    if not isinstance(value, functools.partial):
        return None, ()
    kind, _, method = getattr(value.func, "__qualname__", "").rpartition(".")
    return (kind, value.args) if method == name else (None, ())
