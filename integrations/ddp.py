"""DistributedDataParallel over CommFuse's collectives, through its public communication hook.

    state = DDPState(model)                        # collective
    model.register_comm_hook(state, ddp_hook)      # or, both at once: report = register_ddp(model)

Each bucket is reduced by a reduce-scatter and an all-gather (an exact mean: summed in rank order in a wide type, divided once)
on a thread of its own, while backward computes the next bucket:

    backward   | bucket 0 | bucket 1 | bucket 2 |............| gradients are copied from the buckets, backward returns
    thread                | mean 0   | mean 1   |  mean 2    |

DDP waits for the futures at the end of its backward.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from commfuse_dp.integrations import ddp_compat as compat
from commfuse_dp.integrations.attach.report import FROZEN, ParameterRow
from commfuse_dp.integrations.comm_hooks import (
    SUMMABLE,
    HookReport,
    HookState,
    Job,
    attach_hook,
    check_state,
    require_distributed,
)
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from commfuse_dp import collectives
from commfuse_dp.collectives.end_of_backward import in_backward
from commfuse_dp.config import CommFuseConfig
from commfuse_dp.errors import ConfigError
from commfuse_dp.probe import now_ns


class DDPState(HookState):
    """State of `ddp_hook`: one per wrapped model.

    Args:
        model_or_group: the DistributedDataParallel model (best: its group, its device and the report are known then), or its
            process group, or None for the default group.
        config: settings; None: those of the environment (COMMFUSE_*).

    Collective: all ranks of the group construct it. Raises ConfigError, MismatchError, TransportError.
    """

    framework = "DDP"

    def __init__(
        self, model_or_group: nn.Module | dist.ProcessGroup | None = None, config: CommFuseConfig | None = None
    ) -> None:
        require_distributed("DDPState")
        model, group = _model_and_group(model_or_group)
        self._model = weakref.ref(model) if model is not None else lambda: None
        if model is not None:
            compat.divides_by_active_ranks(model)  # or raises, if that cannot be known
        facts = [] if model is None else [(f"parameter {name}", _describe(p)) for name, p in model.named_parameters()]
        super().__init__(group, config, _device(model, group), facts, lambda: self._rows(model))

    def _rows(self, model: DistributedDataParallel | None) -> list[ParameterRow]:
        if model is None:
            return []
        ignored = model.parameters_to_ignore
        rows = []
        for name, param in model.module.named_parameters():
            reason = "in a DDP bucket"
            if name in ignored:
                reason = "DDP was told to ignore it"
            elif not param.requires_grad:
                reason = FROZEN
            elif self.thread is None:
                reason = self.transport_reason
            elif param.dtype not in SUMMABLE:
                reason = f"{param.dtype} cannot be summed here"
            rows.append(ParameterRow(name, "hooks" if reason == "in a DDP bucket" else "stock", reason, param.numel()))
        return rows

    def reduce(self, buffer: torch.Tensor, last: bool) -> Future[torch.Tensor]:
        """buffer [n] <- mean of all ranks' buffers, in place. Returns at once; the future holds `buffer`."""
        thread, active = self.thread, self._active()
        if thread is None or buffer.layout != torch.strided or buffer.dtype not in SUMMABLE:
            return _stock_mean(buffer, self.group, active)
        self.follow_backward()
        future: Future[torch.Tensor] = Future()
        handed_over = now_ns()

        def work() -> None:
            collectives.all_reduce(buffer, buffer, op="mean", **self.options)
            if active is not None:
                buffer.div_(collectives.all_reduce(active, active, op="mean", **self.options).item())

        def complete(job: Job) -> None:
            if last:  # nothing is left to compute in backward after its last bucket
                self.probe.compute_blocked("(last bucket)", handed_over, now_ns())
            if job.error is None:
                future.set_result(buffer)
            else:  # a plain result: see `_unwrapped` on how it becomes the future's error
                future.set_result(job.error)  # type: ignore[arg-type]

        thread.submit(work, nbytes=buffer.nbytes, then=complete)
        return future.then(_unwrapped)

    def _active(self) -> torch.Tensor | None:
        """[1] fp64: 1 if this rank has a batch, 0 if it gives zeros in place of one (DDP's join). None: the mean is that of all
        ranks, whether they have one or not."""
        model = self._model()
        if model is None or not compat.divides_by_active_ranks(model):
            return None
        return torch.tensor([float(in_backward())], dtype=torch.float64, device=self.device)


def ddp_hook(state: DDPState, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """For `DistributedDataParallel.register_comm_hook`: the mean of a bucket, over CommFuse's collectives."""
    check_state(state, DDPState, "ddp_hook", "model.register_comm_hook(DDPState(model), ddp_hook)")
    return state.reduce(bucket.buffer(), bucket.is_last())


# DDP compares the annotations with these classes; postponed ones are strings.
ddp_hook.__annotations__ = {"state": DDPState, "bucket": dist.GradBucket, "return": Future[torch.Tensor]}


def register_ddp(model: DistributedDataParallel, config: CommFuseConfig | None = None) -> HookReport:
    """Collective, on all ranks or on none: construct the state, register the hook, log it. Raises as DDPState does."""
    return attach_hook(
        model, lambda: DDPState(model, config), lambda state: model.register_comm_hook(state, ddp_hook), lambda: None
    )


def _unwrapped(future: Future[Any]) -> torch.Tensor:
    """DDP waits in C++, where only an exception that a callback raises is an error (one set from Python is a mere value)."""
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    return value


def _stock_mean(
    buffer: torch.Tensor, group: dist.ProcessGroup | None, active: torch.Tensor | None = None
) -> Future[torch.Tensor]:
    """What DDP does without a hook, for one rank, sparse gradients, and dtypes that CommFuse does not sum."""
    size = dist.get_world_size(group)
    if size == 1:
        future: Future[torch.Tensor] = Future()
        future.set_result(buffer)
        return future
    if active is not None:
        dist.all_reduce(active, group=group)
    buffer.div_(size if active is None else active.item())
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _model_and_group(given: object) -> tuple[DistributedDataParallel | None, dist.ProcessGroup | None]:
    if isinstance(given, DistributedDataParallel):
        hook, _ = compat.registered_hook(given)
        if hook is not None:
            raise ConfigError(
                f"this model already has a communication hook ({getattr(hook, '__qualname__', hook)}), and DDP allows one: "
                "construct one DDPState per DistributedDataParallel model and register it once, or leave the other hook away"
            )
        return given, given.process_group
    if given is None or isinstance(given, dist.ProcessGroup):
        return None, given
    hint = "wrap it first: DDPState(DistributedDataParallel(model))" if isinstance(given, nn.Module) else "see its docstring"
    raise ConfigError(
        f"DDPState was given a {type(given).__name__}; allowed are a DistributedDataParallel model, a process group, or None "
        f"for the default group: {hint}"
    )


def _device(model: nn.Module | None, group: dist.ProcessGroup | None) -> torch.device:
    if model is not None:
        return next((param.device for param in model.parameters() if param.requires_grad), torch.device("cpu"))
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator if accelerator is not None and dist.get_backend(group) != "gloo" else torch.device("cpu")


def _describe(param: torch.Tensor) -> str:
    return f"{tuple(param.shape)} {param.dtype} requires_grad={param.requires_grad}"


__all__ = ["DDPState", "ddp_hook", "register_ddp"]
