"""The gathered input of a module, before it is gathered.

attention(x)    its pre-hook hands on a `StandIn` of shape [B, S, D] in place of the gathered x
  wq(x)         the first member of the group that gets it computes all of them, slice by slice as x arrives
  wk(x), wv(x)  fetch their outputs
  x.shape       answered at once
  x * 2         any other operation: x is gathered, as the framework would have done
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only


class StandIn(torch.Tensor):
    """A tensor without memory. Autograd does not see it: what is computed from it goes through `whole()`, or through its
    group, whose outputs lie here until the members fetch them."""

    local: torch.Tensor
    group: Any  # whose layers compute from it; None: any that is served may
    sizes: tuple[int, ...]  # positions of every rank
    outputs: dict[int, torch.Tensor] | None  # id(member) -> its output; None: nothing has been computed
    _whole: torch.Tensor | None
    _gather: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(cls, local: torch.Tensor, shape: tuple[int, ...], gather: Callable[[], torch.Tensor]) -> StandIn:
        """local: this rank's shard, with its part in the graph. gather(): the whole, as the framework makes it."""
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        self.local, self._gather, self._whole, self.outputs, self.group = local, gather, None, None, None
        if local.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                self.register_hook(_lost)
        return self

    def __init__(self, *_: Any) -> None:
        pass

    def whole(self) -> torch.Tensor:
        """Gathers, once."""
        if self._whole is None:
            self._whole = self._gather()
        return self._whole

    def made_by_autograd(self) -> bool:
        """Whether a function of autograd has put it into the graph itself, where no gradient gets through."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn is not None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"<input {tuple(self.shape)}, {self.dtype}, device={self.device}; CommFuse gathers it when an operation reads it>"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.whole().detach().clone())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _KIND_ONLY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.Tensor.__getitem__ and _takes_all(*args):
            return args[0]
        args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        raise RuntimeError(
            f"{func} was called below autograd with an input that CommFuse gathers on demand, so its gradient would be lost. "
            "Pass a copy (x.clone()) to this function, or leave the layers to the framework with CommFuseConfig(exclude=[...])."
        )


def _takes_all(tensor: torch.Tensor, index: Any) -> bool:
    """x[:, 0:, :] and the like, which are x."""
    places = index if isinstance(index, tuple) else (index,)
    if not isinstance(tensor, StandIn) or len(places) > tensor.dim():
        return False
    sizes = zip(places, tensor.shape, strict=False)
    return all(isinstance(place, slice) and place.indices(size) == (0, size, 1) for place, size in sizes)


def _lost(grad: torch.Tensor) -> NoReturn:
    raise RuntimeError(
        "a gradient arrived at an input that CommFuse gathers on demand, behind its back (a custom autograd.Function took it, "
        "say, or a full backward hook of a module that is given it). Pass a copy (x.clone()) to this function, or leave the "
        "layers to the framework with CommFuseConfig(exclude=[...])."
    )


def _get(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


_KIND_ONLY = {
    *map(_get, ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cpu", "is_cuda", "is_meta")),
    *map(_get, ("is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes")),
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.__len__, torch.Tensor.nelement),
    *(torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.get_device, torch.Tensor.element_size),
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.Tensor.stride, torch.Tensor.is_contiguous),
}
