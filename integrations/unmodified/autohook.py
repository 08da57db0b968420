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
        when_imported("torch.nn.parallel.distributed")(lambda module: follow(module, "DistributedDataParallel.__init__"))
        when_imported("torch.distributed.tensor.parallel.api")(lambda module: follow(module, "parallelize_module"))
        when_imported("torch.distributed.fsdp")(lambda module: follow(module, "fully_shard"))
        when_imported("torch.distributed.fsdp")(lambda module: follow(module, "FullyShardedDataParallel.__init__"))


def follow(module: ModuleType, name: str) -> None:
    """Have a function of a module remember the model, or the models, that it returns; a constructor, what it has made."""
    import wrapt

    def note(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from commfuse_dp.integrations.unmodified.first_call import watch

        result = wrapped(*args, **kwargs)
        made = result if instance is None else instance
        for model in made if isinstance(made, (list, tuple)) else (made,):
            watch(model)
        return result

    wrapt.wrap_function_wrapper(module, name, note)
