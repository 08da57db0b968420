"""FSDP1 (FullyShardedDataParallel) over CommFuse's collectives, through its public communication hook.

    state = FSDP1State(model)                      # collective; model is the root
    model.register_comm_hook(state, fsdp1_hook)    # or, both at once: report = register_fsdp1(model)

FSDP1's all-gathers of parameters have no hook and stay as they are; the reduction of its gradients goes through ours, in
FULL_SHARD, SHARD_GRAD_OP (reduce-scatter) and NO_SHARD (all-reduce): a mean, summed in rank order in a wide type.

[Note: Overlap]
FSDP1 uses what the hook leaves in the shard as soon as it returns, if only to store it. Where storing is all it does, the
reduction runs on a thread while backward goes on, and is waited for at the end of backward:

    backward   | layer 2 | layer 1 | layer 0 |....| FSDP1's own end of backward, then ours waits; backward returns
    thread               | shard 2 | shard 1 | shard 0 |

To know whether that is so, the hook must know which module it is called for; so in its first call, which blocks, each FSDP
module is given a state of its own (`_ModuleState`), by a private name that compat probes. A shard that is to be cast from the
reduce dtype to that of the parameter is given the parameter's dtype here, and the sum is written into it without rounding in
between. Where anything else would be done with it (gradients added up over several backwards without no_sync, CPU offloading,
an optimizer inside backward, kept low-precision gradients, NO_SHARD), and without the private names, backward waits.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from commfuse_dp.integrations import fsdp1_compat as compat
from commfuse_dp.integrations.attach.report import FROZEN, ParameterRow
from commfuse_dp.integrations.comm_hooks import (
    SUMMABLE,
    HookReport,
    HookState,
    Job,
    attach_hook,
    check_state,
    log,
    require_distributed,
)
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from commfuse_dp import collectives
from commfuse_dp.config import CommFuseConfig
from commfuse_dp.errors import ConfigError
from commfuse_dp.probe import now_ns

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_EXAMPLE = "model.register_comm_hook(FSDP1State(model), fsdp1_hook)"


class FSDP1State(HookState):
    """State of `fsdp1_hook`.

    Args:
        model: the root FullyShardedDataParallel module, before its first forward.
        config: settings; None: those of the environment (COMMFUSE_*). prefetch_bytes bounds the unsharded gradients that wait
            for their reduction.

    Collective. Raises ConfigError (not a root, hybrid sharding, a hook there already, a forward has run), MismatchError,
    TransportError.
    """

    framework = "FSDP1"

    def __init__(self, model: FullyShardedDataParallel, config: CommFuseConfig | None = None) -> None:
        require_distributed("FSDP1State")
        _check(model)
        sizes = [(name, str(numel)) for name, numel, _ in compat.original_parameters(model)]
        self._model = weakref.ref(model)
        self._pending: deque[Job] = deque()
        self._pending_bytes = 0
        self._awaited = False  # the end of this backward waits for what is pending
        self.blocking = compat.probe(model)  # why every reduction blocks, or None
        if self.blocking is not None:
            log.warning("CommFuse for FSDP1: reductions do not overlap with backward: %s", self.blocking)
        facts = [(f"parameter {name}", n) for name, n in sizes]
        super().__init__(model.process_group, config, model.compute_device, facts, lambda: self._rows(model))

    def _rows(self, model: FullyShardedDataParallel) -> list[ParameterRow]:
        rows = []
        for name, numel, flat in compat.original_parameters(model):
            reason = "in a flat parameter" if self.blocking is None else f"in a flat parameter, blocking: {self.blocking}"
            path: Any = "hooks"
            if flat is not None and not flat.requires_grad:
                path, reason = "stock", FROZEN
            elif self.thread is None:
                path, reason = "stock", self.transport_reason
            rows.append(ParameterRow(name, path, reason, numel))
        return rows

    def tell_modules_apart(self) -> None:
        """Give each FSDP module a state of its own, see [Note: Overlap]. Once registered, which only the first call shows."""
        model = self._model()
        if model is not None and self.blocking is None and self.thread is not None:
            for module in FullyShardedDataParallel.fsdp_modules(model):
                compat.set_hook_state(module, _ModuleState(self, module))

    def reduce_scatter(self, partials: torch.Tensor, shard: torch.Tensor, module: FullyShardedDataParallel | None) -> None:
        """shard [n] <- mean over ranks of this rank's part of partials [N * n]. module: for whom, if that is known.

        On return `shard` is filled, or, if nobody looks at it before, will be at the end of this backward.
        """
        if self.thread is None or partials.dtype not in SUMMABLE:
            _stock_reduce_scatter(partials, shard, self.group)
            return
        later = module is not None and compat.may_finish_later(module)
        if module is not None and later and shard.dtype != (dtype := compat.flat_dtype(module)):
            shard.data = torch.empty_like(shard, dtype=dtype)
        out = shard.detach()

        def work() -> None:
            collectives.reduce_scatter(partials, out, op="mean", reduce_dtype=partials.dtype, **self.options)

        self._submit(work, partials.nbytes, later)

    def all_reduce(self, grad: torch.Tensor) -> None:
        """grad <- mean over ranks, in place."""
        if self.thread is None or grad.dtype not in SUMMABLE:
            if self.world_size > 1:
                dist.all_reduce(grad.div_(self.world_size), group=self.group)
            return
        flat = grad.detach()

        def work() -> None:
            collectives.all_reduce(flat, flat, op="mean", **self.options)

        self._submit(work, grad.nbytes, False)

    def drain(self) -> None:
        """Wait for all reductions under way. Raises what the first failed one raised."""
        self._awaited = False
        if not self._pending:
            return
        start = now_ns()
        waited = not self._pending[-1].done()
        try:
            while self._pending:
                self._pending.popleft().wait()
        finally:
            self._pending.clear()
            self._pending_bytes = 0
        if waited:
            self.probe.compute_blocked("(gradients of FSDP1)", start, now_ns())

    def _submit(self, work: Any, nbytes: int, later: bool) -> None:
        assert self.thread is not None
        self.follow_backward()
        limit = self.config.prefetch_bytes
        while self._pending and (self._pending[0].done() or self._pending_bytes + nbytes > limit):
            job = self._pending.popleft()
            self._pending_bytes -= job.nbytes
            job.wait()
        self._pending.append(self.thread.submit(work, nbytes=nbytes))
        self._pending_bytes += nbytes
        if not later:
            self.drain()
        elif not self._awaited:
            self._awaited = True
            torch.autograd.Variable._execution_engine.queue_callback(self.drain)  # runs after FSDP1's, inside backward


class _ModuleState:
    """What one FSDP module's hook is called with: the state of all, and for which module."""

    def __init__(self, state: FSDP1State, module: FullyShardedDataParallel) -> None:
        self.state = state
        self.module = module


def fsdp1_hook(state: FSDP1State | _ModuleState, grad: torch.Tensor, shard: torch.Tensor | None = None) -> None:
    """For `FullyShardedDataParallel.register_comm_hook`, sharded (grad: padded, unsharded; shard: to be filled) or NO_SHARD."""
    module = None
    if isinstance(state, _ModuleState):
        state, module = state.state, state.module
    check_state(state, FSDP1State, "fsdp1_hook", _EXAMPLE)
    if module is None:
        state.tell_modules_apart()
    if shard is None:
        state.all_reduce(grad)
    else:
        state.reduce_scatter(grad, shard, module)


def register_fsdp1(model: FullyShardedDataParallel, config: CommFuseConfig | None = None) -> HookReport:
    """Collective, on all ranks or on none: construct the state, register the hook, log it. Raises as FSDP1State does."""
    return attach_hook(
        model,
        lambda: FSDP1State(model, config),
        lambda state: model.register_comm_hook(state, fsdp1_hook),
        lambda: take_off(model),
    )


def take_off(model: FullyShardedDataParallel) -> None:
    """Before its first backward, the model gives the hook back."""
    compat.unregister(model, fsdp1_hook)


def _stock_reduce_scatter(partials: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """What FSDP1 does without a hook, for one rank and for dtypes that CommFuse does not sum."""
    size = dist.get_world_size(group)
    if size == 1:
        shard.copy_(partials)
        return
    from commfuse_dp.integrations.fsdp2.hooks import reduce_scatter

    reduce_scatter(shard, partials.div_(size), group=group)


def _check(model: object) -> None:
    if not isinstance(model, FullyShardedDataParallel):
        hint = "wrap it first: FSDP1State(FullyShardedDataParallel(model))" if isinstance(model, nn.Module) else _EXAMPLE
        raise ConfigError(f"FSDP1State needs the root FullyShardedDataParallel module, got a {type(model).__name__}: {hint}")
    why = obstacle(model)
    if why is not None:
        raise ConfigError(why)


def obstacle(model: FullyShardedDataParallel) -> str | None:
    """Why this module cannot be given the hook, and what to do about it; None if it can."""
    hook = compat.registered_hook(model)
    if hook is not None:
        return (
            f"this model already has a communication hook ({getattr(hook, '__qualname__', hook)}), and FSDP1 allows one: "
            "construct one FSDP1State per model and register it once, or leave the other hook away"
        )
    outer = compat.enclosing(model)
    if outer is not None:
        return (
            "FSDP1State was given a part of a larger FSDP1 model; hooks belong to the root, and registering one on a part "
            f"would make FSDP1 take the part for a root for good. Give it the outermost module ({type(outer.module).__name__})."
        )
    if compat.forward_has_run(model):
        return (
            "the communication hook must be registered before the first forward of the model: construct the state and "
            f"register it right after wrapping: {_EXAMPLE}"
        )
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module.sharding_strategy in _HYBRID:
            return (
                f"FSDP1 module {name or '(root)'!r} uses {module.sharding_strategy.name}: FSDP1 has no communication hooks "
                "for hybrid sharding. Use FULL_SHARD, SHARD_GRAD_OP or NO_SHARD, or FSDP2 (fully_shard on a 2-D mesh) with "
                "commfuse_dp.apply, which supports it."
            )
    return None


__all__ = ["FSDP1State", "fsdp1_hook", "register_fsdp1"]
