"""A module's parameter as the engine sees it, held by weak references: see [Note: Who holds whom] in __init__.py."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod

import torch
from torch import nn

from commfuse_dp.errors import CommFuseError
from commfuse_dp.ops.on_demand import standing_for

KNOWN = "_commfuse_known"  # in the dictionary of a served module: the parameters that its slots know
HELD = "_commfuse_held"  # in the same dictionary, while the module is served: its dictionary of parameters once more
_PUBLISHED = "published "  # before the name of a parameter, in the same dictionary


def parameters_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """What a module really holds, also where `module._parameters` answers readers with something else: see reads.py."""
    if torch.compiler.is_compiling() and HELD in module.__dict__:
        # torch 2.11's Dynamo takes __dict__["_parameters"] for the attribute, and so for the property that calls us.
        found: dict[str, torch.Tensor | None] = module.__dict__[HELD]
        return found
    found = module.__dict__["_parameters"]
    return found


def hold_parameters(module: nn.Module, parameters: dict[str, torch.Tensor | None]) -> None:
    """From now on `parameters` is what the module really holds."""
    module.__dict__["_parameters"] = parameters
    if HELD in module.__dict__:
        module.__dict__[HELD] = parameters


def held(module: nn.Module, name: str) -> torch.Tensor | None:
    """What a module really holds under `name`."""
    return parameters_of(module).get(name)


class ModuleSlot(ABC):
    """A `ParamSlot` (engine/plan.py) that looks its parameter up anew at each use: conversions and checkpoints replace it.

    A parameter that does not `fit` (a whole tensor that `torch.func.functional_call` has put there for the length of a call,
    say) is not taken: the module's own forward computes with it, and the engine goes on with the last one that fitted.

    [Note: No weak references to parameters]
    `Module.to` and `Module.to_empty` swap a parameter's contents for new ones, which torch refuses for a tensor that anything
    refers to weakly. And a strong reference from here would keep alive whatever a gradient hook of the parameter refers to.
    So parameters are remembered in the dictionary of their own module, under `KNOWN`, from when it is served.
    """

    def __init__(self, name: str, module: nn.Module, param_name: str) -> None:
        self.name = name
        self.param_name = param_name
        self._module = weakref.ref(module)
        self.shape = tuple(self.parameter.shape)

    @abstractmethod
    def fits(self, param: torch.Tensor) -> bool:
        """Whether this is a parameter sharded as the engine expects it."""

    @abstractmethod
    def local_of(self, param: torch.Tensor) -> torch.Tensor:
        """This rank's part of it: the same memory, no autograd."""

    @abstractmethod
    def deliver_to(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Set or accumulate the gradient of this rank's part, and run the parameter's gradient hooks."""

    def holds_known(self, module: nn.Module) -> bool:
        """Whether `module` holds a parameter of ours under this name."""
        if torch.compiler.is_compiling():  # in a graph: no state of ours, whose changes would be part of the graph
            param = held(module, self.param_name)
            return param is not None and self.fits(param)
        own = module.__dict__  # every layer asks in every pass: `held` would be two frames more
        param, known = own["_parameters"].get(self.param_name), own.get(KNOWN)
        if known is not None and param is known.get(self.param_name):
            return param is not None
        param = self._put_back(module, param)
        if param is None or not self.fits(param):
            return False
        if known is not None:
            known[self.param_name] = param
            self.replaced = known.get(_PUBLISHED + self.param_name, param) is not param
        return True

    def _put_back(self, module: nn.Module, param: torch.Tensor | None) -> torch.Tensor | None:
        """What was read as a whole parameter, and was written to the module after the framework had sharded again
        (`functional_call` takes parameters away and brings them back), stays the framework's own."""
        own: torch.Tensor | None = standing_for(param)
        if own is not param:
            parameters_of(module)[self.param_name] = own
        return own

    @property
    def parameter(self) -> nn.Parameter:
        """The module's own, or the last one that fitted. Raises CommFuseError if neither exists."""
        module = self._module()
        if module is not None:
            own = module.__dict__  # not `held`, as in `holds_known`: no graph asks for this
            param, known = own["_parameters"].get(self.param_name), own.get(KNOWN)
            if param is not None and known is not None and param is known.get(self.param_name):
                return param  # type: ignore[return-value]
            if self.holds_known(module):
                return held(module, self.param_name)  # type: ignore[return-value]
        last = module.__dict__.get(KNOWN, {}).get(self.param_name) if module is not None else None
        if last is None:
            raise CommFuseError(
                f"parameter {self.name!r} has gone, or is sharded in another way than when CommFuse was switched on. Call "
                "commfuse_dp.remove(model) before such a change and apply() again afterwards."
            )
        return last  # type: ignore[return-value]

    def published(self) -> bool:
        module = self._module()
        if module is None or KNOWN not in module.__dict__:
            return False
        known, key, param = module.__dict__[KNOWN], _PUBLISHED + self.param_name, self.parameter
        other = known.get(key, param) is not param
        known[key], self.replaced = param, False
        return other

    def local(self) -> torch.Tensor:
        return self.local_of(self.parameter)

    def wants(self) -> tuple[bool, torch.dtype]:
        param = self.parameter
        return param.requires_grad, param.dtype

    keeps_delivered = True  # it becomes .grad
    replaced = False

    def deliver(self, grad: torch.Tensor) -> None:
        """To the parameter that was published, which `functional_call` may have taken away since."""
        module = self._module()
        known = module.__dict__.get(KNOWN) if module is not None else None
        param = known.get(_PUBLISHED + self.param_name) if known is not None else None
        self.deliver_to(param if param is not None else self.parameter, grad)
