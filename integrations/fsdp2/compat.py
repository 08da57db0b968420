"""Every private name of FSDP2 that this project touches, checked in one place.

Tried with torch 2.11 and 2.13. `probe()` says what is missing; the integration then touches none of these names: it leaves
FSDP2's parameters where they are, over the public hooks, fuses only layers that were claimed before `fully_shard` (claim.py),
and says so.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.forwards import Hook
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from commfuse_dp.errors import BrokenStepError

_GROUP_FIELDS = (
    "fsdp_params",
    "modules",
    "mesh_info",
    "mp_policy",
    "offload_policy",
    "post_forward_mesh_info",
    "reduce_grads",
    "all_reduce_grads",
    "gradient_divide_factor",
    "unshard",
    "wait_for_unshard",
    "unshard_in_backward",
    "is_unsharded",
    "_to_sharded",
    "_to_unsharded",
    "_training_state",
    "lazy_init",
    "_all_gather_comm",
    "_reduce_scatter_comm",
    "_all_gather_result",
)
_PARAM_FIELDS = (
    "sharded_param",
    "_module_info",
    "fsdp_placement",
    "mesh_info",
    "_post_load_hook_handle",
    "reset_sharded_param",
)


def param_groups(module: nn.Module) -> list[Any]:
    """The FSDPParamGroups of one module that `fully_shard` was applied to (empty for any other module)."""
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before per-parameter meshes: one group or none
        single = getattr(state, "_fsdp_param_group", None)
        groups = [single] if single is not None else []
    return list(groups)


def probe(model: nn.Module) -> str | None:
    """None if this torch's FSDP2 has all that adoption needs, else what is missing."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        if not hasattr(module, "_get_fsdp_state"):
            return f"torch {torch.__version__}: FSDPModule has no _get_fsdp_state"
        state = module._get_fsdp_state()
        if not hasattr(state, "_fsdp_param_groups") and not hasattr(state, "_fsdp_param_group"):
            return f"torch {torch.__version__}: FSDP2 has no _fsdp_param_groups"
        if not hasattr(state, "_states_to_forward_prefetch"):
            return f"torch {torch.__version__}: FSDP2 has no _states_to_forward_prefetch"
        for group in param_groups(module):
            missing = [name for name in _GROUP_FIELDS if not hasattr(group, name)]
            for param in group.fsdp_params:
                missing += [name for name in _PARAM_FIELDS if not hasattr(param, name)]
            if missing:
                return f"torch {torch.__version__}: FSDP2 has no {', '.join(sorted(set(missing)))}"
    return None


def module_of(fsdp_param: Any) -> nn.Module:
    module: nn.Module = fsdp_param._module_info.module
    return module


def name_of(fsdp_param: Any) -> str:
    """Within its module."""
    return str(fsdp_param._module_info.param_name)


def tied_to(fsdp_param: Any) -> list[tuple[nn.Module, str]]:
    """The other places of the same parameter: (module, name within it)."""
    info = fsdp_param._module_info
    return list(zip(info.shared_modules, info.shared_param_names, strict=True))


def users(fsdp_param: Any) -> list[nn.Module]:
    """The module that a parameter belongs to, then those that it is tied to."""
    return [module_of(fsdp_param), *(module for module, _ in tied_to(fsdp_param))]


def tied_over_groups(groups: list[Any]) -> list[tuple[Any, Any]]:
    """Pairs of parameters of two groups that were one when they were sharded: FSDP2 refuses them in its first forward, if it
    still finds both. (Empty for a torch that does not look.)"""
    seen: dict[Any, Any] = {}
    found = []
    for group in groups:
        for fsdp_param in group.fsdp_params:
            uid = getattr(fsdp_param, "_orig_param_uid", None)
            if uid is not None and uid in seen:
                found.append((seen[uid], fsdp_param))
            seen.setdefault(uid, fsdp_param)
    return found


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a sharded parameter: the tensor itself, no copy, no autograd."""
    return param._local_tensor if isinstance(param, DTensor) else param


def shard_group(group: Any) -> dist.ProcessGroup | None:
    """The process group that a parameter group is sharded over; None if it is only replicated."""
    return getattr(group.mesh_info, "shard_process_group", None)


def replicate_group(group: Any) -> dist.ProcessGroup | None:
    """The process group of the replicas under hybrid sharding, else None."""
    return getattr(group.mesh_info, "replicate_process_group", None)


def has_all_reduce_hook(group: Any) -> bool:
    """Whether `FSDPModule.set_all_reduce_hook` was called for it."""
    return getattr(group, "_all_reduce_hook", None) is not None


def reduces_unused(group: Any) -> bool:
    """Whether `FSDPModule.set_reduce_scatter_unused_params(True)` was called for it: ranks may use different layers."""
    return bool(getattr(group, "reduce_scatter_unused_params", False))


def keeps_after_forward(group: Any) -> bool:
    return group.post_forward_mesh_info is None


def reshards_to_smaller_mesh(group: Any) -> bool:
    """reshard_after_forward was given as an int: kept sharded over fewer ranks between forward and backward."""
    post = group.post_forward_mesh_info
    return post is not None and post is not group.mesh_info and post != group.mesh_info


def idle_unshard(group: Any) -> None:
    """Let an emptied group go to and fro between sharded and unsharded without a gather: FSDP2 cannot gather zero parameters.

    All its setters stay in force, and `is_unsharded` says what it would say if the group had its parameters."""

    def unshard(async_op: bool = False) -> None:
        return None

    ref: Callable[[], Any] = weakref.ref(group)

    def wait_for_unshard() -> None:
        group = ref()
        if group.unshard_in_backward or group._training_state.name != "PRE_BACKWARD":
            group._to_unsharded()

    group.unshard = unshard
    group.wait_for_unshard = wait_for_unshard


def restore_unshard(group: Any) -> None:
    group.__dict__.pop("unshard", None)
    group.__dict__.pop("wait_for_unshard", None)


def is_unsharded(group: Any) -> bool:
    """Whether FSDP2 has whole parameters in the group's modules now: in their forward, and as long as it keeps them."""
    return bool(group.is_unsharded)


def watch_reshard(group: Any, resharded: Callable[[], None]) -> tuple[dict[str, Any], str, Callable[[], None]]:
    """What to set in which dictionary, so that `resharded` is called whenever FSDP2 shards the group's parameters again."""
    ref, stock = weakref.ref(group), type(group)._to_sharded

    def _to_sharded() -> None:
        resharded()
        stock(ref())

    return vars(group), "_to_sharded", _to_sharded


class _ReshardHook(Hook):
    """As FSDP2 does for the modules of its parameters: a state_dict has sharded ones."""

    def __init__(self, group: Any) -> None:
        self._group = weakref.ref(group)

    def __call__(self, *_: Any) -> None:
        group = self._group()
        if group is not None:
            group._to_sharded()


def reshard_for_state_dict(module: nn.Module, group: Any) -> list[Any]:
    """Returns the hooks' handles."""
    hook = _ReshardHook(group)
    return [module.register_state_dict_pre_hook(hook), module.register_load_state_dict_pre_hook(hook)]


def detach_param(group: Any, fsdp_param: Any) -> None:
    """Take a parameter out of FSDP2's hands; it stays the module's sharded DTensor parameter."""
    group.fsdp_params.remove(fsdp_param)
    fsdp_param._post_load_hook_handle.remove()
    if not group.fsdp_params:
        idle_unshard(group)


def reattach_params(group: Any, original: list[Any]) -> None:
    """Give FSDP2 its parameters back, in their first order."""
    present = set(map(id, group.fsdp_params))
    for fsdp_param in original:
        if id(fsdp_param) not in present:
            module = module_of(fsdp_param)
            reset: Callable[..., Any] = fsdp_param.reset_sharded_param
            fsdp_param._post_load_hook_handle = module.register_load_state_dict_post_hook(lambda *_, reset=reset: reset())
    group.fsdp_params[:] = original
    restore_unshard(group)
    if getattr(group, "_reset_sharded_params", False):  # FSDP2 has run its lazy initialisation: repeat it for all of them
        group._reset_sharded_params = False
        group.lazy_init()


def set_sharded_grad(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Set or accumulate the gradient of a sharded DTensor parameter from this rank's rows, then run its gradient hooks."""
    before = param.grad
    if before is not None:
        local_tensor(before).add_(grad)
    elif isinstance(param, DTensor):
        # As FSDP2 itself does, without a collective. (Without `__init__`, which does nothing but keep dynamo away: 3 of 5 us.)
        param.grad = DTensor.__new__(DTensor, grad, param._spec, requires_grad=False)
    else:
        param.grad = grad
    if getattr(param, "_post_accumulate_grad_hooks", None):
        run_gradient_hooks(param)


def gradients_of(group: Any) -> list[torch.Tensor]:
    """What the parameters that FSDP2 itself serves have accumulated, reduced or not."""
    found = []
    for fsdp_param in group.fsdp_params:
        found += [fsdp_param.sharded_param.grad, getattr(fsdp_param, "unsharded_accumulated_grad", None)]
        found.append(getattr(getattr(fsdp_param, "_unsharded_param", None), "grad", None))
    return [local_tensor(grad) for grad in found if grad is not None]


def forget_gradients(group: Any) -> None:
    """Drop them, also what has not been reduced: `FSDPModule.reset_iter_state` leaves it (torch 2.13)."""
    for fsdp_param in group.fsdp_params:
        fsdp_param.sharded_param.grad = fsdp_param.unsharded_accumulated_grad = None
        if hasattr(fsdp_param, "_unsharded_param"):
            fsdp_param._unsharded_param.grad = None


def run_gradient_hooks(param: torch.Tensor) -> None:
    """What autograd does after it has accumulated a gradient. (A name of torch.Tensor; without it, such hooks do not run.)"""
    for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(param)


def collectives(group: Any) -> tuple[Any, Any]:
    """The group's all-gather and reduce-scatter objects."""
    return group._all_gather_comm, group._reduce_scatter_comm


_KNOWN = ("torch.", "commfuse_dp.")


def own_collective(group: Any) -> str | None:
    """The setter that gave the group a collective of the user's own: neither of torch's kinds nor of CommFuse's."""
    if not type(group._all_gather_comm).__module__.startswith(_KNOWN):
        return "set_custom_all_gather"
    return None if type(group._reduce_scatter_comm).__module__.startswith(_KNOWN) else "set_custom_reduce_scatter"


def has_begun(module: FSDPModule) -> bool:
    """Whether a forward of this root has begun: FSDP2 sets up its communication with the first, and resets nothing before."""
    state = module._get_fsdp_state()
    return bool(getattr(state, "_is_root", False)) and hasattr(getattr(state, "_comm_ctx", None), "all_gather_state")


def is_under_way(module: FSDPModule) -> bool:
    """Whether FSDP2 is between the begin and the end of a forward, or of another method, of this module."""
    state = getattr(module._get_fsdp_state(), "_training_state", None)
    return getattr(state, "name", "IDLE") != "IDLE"


def reset_iteration(module: FSDPModule) -> None:
    """`FSDPModule.reset_iter_state` of a root that `has_begun`; torch 2.11 has none, so there by what it is made of."""
    own = getattr(type(module), "reset_iter_state", None)
    if own is not None:
        own(module)
        return
    state: Any = module._get_fsdp_state()
    stream = state._device_handle.current_stream()
    for name in ("all_gather_state", "reduce_scatter_state"):
        pending = getattr(state._comm_ctx, name)
        if pending is not None and pending.event is not None:
            stream.wait_event(pending.event)
        setattr(state._comm_ctx, name, None)
    state._comm_ctx.post_forward_order.clear()
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = type(each._training_state).IDLE
        group = each._fsdp_param_group
        if group is not None:
            group.finalize_backward()  # waits for what is under way, and forgets it
            group._reshard_after_forward_event = group._partial_reduce_output = None
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def drop_pending_unshard(group: Any) -> None:
    """Forget an all-gather that was begun for a forward that did not come, as FSDP2 does at the end of a backward."""
    result = getattr(group, "_all_gather_result", None)
    if result is None:
        return
    group._all_gather_result = None
    if result.all_gather_event is not None:
        torch.accelerator.current_stream().wait_event(result.all_gather_event)
    if isinstance(result.all_gather_work, dist.Work):
        with contextlib.suppress(BrokenStepError):  # nobody reads it: a step that broke off does not break off the next one
            result.all_gather_work.wait()


def has_forward_prefetch(module: FSDPModule) -> bool:
    return bool(module._get_fsdp_state()._states_to_forward_prefetch)
