"""Fused layers through public names of FSDP2 alone: `claim` layers before `fully_shard`, which is told to ignore them.

    claimed = commfuse_dp.claim(model, mp_policy=policy)
    for block in model.layers:
        fully_shard(block, mp_policy=policy, ignored_params=claimed.params)
    fully_shard(model, mp_policy=policy, ignored_params=claimed.params)
    report = commfuse_dp.apply(model)

`apply` alone takes layers out of FSDP2's hands after `fully_shard`, which needs private names (compat.py). A claimed layer
never gets there: its parameters are made sharded DTensors here, equal to FSDP2's in mesh, placement and rows, so optimizers,
gradient clipping and checkpoints see no difference. Its settings (mixed precision, resharding, accumulation) live in
`ClaimPolicy`, not in an FSDP2 group.

Until `apply`, and again after `remove`, a claimed layer works by blocking collectives of its own: see plain.py.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.attachment import attaching
from commfuse_dp.integrations.attach.forwards import CLAIM, Hook, Service, serve, served_class
from commfuse_dp.integrations.attach.reads import Scope
from commfuse_dp.integrations.attach.rules import (
    check_exclude,
    form_of,
    full_name,
    module_obstacle,
    original_type,
    tensor_obstacle,
)
from commfuse_dp.integrations.attach.transaction import Transaction
from commfuse_dp.integrations.fsdp2 import compat
from commfuse_dp.integrations.fsdp2.layers import ModuleParameter
from commfuse_dp.integrations.fsdp2.plain import plain
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.hooks import RemovableHandle

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.errors import ConfigError
from commfuse_dp.program.layout import chunk_bounds


@dataclass
class ClaimPolicy:
    """A `UnitPolicy` of our own: what the parameter group is for the layers that FSDP2 holds."""

    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    keep_after_forward: bool = False
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    divide_factor: float | None = None


class ClaimedParameter(ModuleParameter):
    """A `ParamSlot` that uses public names of DTensor only."""

    def local_of(self, param: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return param.to_local()  # type: ignore[attr-defined]  # a view: same memory

    def deliver_to(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        assert isinstance(param, DTensor)
        with torch.no_grad():
            if param.grad is None:
                param.grad = _sharded(grad, param.device_mesh, param)
            else:
                param.grad.to_local().add_(grad)  # type: ignore[attr-defined]
        compat.run_gradient_hooks(param)


class ClaimedLayer:
    """One claimed module: all of its own parameters, weight first."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, policy: ClaimPolicy) -> None:
        self._module = weakref.ref(module)
        self.policy = policy
        self.kind = original_type(module)
        self.fused = form_of(module) is not None
        self.param_names = sorted((name for name, _ in module.named_parameters(recurse=False)), key=lambda n: n != "weight")
        self.mesh = mesh
        self.shard_group = mesh.get_group(mesh.ndim - 1)
        self.replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ConfigError("the model that was given to commfuse_dp.claim() has gone: keep it as long as `claimed` is used")
        return module

    def slots(self, name: str) -> list[ClaimedParameter]:
        return [ClaimedParameter(full_name(name, param), self.module, param) for param in self.param_names]

    def replaced(self) -> bool:
        """Whether somebody has given the module another forward since."""
        return "forward" in vars(self.module) or type(self.module).forward is not served_class(self.kind).forward


class Claimed:
    """Result of `claim`. `print(claimed)` shows which modules were claimed, and why others were not.

    The setters have the meaning of FSDP2's own and concern all claimed layers. Only settings made before `apply` need them:
    from `apply` on, FSDP2's setters, called on the model or on any of its modules, reach the claimed layers too.
    """

    def __init__(self, layers: dict[str, ClaimedLayer], left: dict[str, str]) -> None:
        self.layers = layers
        self.left = left
        """Modules with parameters of their own that stay with FSDP2: name -> reason."""

    @property
    def params(self) -> set[nn.Parameter]:
        """For `ignored_params` of every `fully_shard`."""
        return {slot.parameter for layer in self.layers.values() for slot in layer.slots("")}

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        self._set("set_requires_gradient_sync", requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool) -> None:
        self._set("set_requires_all_reduce", requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool) -> None:
        self._set("set_reshard_after_forward", reshard_after_forward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        self._set("set_gradient_divide_factor", factor)

    def _set(self, setter: str, value: Any) -> None:
        for layer in self.layers.values():
            for field, setting in _SETTERS[setter](value).items():
                setattr(layer.policy, field, setting)

    def __str__(self) -> str:
        numel = sum(param.numel() for param in self.params)
        lines = [f"CommFuse claims {numel:,} parameters in {len(self.layers)} modules; call fully_shard with ignored_params"]
        width = max(map(len, [*self.layers, *self.left]), default=4)
        lines += [f"  {name:<{width}}  claimed" for name in self.layers]
        lines += [f"  {name:<{width}}  left to FSDP2: {why}" for name, why in self.left.items()]
        return "\n".join(lines)


_SETTERS: dict[str, Callable[[Any], dict[str, Any]]] = {  # FSDP2's setter -> fields of ClaimPolicy
    "set_requires_gradient_sync": lambda value: {"reduce_grads": value, "all_reduce_grads": value},
    "set_requires_all_reduce": lambda value: {"all_reduce_grads": value},
    "set_reshard_after_forward": lambda value: {"keep_after_forward": not value},
    "set_gradient_divide_factor": lambda value: {"divide_factor": value},
}


def claim(
    model: nn.Module,
    config: CommFuseConfig | None = None,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
) -> Claimed:
    """Shard the layers that CommFuse can serve, before `fully_shard`, which must then ignore them (`claimed.params`).

    model: the whole model, plain or on the meta device. mesh, mp_policy, reshard_after_forward: as given to `fully_shard`
    (mesh None: all ranks); mp_policy casts no inputs and outputs, which stays with `fully_shard`. config: as given to
    `apply`; with `enabled=False` or `fuse="never"` nothing is claimed.

    Every `fully_shard` must get `ignored_params=claimed.params`: torch fails on a claimed parameter otherwise. No
    communication: every rank keeps its rows of what it has, as with FSDP2. Raises ConfigError.
    """
    config = config if config is not None else CommFuseConfig.from_environment()
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ConfigError(
                f"commfuse_dp.claim() came after fully_shard, which holds {name or 'the model'!r} already. "
                "Call claim() on the whole model before the first fully_shard."
            )
        if claimed_layer(module) is not None:
            raise ConfigError(f"commfuse_dp.claim() was called twice: {name or 'the model'!r} is claimed already")
    if not isinstance(reshard_after_forward, bool):
        raise ConfigError(
            f"reshard_after_forward={reshard_after_forward!r} for claimed layers; allowed are True and False. For resharding "
            "to a smaller mesh use fully_shard without claim()."
        )
    check_exclude(model, config)
    mesh = _checked(mesh)
    policy = mp_policy if mp_policy is not None else MixedPrecisionPolicy()
    layers: dict[str, ClaimedLayer] = {}
    left: dict[str, str] = {}
    with attaching(model) as attachment:
        for name, module, why in _candidates(model, config):
            if why is not None:
                left[name] = why
                continue
            for param_name, param in list(module.named_parameters(recurse=False)):
                attachment.transaction.set(module._parameters, param_name, _shard(param, mesh))
            settings = ClaimPolicy(policy.param_dtype, policy.reduce_dtype, keep_after_forward=not reshard_after_forward)
            layer = layers[name] = ClaimedLayer(module, mesh, settings)
            attachment.transaction.set(vars(module), CLAIM, layer)
            serve(attachment.transaction, module, Service(module, plain(layer), layer.slots(name)))
    return Claimed(layers, left)


def claimed_layer(module: nn.Module) -> ClaimedLayer | None:
    found = vars(module).get(CLAIM)
    return found if found is not None and found._module() is module else None


def follow(model: nn.Module) -> None:
    """From now on FSDP2's setters, called on any module of `model`, reach the claimed layers too."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and not isinstance(module, Following) and any(map(claimed_layer, module.modules())):
            module.__class__ = _following(type(module))


class Following:
    """First base of the class of an FSDP2 module with claimed layers in it. The class looks them up in the module that is
    asked, so a copy never sets those of the original."""


_FOLLOWING: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()


def _following(kind: type) -> type:
    found = _FOLLOWING.get(kind)
    if found is not None:
        return found

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return kind.__new__(kind, *args, **kwargs)  # which counts the classes up to the one that it makes objects of

    body: dict[str, Any] = {"__new__": new, "__module__": kind.__module__}
    body.update((setter, _reaching(kind, setter)) for setter in _SETTERS)
    made = _FOLLOWING[kind] = type(kind.__name__, (Following, kind), body)
    return made


def _reaching(kind: type, setter: str) -> Callable[..., None]:
    stock = getattr(kind, setter)

    @functools.wraps(stock)
    def set_both(self: nn.Module, value: Any, **options: Any) -> None:
        stock(self, value, **options)
        recurse = setter != "set_gradient_divide_factor" and options.get("recurse", True)
        holder_of = holders(self)
        for module in self.modules():
            layer = claimed_layer(module)
            if layer is not None and (recurse or holder_of[id(module)] is self):
                for field, setting in _SETTERS[setter](value).items():
                    setattr(layer.policy, field, setting)

    return set_both


def read_whole(transaction: Transaction, model: nn.Module) -> dict[int, Scope]:
    """id(claimed module) -> when it is read as whole parameters: in the forward of the module whose group it would be in."""
    scopes: dict[int, Scope] = {}
    found: dict[int, Scope] = {}
    holder_of = holders(model)
    for module in model.modules():
        holder = holder_of.get(id(module)) if claimed_layer(module) is not None else None
        if holder is None:
            continue
        if id(holder) not in scopes:
            depth = [0]
            scope = scopes[id(holder)] = Scope(lambda depth=depth: depth[0] > 0)  # type: ignore[misc]
            enter, leave = _Count(holder, scope, depth, 1), _Count(holder, scope, depth, -1)
            for register in (
                functools.partial(holder.register_forward_pre_hook, enter, prepend=True),
                functools.partial(holder.register_forward_hook, leave, prepend=True, always_call=True),
            ):
                transaction.acquire(register, RemovableHandle.remove)
        found[id(module)] = scopes[id(holder)]
    return found


class _Count(Hook):
    """How many forwards of `holder` are under way."""

    def __init__(self, holder: nn.Module, scope: Scope, depth: list[int], change: int) -> None:
        self._holder = weakref.ref(holder)
        self._scope, self._depth, self._change = scope, depth, change
        self._outside_graphs = torch.compiler.disable(self._run)  # now, as it imports the compiler

    def __call__(self, module: nn.Module, *_: Any) -> None:
        self._outside_graphs(module)

    def _run(self, module: nn.Module) -> None:
        if self._holder() is module:
            # Not below 0: a forward that a hook before this one refuses is left without having been entered.
            self._depth[0] = max(0, self._depth[0] + self._change)
            if not self._depth[0]:
                self._scope.close()


def holders(model: nn.Module) -> dict[int, nn.Module]:
    """id(module) -> the nearest FSDP2 module around it, or itself: whose parameter group its parameters are in."""
    out: dict[int, nn.Module] = {}
    for module in model.modules():  # parents before children
        if isinstance(module, FSDPModule):
            out[id(module)] = module
        for child in module.children():
            if id(module) in out:
                out.setdefault(id(child), out[id(module)])
    return out


def _candidates(model: nn.Module, config: CommFuseConfig) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Every module with parameters of its own, and why it cannot be claimed (None: it can)."""
    parents = {id(child): module for module in model.modules() for child in module.children()}
    uses = Counter(id(param) for module in model.modules() for param in vars(module)["_parameters"].values())
    off = "enabled=False" if not config.enabled else "fuse='never'" if config.fuse == "never" else None
    for name, module in list(model.named_modules()):
        params = dict(module.named_parameters(recurse=False))
        if not params:
            continue
        why = off or module_obstacle(name, module, parents.get(id(module)), config)
        for param_name, param in params.items():
            if why is None and uses[id(param)] > 1:
                why = f"tied: {param_name} is shared by {uses[id(param)]} modules"
            if why is None and isinstance(param, DTensor):
                why = "also sharded by another parallelism (a DTensor before claim)"
            why = why or tensor_obstacle(param.data)
        yield name, module, why


def _checked(mesh: DeviceMesh | None) -> DeviceMesh:
    if mesh is None:
        if not dist.is_initialized():
            raise ConfigError("commfuse_dp.claim() needs a process group: call torch.distributed.init_process_group() first")
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return init_device_mesh(accelerator.type if accelerator is not None else "cpu", (dist.get_world_size(),))
    if mesh.ndim not in (1, 2):
        raise ConfigError(f"claim() got a mesh of {mesh.ndim} dimensions; allowed are 1 (sharded) and 2 (replicated, sharded)")
    return mesh


def _shard(param: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's rows of `param` (FSDP2's chunk rule) in memory of their own, as a DTensor parameter."""
    start, stop = chunk_bounds(param.shape[0], mesh.size(mesh.ndim - 1))[mesh.get_local_rank(mesh.ndim - 1)]
    whole = param.detach()
    rows = whole[start:stop].clone(memory_format=torch.contiguous_format)
    if not rows.is_meta:
        device = mesh.device_type
        rows = rows.to(device if device == "cpu" else torch.device(device, torch.accelerator.current_device_index()))
    return nn.Parameter(_sharded(rows, mesh, whole), requires_grad=param.requires_grad)


def _sharded(rows: torch.Tensor, mesh: DeviceMesh, whole: torch.Tensor) -> DTensor:
    """The DTensor of the shape of `whole` of which this rank has `rows`."""
    placements = (Shard(0),) if mesh.ndim == 1 else (Replicate(), Shard(0))
    stride = (whole.shape[1:].numel(), *(whole.shape[n + 1 :].numel() for n in range(1, whole.dim())))
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=whole.shape, stride=stride)


__all__ = [
    "ClaimPolicy",
    "Claimed",
    "ClaimedLayer",
    "ClaimedParameter",
    "claim",
    "claimed_layer",
    "follow",
    "holders",
    "read_whole",
]
