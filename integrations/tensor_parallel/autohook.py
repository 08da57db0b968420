"""What serves an unmodified script under COMMFUSE=1: models that `parallelize_module` was applied to, from their first forward.

Only then is a model complete: a script calls parallelize_module for every block, and perhaps fully_shard behind it. So what it
was called with is remembered, and whichever module is called first that holds any of it is the model. A hook that torch calls
ahead of every module's own finds it; it is gone as soon as nothing is left to be found.

That hook comes after torch has looked up which hooks the model itself has, so those that serving it adds are called here once.
"""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any

_waiting: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # what was watched, is not served -> explicit
_handle: Any = None  # of the hook ahead of every module


def register() -> None:
    """Called once, when torch.distributed.tensor.parallel is imported first."""
    from commfuse_dp.autoload import ON, when_imported, wish

    if wish() in ON:
        when_imported("torch.distributed.tensor.parallel.api")(follow)


def follow(module: ModuleType, name: str = "parallelize_module") -> None:
    """Have the function `name` of a module remember the model that it returns."""
    import wrapt

    def note(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = wrapped(*args, **kwargs)
        watch(result)
        return result

    wrapt.wrap_function_wrapper(module, name, note)


def forget(model: Any) -> None:
    """The script serves this model itself, or has it left as it is."""
    global _handle
    for module in model.modules():
        _waiting.pop(module, None)
    if not _waiting and _handle is not None:
        _handle.remove()
        _handle = None


def watch(module: Any, *, explicit: bool = False) -> Any:
    """Serve the model that `module` belongs to, when it is called first. explicit: the script has asked for it by name, so what
    cannot be served is an error; else it is said, and stays with the framework. Returns the module."""
    global _handle
    from torch.nn.modules.module import register_module_forward_pre_hook

    _waiting[module] = explicit or _waiting.get(module, False)
    if _handle is None:
        _handle = register_module_forward_pre_hook(_before_any)
    return module


def _before_any(module: Any, args: tuple[Any, ...]) -> None:
    found = [_waiting[inner] for inner in module.modules() if inner in _waiting]
    if found:
        forget(module)
        before = set(module._forward_pre_hooks)
        _serve(module, any(found))
        for number, hook in list(module._forward_pre_hooks.items()):
            if number not in before:
                hook(module, args)


def _serve(model: Any, explicit: bool) -> None:
    """All ranks come here: they call the model together. An error of any kind leaves the framework as it was, on all of them,
    and all go on, or none: the others hear of it as an error of ours."""
    import torch.distributed as dist
    from commfuse_dp.integrations.attach.announce import announce
    from commfuse_dp.integrations.tensor_parallel.serving import apply

    from commfuse_dp.autoload import warn

    try:
        report = apply(model)
    except Exception as error:
        if explicit:
            raise
        why = f"{type(error).__name__}: {error}"
        warn(f"CommFuse could not serve this model's tensor parallelism, which stays with DTensor: {why}")
        return
    if dist.get_rank() == 0 and not explicit:
        announce(str(report))
