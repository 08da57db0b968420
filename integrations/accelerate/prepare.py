"""In a worker: what each model that Accelerate has prepared gets, and one word about it from the first process.

| prepared by | as | gets |
| --- | --- | --- |
| utils.fsdp_utils.fsdp2_prepare_model | FSDP2 | commfuse_dp.apply |
| Accelerator.prepare_model | FSDP1 | the hook of integrations.fsdp1, at its first forward |
| Accelerator.prepare_model | DDP | the hook of integrations.ddp, at its first forward in training |
| deepspeed | DeepSpeedEngine | nothing here: integrations.deepspeed sees COMMFUSE=1 |

Asked for once more at each call (COMMFUSE=1), so that a program may switch it off again.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from commfuse_dp.integrations.accelerate import compat

from commfuse_dp.autoload import warn
from commfuse_dp.config import CommFuseConfig, asked_for
from commfuse_dp.errors import ConfigError

_NOT_HERE = {
    "DEEPSPEED": "",  # said by the integration for DeepSpeed
    "MEGATRON_LM": "Megatron-LM shards and reduces by itself",
    "XLA": "XLA compiles its collectives into the step",
}

_told: set[str] = set()


def follow_fsdp2(module: ModuleType) -> None:
    """module: accelerate.utils.fsdp_utils."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def fsdp2_prepare_model(accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            prepared = original(accelerator, model, *args, **kwargs)
            if asked_for():
                _apply(accelerator, prepared)
            return prepared

        return fsdp2_prepare_model

    if not compat.replace_in_modules(module, "fsdp2_prepare_model", make):
        _missing("utils.fsdp_utils.fsdp2_prepare_model", "FSDP2")


def follow_accelerator(module: Any) -> None:
    """module: accelerate.accelerator."""

    def prepare(original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            prepared = original(self, model, *args, **kwargs)
            if asked_for():
                _register_hook(self, prepared)
            return prepared

        return prepare_model

    def construct(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if asked_for():
                check_run(self)

        return __init__

    if not compat.replace(module.Accelerator, "prepare_model", prepare):
        _missing("Accelerator.prepare_model", "FSDP1 and DDP")
    compat.replace(module.Accelerator, "__init__", construct)


def check_run(accelerator: Any) -> None:
    """Wrong settings are refused here, before any model is built; what cannot work is said.

    Raises ConfigError.
    """
    CommFuseConfig.from_environment()
    started = compat.processes_started()
    if accelerator.num_processes == 1:
        if started == 1:
            _tell_once("CommFuse has nothing to do: this is a run of one process")
        elif compat.is_first_process() and compat.kind(accelerator) != "DEEPSPEED":  # which connects them itself, later
            warn(
                f"{started} processes each train alone: {started} were started, but Accelerate has set up no communication "
                f"between them (distributed_type {compat.kind(accelerator)}, num_processes 1, device {accelerator.device}), so "
                "each trains a model of its own on all the data, and CommFuse does nothing. Without an accelerator, set "
                "ACCELERATE_USE_CPU=1 in the environment (or Accelerator(cpu=True) in the script); with one, check that torch "
                "sees it: torch.cuda.is_available()."
            )
        return
    why = _NOT_HERE.get(compat.kind(accelerator))
    if why and accelerator.is_main_process:
        _tell_once(f"CommFuse does nothing in this run: {why}")


def _apply(accelerator: Any, model: Any) -> None:
    from commfuse_dp.integrations.attach.announce import announce_report
    from commfuse_dp.integrations.fsdp2.apply import engine_of

    import commfuse_dp

    if engine_of(model) is None:  # a script may have called apply() itself
        report = commfuse_dp.apply(model)
        if accelerator.is_main_process:
            announce_report(report)


def _register_hook(accelerator: Any, model: Any) -> None:
    """DDP and FSDP1: say now what is in the way, else register with the first forward.

    Not at once, since frameworks allow one hook for good and the script may register its own after `prepare`. Not in an
    evaluation by DDP, which one rank may do alone: setting up is a collective.
    """
    if accelerator.num_processes == 1 and compat.processes_started() > 1:
        return  # check_run has said it
    from commfuse_dp.integrations.comm_hooks import checked_config
    from commfuse_dp.integrations.unmodified.first_call import decline, forget, watch
    from commfuse_dp.integrations.wrapped import kind_of

    inner = compat.uncompiled(model)
    if not CommFuseConfig.from_environment().enabled:
        forget(inner)
        if accelerator.is_main_process:
            _tell_once("CommFuse does nothing in this run: enabled=False")
        return
    kind = kind_of(inner)
    if kind is None or not kind.hook or kind.served(inner):  # what is sharded has its own way, above
        return
    checked_config(None)
    why = kind.obstacle(inner)
    if why is None:
        watch(inner)
    else:
        forget(inner)
        decline(kind.name, why, tell=accelerator.is_main_process)


def _tell_once(text: str) -> None:
    if text not in _told:
        _told.add(text)
        from commfuse_dp.integrations.attach.announce import announce

        announce(text)


def _missing(name: str, what: str) -> None:
    text = f"accelerate {compat.version()} has no {name}: CommFuse cannot serve {what} in this version (1.15 was tried)"
    if CommFuseConfig.from_environment().fuse == "always":
        raise ConfigError(f"fuse='always', but {text}")
    warn(text)
