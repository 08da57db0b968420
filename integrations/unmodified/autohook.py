"""Has every function and class of torch by which a script shards a model remember the model. Imports nothing of torch itself.

[Note: Public names]
`fully_shard` is followed where scripts take it from, `torch.distributed.fsdp`; torch.distributed._composable takes it from
there, too. Classes are followed in their constructors, wherever they were taken from.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any


def register() -> None:
    """Called once, when torch is imported first."""
    from commfuse_dp.autoload import ON, when_imported, wish

    if wish() in ON:
        when_imported("torch.nn.parallel.distributed")(lambda module: follow_class(module, "DistributedDataParallel"))
        when_imported("torch.distributed.tensor.parallel.api")(lambda module: follow(module, "parallelize_module"))
        when_imported("torch.distributed.fsdp")(_follow_fsdp)


def follow(module: ModuleType, name: str) -> None:
    """Have the function `name` of a module remember the models that it returns (or the one that it was given, first)."""
    import wrapt

    def note(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from commfuse_dp.integrations.unmodified.first_call import watch

        result = wrapped(*args, **kwargs)
        for model in result if isinstance(result, (list, tuple)) else (result,):
            watch(model)
        return result

    wrapt.wrap_function_wrapper(module, name, note)


def follow_class(module: ModuleType, name: str) -> None:
    """Likewise, every object of a class of wrappers."""
    import wrapt

    def note(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from commfuse_dp.integrations.unmodified.first_call import watch

        wrapped(*args, **kwargs)
        watch(instance)

    wrapt.wrap_function_wrapper(module, f"{name}.__init__", note)


def _follow_fsdp(module: ModuleType) -> None:
    follow(module, "fully_shard")
    follow_class(module, "FullyShardedDataParallel")
