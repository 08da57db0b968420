"""Models that are served when they are called first: those of an unmodified script under COMMFUSE=1, and those that hold a
style of ours.

Only then is a model complete: a script calls parallelize_module or fully_shard for every block, and registers hooks of its own
after DDP has been constructed. So what was wrapped is remembered (`watch`), and a hook that torch calls ahead of every module's
own finds the model; it is gone as soon as nothing is left to be found.

| wrapped by | is served when this is called |
| --- | --- |
| DDP, FSDP1 | the object itself, the outermost; DDP in training only, for a rank may evaluate alone |
| `fully_shard` | the one that holds all others; if there is none, what holds them all |
| `parallelize_module`, styles of ours | what holds them all, if that is called |

That hook comes after torch has looked up which hooks the model itself has, so those that serving it adds are called here once.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.announce import announce, announce_report
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook

from commfuse_dp.autoload import warn
from commfuse_dp.config import CommFuseConfig
from commfuse_dp.errors import ConfigError
from commfuse_dp.ops.compat import modes_active, transforms_active
from commfuse_dp.transport.exchange import exchange_of
from commfuse_dp.transport.membership import called_in

_waiting: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()  # was watched, is not served -> explicit
_passed: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # were called, and are not to be served as long as that stays the same
_handle: Any = None  # of the hook ahead of every module


def watch(module: Any, *, explicit: bool = False) -> Any:
    """Serve the model that `module` belongs to, when it is called first. explicit: the script has asked for it by name, so what
    cannot be served is an error; else it is said, and stays with the framework. Returns the module."""
    global _handle
    _waiting[module] = explicit or _waiting.get(module, False)
    _passed.clear()
    if _handle is None:
        _handle = register_module_forward_pre_hook(torch.compiler.disable(_before_any))
    return module


def forget(model: nn.Module) -> None:
    """The script serves this model itself, or has it left as it is."""
    _leave(list(model.modules()))


def _leave(modules: list[nn.Module]) -> None:
    global _handle
    for module in modules:
        _waiting.pop(module, None)
    _passed.clear()
    if not _waiting and _handle is not None:
        _handle.remove()
        _handle = None


def _before_any(module: nn.Module, args: tuple[Any, ...]) -> None:
    if module in _passed or modes_active() or transforms_active():  # a call that is looked at, or on fake tensors: the next one
        return
    if not _waiting:  # all of it was dropped without having been called
        _leave([])
        return
    held = [inner for inner in module.modules() if inner in _waiting]
    if not held or any(module is inner for other in _waiting if other is not module for inner in other.modules()):
        _passed.add(module)  # has nothing to do with it, or is a part
        return
    from commfuse_dp.integrations.wrapped import kind_of

    kind = kind_of(module)
    if kind is None:
        return  # its parts are called later
    held = [inner for inner in held if kind.holds(inner)]
    if not held or not kind.ready(module) or not (module in held if kind.hook else _is_whole(module, held)):
        return
    explicit = any(_waiting[inner] for inner in held)
    _leave(held)
    before = set(module._forward_pre_hooks)
    with torch.inference_mode(False), torch.enable_grad():  # what is made now is used in training
        _serve(module, kind, explicit)
    for number, hook in list(module._forward_pre_hooks.items()):
        if number not in before:
            hook(module, args)


def _is_whole(model: nn.Module, held: list[nn.Module]) -> bool:
    """Whether `model` is the one to be served for what it holds: not what is around the root of FSDP2."""
    parts = {id(inner) for outer in held for inner in outer.modules() if inner is not outer}
    outermost = [inner for inner in held if id(inner) not in parts]
    return len(outermost) > 1 or outermost[0] is model or not isinstance(outermost[0], FSDPModule)


def _serve(model: Any, kind: Any, explicit: bool) -> None:
    """All ranks come here: they call the model together. An error of any kind leaves the framework as it was, on all of them,
    and all go on, or none: the others hear of it as an error of ours. Raises ConfigError for wrong settings."""
    config = CommFuseConfig.from_environment()
    first = dist.get_rank() == 0
    if kind.served(model):
        return
    if not config.enabled:
        if first:
            announce("CommFuse does nothing in this run: enabled=False")
        return
    why = _of_any_rank(kind.obstacle(model), model.process_group) if kind.hook else None
    if why is not None:
        decline(kind.name, why, tell=first)
        return
    try:
        report = kind.serve(model, None)
    except Exception as error:
        if explicit or config.fuse == "always":
            raise
        warn(f"CommFuse could not serve this model, which stays with {kind.name}: {type(error).__name__}: {error}")
        return
    if first and not explicit:
        announce_report(report)


def decline(framework: str, why: str, *, tell: bool) -> None:
    """Raises ConfigError if fusion was insisted on."""
    if CommFuseConfig.from_environment().fuse == "always":
        raise ConfigError(f"fuse='always', but {framework} is left as it is: {why}")
    if tell:
        announce(f"CommFuse leaves {framework} as it is: {why}")


def _of_any_rank(why: str | None, group: Any) -> str | None:
    """Collective: what is in the way, on this rank or on another: the others must not begin what one leaves alone."""
    exchange = exchange_of(group)
    found = [(rank, said) for rank, said in enumerate(exchange(why)) if said is not None]
    if why is not None or not found:
        return why
    return f"on rank {called_in(exchange, found[0][0])} {found[0][1]}"
