"""Parameters that somebody reads without calling their layer: tensors without memory, gathered when a value is asked for.

| what is asked for | answer |
| --- | --- |
| dtype, shape, device, requires_grad, stride, size(), numel(), is_*() | at once, no communication |
| a value, by any operation | all parameters of the unit are gathered; those read in the same forward share it |
| the gradient | autograd adds up what all operations bring, and the unit's owners get the sum once |

The layer's own call goes on as if nobody had read: this is one more call of its unit, with a gather and an exchange of its own.

[Note: Operations below autograd]
`OnDemandTensor` puts the gathered values in below autograd (`__torch_dispatch__`). Autograd itself sees, records and saves the
tensor without memory. So the values can be given up when the framework reshards, and are gathered anew if the backward asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch.utils._pytree import tree_map_only

from commfuse_dp.ops.gathered import GatheredOperand, gather_backward, gather_forward
from commfuse_dp.ops.operands import Visit, check_same_parameters

aten = torch.ops.aten

View = Callable[[torch.Tensor], torch.Tensor]


class ReadOperand(GatheredOperand, Protocol):
    """A unit's parameters, as far as they are read on demand."""

    def read(self, consume: Visit) -> None:
        """As `gather`, but holds nothing for the layer's own backward."""

    def expect_more(self) -> None:
        """Autograd records what was read: one more `exchange` will come. After the `read`."""

    @property
    def version(self) -> int:
        """Changes whenever the published values may have changed."""


class Source(Protocol):
    """The framework's own, sharded parameter."""

    name: str

    @property
    def parameter(self) -> torch.Tensor: ...


class Reading:
    """All parameters of one unit as they are read in one forward: gathered together, at most once until `release`."""

    def __init__(
        self, operand: ReadOperand, sources: Sequence[Source], gathered: Callable[[Reading], None] = lambda reading: None
    ) -> None:
        """sources: the parameters, in the order of `operand.shapes`. gathered: told after every gather."""
        self.operand = operand
        self.anchor = operand.anchor  # of the parameters that are read
        self.sources = tuple(sources)
        self.stored = tuple(source.parameter for source in sources)  # what the tensors stand for
        self._gathered = gathered
        self._wholes: list[torch.Tensor] | None = None
        self._expected = False

    def tensors(self) -> tuple[OnDemandTensor, ...]:
        """The parameters, [rows, *rest] each, in the compute dtype; parts of one graph, whatever mode the caller is in."""
        with torch.inference_mode(False), torch.enable_grad():
            return _Read.apply(self.operand.anchor, self) if any(self.operand.trainable) else self.wrap()

    def wrap(self) -> tuple[OnDemandTensor, ...]:
        dtype = self.operand.compute_dtype
        whole = [torch.empty(shape, dtype=dtype, device="meta") for shape in self.operand.shapes]
        return tuple(OnDemandTensor(self, part, like) for part, like in enumerate(whole))

    def whole(self, part: int) -> torch.Tensor:
        """The values. Gathers, if they are not here."""
        if self._wholes is None:
            check_same_parameters(self.operand, self.anchor)
            with torch.inference_mode(False), torch.no_grad():
                self._wholes = gather_forward(self.operand, self.operand.read)
            self._gathered(self)
        return self._wholes[part]

    def expect_backward(self) -> None:
        """Autograd records an operation on one of the parameters: a gradient may come."""
        if not self._expected:
            self._expected = True
            self.operand.expect_more()

    def release(self) -> None:
        """Give up the values. They come back if somebody asks for them."""
        self._wholes = None


class OnDemandTensor(torch.Tensor):
    """One whole parameter of a unit, without memory of its own. See the table above.

    To the user it is what the framework would put there, a leaf `nn.Parameter`; to autograd it is not a leaf.
    """

    _reading: Reading
    _part: int
    _views: tuple[View, ...]  # from the whole parameter to this tensor
    _is_param: bool  # asked for by isinstance(tensor, nn.Parameter)

    @staticmethod
    def __new__(cls, reading: Reading, part: int, like: torch.Tensor, views: tuple[View, ...] | None = None) -> OnDemandTensor:
        """like: a meta tensor of the same kind. views: None for the parameter itself."""
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=reading.operand.anchor.device,
        )
        self._reading, self._part, self._views, self._is_param = reading, part, views or (), views is None
        return self

    def __init__(self, *_: Any) -> None:
        pass

    @property
    def stands_for(self) -> torch.Tensor:
        """The framework's sharded parameter."""
        return self._reading.stored[self._part]

    @property
    def parameter_name(self) -> str:
        return self._reading.sources[self._part].name

    def values(self) -> torch.Tensor:
        value = self._reading.whole(self._part)
        for view in self._views:
            value = view(value)
        return value

    def viewed(self, view: View) -> OnDemandTensor:
        """A view of this tensor that has no memory either."""
        like = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        with torch.inference_mode(False):
            return OnDemandTensor(self._reading, self._part, view(like), (*self._views, view))

    # No values: printing on one rank must not wait for others.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = f"{tuple(self.shape)}, {self.dtype}, device={self.device}, requires_grad={self.requires_grad}"
        return f"<parameter {self.parameter_name!r}: {kind}; CommFuse gathers its values when an operation reads them>"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), _concrete(self, clone=True))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _concrete(self, clone=False).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        special = _SPECIAL.get(func)
        if special is not None:
            return special(func, *args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if _is_plain_view(func) and isinstance(args[0], cls):
            return args[0].viewed(lambda value: func(value, *args[1:], **kwargs))
        if func._schema.is_mutable:
            for written in _written(func, args, kwargs):
                refuse_write(str(func), written.parameter_name)
        values = _empty if func.overloadpacket in _ONLY_KIND else _whole
        return func(*tree_map_only(cls, values, args), **tree_map_only(cls, values, kwargs))


def _is_plain_view(func: Any) -> bool:
    """An operation of one tensor that gives one view of it."""
    returns = func._schema.returns
    return (func is aten.detach.default or func.is_view) and len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)


def _whole(tensor: OnDemandTensor) -> torch.Tensor:
    values = tensor.values()
    if tensor.requires_grad and torch.is_grad_enabled():
        tensor._reading.expect_backward()
    return values


def _empty(tensor: OnDemandTensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


_ONLY_KIND = {  # use an operand's shape, dtype and device only
    *(aten.new_empty, aten.new_empty_strided, aten.new_zeros, aten.new_ones, aten.new_full),
    *(aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like),
}


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[OnDemandTensor]:
    """The parameters that an operation writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name) if index >= len(args) else args[index]
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, OnDemandTensor):
                yield tensor


def refuse_write(what: str, name: str) -> NoReturn:
    layer = name.rpartition(".")[0] or name
    raise RuntimeError(
        f"parameter {name!r} was written to inside a forward ({what}). CommFuse gathers it slice by slice, so its own layer "
        f"would not see what was written. Write to the sharded parameter outside the forward, or leave the layer to the "
        f"framework with CommFuseConfig(exclude=[{layer!r}])."
    )


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, reading: Reading) -> tuple[OnDemandTensor, ...]:
        ctx.reading = reading
        ctx.set_materialize_grads(False)
        tensors = reading.wrap()
        trainable = reading.operand.trainable
        ctx.mark_non_differentiable(*[tensor for tensor, wanted in zip(tensors, trainable, strict=True) if not wanted])
        return tensors

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None]:
        operand = ctx.reading.operand
        check_same_parameters(operand, ctx.reading.anchor)
        device = operand.anchor.device
        whole = [
            torch.zeros(shape, dtype=operand.compute_dtype, device=device) if grad is None else grad
            for grad, shape in zip(grads, operand.shapes, strict=True)
        ]
        gather_backward(whole, operand)
        return None, None


# ---- what a leaf parameter answers, and what needs memory --------------------------------------------------------------
def _concrete(tensor: OnDemandTensor, *, clone: bool) -> torch.Tensor:
    """An ordinary leaf of the same values."""
    values = tensor.values()
    values = values.clone() if clone else values.detach()
    if tensor._is_param:
        return torch.nn.Parameter(values, requires_grad=tensor.requires_grad)
    return values


def _with_memory(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(tensor, OnDemandTensor):
        tensor = _concrete(tensor, clone=False)
    return func(tensor, *args, **kwargs)


def _constant(value: Any) -> Callable[..., Any]:
    return lambda func, tensor: value


def _set_requires_grad(func: Any, tensor: OnDemandTensor, requires_grad: bool = True) -> torch.Tensor | None:
    if tensor._is_param:
        tensor.stands_for.requires_grad_(requires_grad)  # from the next read on
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return func(tensor, requires_grad)


def _refused(func: Any, *args: Any, **kwargs: Any) -> NoReturn:
    tensors: list[OnDemandTensor] = []
    tree_map_only(OnDemandTensor, tensors.append, (args, kwargs))
    name = tensors[0].parameter_name
    layer = name.rpartition(".")[0] or name
    what = getattr(func, "__qualname__", str(func)).removeprefix("_C.TensorBase.").removesuffix(".__set__")
    raise RuntimeError(
        f"{what} cannot be used with parameter {name!r} inside a forward: CommFuse serves the parameter, and its layer's own "
        "gradient does not pass through autograd here. Use it with the sharded parameter outside the forward (hooks), or leave "
        f"the layer to the framework with CommFuseConfig(exclude=[{layer!r}])."
    )


def _set_grad(func: Any, tensor: OnDemandTensor, value: torch.Tensor | None) -> None:
    tensor.stands_for.grad = value


def _set_data(func: Any, tensor: OnDemandTensor, value: Any) -> NoReturn:
    refuse_write(".data = ...", tensor.parameter_name)


def _get(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


def _set(name: str) -> Any:
    return getattr(torch.Tensor, name).__set__


_SPECIAL: dict[Any, Callable[..., Any]] = {
    _get("is_leaf"): _constant(True),
    _get("grad_fn"): _constant(None),
    _get("grad"): lambda func, tensor: tensor.stands_for.grad if tensor._is_param else None,  # so that zero_grad() finds it
    torch.Tensor.retain_grad: _constant(None),
    torch.Tensor.requires_grad_: _set_requires_grad,
    _set("requires_grad"): _set_requires_grad,
    _set("data"): _set_data,
    _set("grad"): _set_grad,
    torch.Tensor.register_hook: _refused,
    torch.Tensor.register_post_accumulate_grad_hook: _refused,
    torch.autograd.grad: _refused,
}
for _name in ("data_ptr", "untyped_storage", "storage", "numpy", "tolist", "__array__", "__dlpack__", "share_memory_"):
    _SPECIAL[getattr(torch.Tensor, _name)] = _with_memory


_STANDS_FOR = "_commfuse_stands_for"  # an attribute of whole parameters in graphs


def stand_for(whole: torch.Tensor, stored: torch.Tensor | None) -> torch.Tensor:
    """In a graph, where a whole parameter is an ordinary tensor: one that says what it stands for."""
    seen = whole.view_as(whole)  # dynamo does not let attributes be set on what is an element of an op's list
    setattr(seen, _STANDS_FOR, stored)
    return seen


def standing_for(value: Any) -> Any:
    """The framework's parameter for what a read of it gave; anything else as it is."""
    if isinstance(value, OnDemandTensor):
        return value.stands_for if value._is_param else value
    return getattr(value, _STANDS_FOR, value)


__all__ = ["OnDemandTensor", "ReadOperand", "Reading", "Source", "stand_for", "standing_for"]
