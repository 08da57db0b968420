"""How a served module computes: its class is a subclass of its own, which looks up in the module what serves it.

[Note: Copies]
A forward that is kept in the instance's dictionary is copied by reference: the copy would compute with the original's weights.
So a served module changes its class (as `fully_shard` and `torch.nn.utils.parametrize` do), and what serves it lies in the
instance's dictionary. Copies (copy.copy, copy.deepcopy, AveragedModel) and pickles (torch.save) are objects of the
original class without it. What copies in another way (an object made of the same `__dict__`, say) has a `Service` that knows
another module; and where a module holds a parameter that is not ours (`torch.func.functional_call`), nothing of ours computes
either. In each case the class's own forward does.
"""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from commfuse_dp.integrations.attach.linears import own_forward
from commfuse_dp.integrations.attach.reads import Reads, properties
from commfuse_dp.integrations.attach.slots import HELD, KNOWN, ModuleSlot
from commfuse_dp.integrations.attach.transaction import Transaction
from torch import nn

SERVICE = "_commfuse"  # in the dictionary of a served module
ATTACHMENT = "_commfuse_attachment"  # in that of the object that CommFuse is on for
TENSOR_ATTACHMENT = "_commfuse_tensor_attachment"  # likewise, for tensor parallelism
CLAIM = "_commfuse_claim"  # in that of a claimed module
OURS = (SERVICE, ATTACHMENT, TENSOR_ATTACHMENT, CLAIM, KNOWN, HELD)

Compute = Callable[..., torch.Tensor]  # (module, *inputs of its forward) -> output


def nothing(*args: Any) -> None:
    """What copies and pickles have in place of an object of ours."""


def _inert() -> Callable[..., None]:
    return nothing


class Hook:
    """Base of hooks of ours: copies and pickles of a module have one that does nothing."""

    def __deepcopy__(self, memo: Any) -> Any:
        return nothing

    def __reduce__(self) -> Any:
        return _inert, ()


_NEW_OBJECT = copyreg.__newobj__  # type: ignore[attr-defined]


class Service:
    """What one module is served with."""

    __slots__ = ("__weakref__", "_module", "compute", "reads", "slots")

    def __init__(
        self, module: nn.Module, compute: Compute, slots: Sequence[ModuleSlot] = (), reads: Reads | None = None
    ) -> None:
        """reads: what readers of the module's parameters get; None: what it holds."""
        self._module = weakref.ref(module)
        self.compute = compute
        self.slots = tuple(slots)
        self.reads = reads

    def serves(self, module: nn.Module) -> bool:
        """Whether `module` is the one that this was made for, and holds its own parameters."""
        if self._module() is not module:
            return False
        # Not all(...): the generator's frames would come on top of every call of a layer.
        for slot in self.slots:  # noqa: SIM110
            if not slot.holds_known(module):
                return False
        return True

    def open_reads(self, module: nn.Module) -> Reads | None:
        """`reads`, while the framework would have whole parameters in `module`."""
        reads = self.reads
        return reads if reads is not None and reads.scope.unsharded() and self._module() is module else None

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return nothing, ()


class Served:
    """First base of every class that a served module is given."""

    _commfuse_class: type[nn.Module]  # the class that the module had before


_CLASSES: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()


def served_class(kind: type) -> type:
    """The subclass of `kind` whose instances may be served; one for each class."""
    if issubclass(kind, Served):
        return kind
    found = _CLASSES.get(kind)
    if found is None:
        found = _CLASSES[kind] = _make(kind)
    return found


def _make(kind: type) -> type:
    stock: Callable[..., Any] = kind.forward  # type: ignore[attr-defined]

    @functools.wraps(stock)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        service = self.__dict__.get(SERVICE)
        if service is None or not service.serves(self):
            return stock(self, *args, **kwargs)
        return service.compute(self, *args, **kwargs)

    reduce: Callable[..., Any] = kind.__reduce_ex__

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        reduced = reduce(self, protocol)
        if isinstance(reduced, str):
            return reduced
        make, args, *rest = reduced
        if rest and isinstance(rest[0], dict):
            rest[0] = {key: value for key, value in rest[0].items() if key not in OURS}
        if make is _NEW_OBJECT and args[0] is made:  # a partial: pickle insists that this function makes what is pickled
            return (functools.partial(make, kind), args[1:], *rest)
        return (make, tuple(kind if arg is made else arg for arg in args), *rest)

    body = {"forward": forward, "__reduce_ex__": __reduce_ex__, "_commfuse_class": kind, "__module__": kind.__module__}
    body.update(properties(kind, _open_reads))
    made: type = type(f"CommFuse{kind.__name__}", (Served, kind), body)
    return made


def _open_reads(module: nn.Module) -> Reads | None:
    service = module.__dict__.get(SERVICE)
    return service.open_reads(module) if service is not None else None


def own_class(module: nn.Module) -> type:
    """The module's class without what CommFuse has put on top of it."""
    kind = type(module)
    return kind._commfuse_class if issubclass(kind, Served) else kind


def serve(transaction: Transaction, module: nn.Module, service: Service) -> None:
    """From now on `module` computes by `service`; whatever served it before comes back with the undo."""
    transaction.set(vars(module), KNOWN, {})
    transaction.set(vars(module), SERVICE, service)
    transaction.set(vars(module), HELD, vars(module)["_parameters"])
    kind = served_class(type(module))
    if kind is not type(module):
        transaction.set_class(module, kind)


def whole_function(kind: type[nn.Module]) -> Callable[[Any, torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]:
    """f(module, input, params): what a module of class `kind` computes with its whole weight (and bias, if there are two)."""
    if kind is nn.Linear:
        return lambda module, input, params: F.linear(input, *params)
    if issubclass(kind, nn.LayerNorm):
        return lambda module, input, params: F.layer_norm(
            input, module.normalized_shape, params[0], params[1] if len(params) > 1 else None, module.eps
        )
    if issubclass(kind, nn.RMSNorm):
        return lambda module, input, params: F.rms_norm(input, module.normalized_shape, params[0], module.eps)
    if issubclass(kind, nn.Embedding):
        return lambda module, input, params: F.embedding(
            input, params[0], module.padding_idx, scale_grad_by_freq=module.scale_grad_by_freq
        )
    own = own_forward(kind)
    return lambda module, input, params: own(module, params, input)
