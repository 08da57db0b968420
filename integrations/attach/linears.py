"""Which modules compute a linear, found by what they compute.

`linear_form(module)` tries the forward of the module's class on a stand-in with a tiny weight of its own, and compares it with
torch's linear: values, dtypes, gradients, refusals, with and without autocast. It never touches the module's parameters, which
may be sharded, on another device or on none.

| record | weight | computes |
| --- | --- | --- |
| nn.Linear and its subclasses | [out, in] | y = x @ W.T + b |
| Conv1D of Hugging Face and its subclasses (if transformers is loaded) | [in, out] | y = x @ W + b |

[Note: What a trial cannot see]
A forward that agrees once may differ later, if it depends on what may change: a scale, a flag, an adapter. So the stand-in
answers for the weight, the bias and their sizes only. Whatever else the forward reads from its module, writes to it, or reads
from its surroundings (global variables that are no modules, classes or functions; variables of an enclosing function) makes
the class no linear, whatever it computed. Since nothing else enters, the verdict holds for every module of the class that has
a bias, or for every one that has none.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class LinearForm(NamedTuple):
    transposed: bool  # the weight is [in, out]
    autocast: bool = True  # under autocast, too, it computes what torch's linear does
    argument: str = "input"  # name of its forward's only argument


class _Record(NamedTuple):
    module: str  # where the class is, if that has been imported
    name: str
    transposed: bool
    sizes: tuple[str, str]  # attributes: input and output features


_RECORDS = (
    _Record("torch.nn", "Linear", False, ("in_features", "out_features")),
    _Record("transformers.pytorch_utils", "Conv1D", True, ("nx", "nf")),
)
_IN, _OUT = 2, 3
_MACHINERY = {"__dict__", "__class__", "_parameters", "_buffers", "_modules", "weight", "bias"}


class _Input(NamedTuple):
    shape: tuple[int, ...]
    scale: float  # a forward that clips shows it
    x_dtype: torch.dtype
    dtype: torch.dtype  # of weight and bias
    tolerance: float  # largest error, relative to the largest value; the bias may be added after a rounding


_64, _32, _B16, _F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
_INPUTS = (
    *(_Input(shape, 1.0, _64, _64, 1e-12) for shape in ((5, _IN), (2, 3, _IN), (_IN,), (0, _IN))),
    *(_Input((5, _IN), scale, _64, _64, 1e-12) for scale in (3e3, 1e-3)),
    _Input((5, _IN), 1.0, _32, _32, 1e-5),
    _Input((5, _IN), 1.0, _B16, _B16, 2.0**-6),
    _Input((5, _IN), 1.0, _F16, _F16, 2.0**-9),
    _Input((5, _IN), 1.0, _32, _B16, 0.0),  # refused by torch
    _Input((5, _IN), 1.0, _B16, _32, 0.0),  # likewise
)
_AUTOCAST = _Input((2, 3, _IN), 1.0, _32, _32, 2.0**-6)

_verdicts: weakref.WeakKeyDictionary[type, dict[bool, tuple[weakref.ref[Any], LinearForm | str]]] = weakref.WeakKeyDictionary()


def looks_linear(kind: type) -> bool:
    """Whether a class is a linear, or is derived from one; what its forward computes is another question."""
    return _record(kind) is not None


def linear_form(module: nn.Module, kind: type[nn.Module] | None = None) -> LinearForm | None:
    """What a module computes, if it is a linear of a kind that the ops know.

    kind: the module's class, where frameworks have put others on top of it."""
    verdict = _examine(module, kind or type(module))
    return verdict if isinstance(verdict, LinearForm) else None


def own_forward(kind: type[nn.Module]) -> Callable[[nn.Module, Sequence[torch.Tensor], torch.Tensor], torch.Tensor]:
    """f(module, params, input): what a linear's own forward computes with the whole weight (and bias).

    kind: as for `linear_form`. To be called while attaching: it imports the compiler, which no import of this package may."""

    def compute(module: nn.Module, params: Sequence[torch.Tensor], input: torch.Tensor) -> torch.Tensor:
        twin: nn.Module = kind.__new__(kind)
        vars(twin).update(vars(module), _parameters=dict(zip(("weight", "bias"), (*params, None), strict=False)))
        return kind.forward(twin, input)

    return torch.compiler.disable(compute)


def linear_obstacle(module: nn.Module, kind: type[nn.Module] | None = None) -> str | None:
    """Why a module that looks like a linear is none; None: it is one, or does not look like one."""
    verdict = _examine(module, kind or type(module))
    return verdict if isinstance(verdict, str) else None


def _examine(module: nn.Module, kind: type[nn.Module]) -> LinearForm | str | None:
    record = _record(kind)
    if record is None:
        return None
    members = vars(module)
    parts = [name for name, part in (*members["_modules"].items(), *members["_buffers"].items()) if part is not None]
    if parts:
        return f"this {kind.__name__} has more than its weight and bias: {', '.join(parts)}"
    biased = members["_parameters"].get("bias") is not None
    known = _verdicts.setdefault(kind, {}).get(biased)
    if known is not None and known[0]() is kind.forward:  # else the class has got another forward since
        return known[1]
    verdict = _try(kind, record, biased)
    if isinstance(kind.forward, FunctionType):
        _verdicts[kind][biased] = weakref.ref(kind.forward), verdict
    return verdict


def _record(kind: type) -> _Record | None:
    for record in _RECORDS:
        known = getattr(sys.modules.get(record.module), record.name, None)
        if isinstance(known, type) and issubclass(kind, known):
            return record
    return None


# ---- what a forward depends on ---------------------------------------------------------------------------------------
def _surroundings(kind: type) -> str | None:
    """What a class's forwards read beside their arguments, if it is anything that may change."""
    for owner in kind.__mro__:
        forward = vars(owner).get("forward")
        if forward is None or owner is nn.Module:
            continue
        if not isinstance(forward, FunctionType):
            return "is no plain function"
        code = forward.__code__
        if (code.co_argcount, code.co_kwonlyargcount) != (2, 0) or code.co_flags & (
            inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
        ):
            return "takes more than one input"
        found = _unsteady(forward, forward.__code__)
        if found is not None:
            return found
    return None


def _unsteady(function: FunctionType, code: CodeType) -> str | None:
    free = [name for name in code.co_freevars if name != "__class__"]
    if free:
        return f"uses {free[0]!r} of an enclosing function"
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            return f"changes the global {step.argval!r}"
        if step.opname == "LOAD_GLOBAL":
            value = function.__globals__.get(step.argval, getattr(builtins, step.argval, None))
            if not isinstance(value, (ModuleType, FunctionType, BuiltinFunctionType, type)):
                return f"reads the global {step.argval!r}"
        if isinstance(step.argval, CodeType):
            found = _unsteady(function, step.argval)
            if found is not None:
                return found
    return None


class _Touched(AttributeError):
    """The forward wanted more from its module than a linear's."""


def _stand_in(kind: type[nn.Module], record: _Record, touched: list[str]) -> nn.Module:
    """An object of the class that answers for its parameters and their sizes only, and notes what else it was asked for."""
    allowed = _MACHINERY | set(record.sizes)

    def read(self: nn.Module, name: str) -> Any:
        if name not in allowed:
            touched.append(f"reads {name!r}")
            raise _Touched(name)
        return object.__getattribute__(self, name)

    def write(self: nn.Module, name: str, value: Any) -> None:
        touched.append(f"changes {name!r}")
        raise _Touched(name)

    members = {"__getattribute__": read, "__setattr__": write, "__module__": kind.__module__}
    twin_type: Any = type(kind.__name__, (kind,), members)
    twin: nn.Module = twin_type.__new__(twin_type)
    object.__getattribute__(twin, "__dict__").update(
        _parameters={}, _buffers={}, _modules={}, **dict(zip(record.sizes, (_IN, _OUT), strict=True))
    )
    return twin


# ---- the trial -------------------------------------------------------------------------------------------------------
@contextmanager
def _by_itself() -> Iterator[None]:
    """Whatever is going on around the trial does not enter it, nor the other way round."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        yield


def _try(kind: type[nn.Module], record: _Record, biased: bool) -> LinearForm | str:
    why = _surroundings(kind)
    if why is not None:
        return f"the forward of {kind.__name__} {why}: it may come to be more than a linear's"
    with _by_itself():
        for given in _INPUTS:
            why = _differs(kind, record, biased, given)
            if why is not None:
                return f"the forward of {kind.__name__} {why}"
        with torch.autocast("cpu", dtype=torch.bfloat16):
            autocast = _differs(kind, record, biased, _AUTOCAST) is None
    return LinearForm(record.transposed, autocast, kind.forward.__code__.co_varnames[1])


def _differs(kind: type[nn.Module], record: _Record, biased: bool, given: _Input) -> str | None:
    """How the class differs from a linear on one input (None: it does not)."""
    touched: list[str] = []
    twin = _stand_in(kind, record, touched)

    def own(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        twin._parameters.update(weight=weight, bias=bias)  # type: ignore[call-overload]
        return kind.forward(twin, x)

    def wanted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, weight.t() if record.transposed else weight, bias)

    shape = (_IN, _OUT) if record.transposed else (_OUT, _IN)
    operands = [_numbers(given.shape, given.scale, given.x_dtype, 1), _numbers(shape, 1.0, given.dtype, 2)]
    if biased:
        operands.append(_numbers((_OUT,), 1.0, given.dtype, 3))
    found, expected = _run(own, operands), _run(wanted, operands)
    if touched:
        return f"{touched[0]} of its module: more than a linear's"
    if (found is None) != (expected is None):
        refuses, computes = ("it", "a linear") if found is None else ("a linear", "it")
        return f"is not a linear's: with {given.x_dtype} times {given.dtype} {refuses} fails, {computes} does not"
    for mine, other in zip(found or (), expected or (), strict=False):
        if not isinstance(mine, torch.Tensor) or (mine.dtype, mine.shape) != (other.dtype, other.shape):
            return "does not give what a linear gives"
        if other.numel() and not (mine - other).abs().max() <= given.tolerance * other.abs().max():
            return "does not compute a linear"
    return None


def _run(function: Callable[..., Any], operands: list[torch.Tensor]) -> tuple[Any, ...] | None:
    """Output, the output without gradients, gradients; None: it raised."""
    leaves = [operand.clone().requires_grad_() for operand in operands]
    try:
        out = function(*leaves)
        if not isinstance(out, torch.Tensor):
            return (out,)
        with torch.no_grad():
            again = function(*leaves)
        grads = torch.autograd.grad(out, leaves, _numbers(tuple(out.shape), 1.0, out.dtype, 4))
    except Exception:
        return None
    return (out.detach(), again, *grads)


def _numbers(shape: tuple[int, ...], scale: float, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Irregular numbers of both signs, up to `scale`."""
    count = torch.Size(shape).numel()
    return (
        (torch.sin(torch.arange(1, count + 1, dtype=torch.float64, device="cpu") * 7.31 + seed) * scale).to(dtype).view(shape)
    )
