"""What reading a served parameter gives: the framework's sharded one, or inside a forward the whole one, gathered on demand.

A framework that gathers before a forward and shards again behind it (FSDP2) puts whole parameters into its modules meanwhile.
Of a served module nothing is gathered: its own forward computes by slices. Who else reads `layer.weight`, `layer._parameters`,
`layer.parameters()` while the framework says "unsharded" gets `OnDemandTensor`s (ops/on_demand.py).

[Note: Properties of the class]
Served modules have a class of ours (forwards.py), and it catches the reads by properties: `weight`, `bias`, and `_parameters`,
which all of nn.Module's own ways go through. In the module's `__dict__` everything stays as it was, also the dictionary of
parameters: that is where writes go, and where CommFuse itself looks (slots.py). A subclass of dict in that place would not do:
torch.compile looks values up in it without calling its methods, and a compiled block would silently get the sharded ones.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from commfuse_dp.integrations.attach.slots import hold_parameters, parameters_of
from torch import nn

from commfuse_dp.ops.gathered import gather_parameters
from commfuse_dp.ops.on_demand import OnDemandTensor, Reading, ReadOperand, Source, stand_for, standing_for

log = logging.getLogger("commfuse_dp")

SERVED_NAMES = ("weight", "bias")  # of a served module's parameters: see rules.py


class Scope:
    """When the layers of one parameter group read whole parameters, and what was gathered for that."""

    def __init__(self, unsharded: Callable[[], bool]) -> None:
        """unsharded: whether the framework, if it served these layers, would have whole parameters in them now."""
        self.unsharded = unsharded
        self._gathered: list[Reading] = []

    def keep(self, reading: Reading) -> None:
        """Until `close`."""
        self._gathered.append(reading)

    def close(self) -> None:
        """The framework shards again: give up what was gathered."""
        if self._gathered:
            for reading in self._gathered:
                reading.release()
            self._gathered.clear()


class ReadLog:
    """Which layers were gathered for readers, and how often: each a cost beside the layer's own."""

    def __init__(self) -> None:
        self.gathers: Counter[str] = Counter()

    def note(self, layer: str) -> None:
        if not self.gathers:
            log.warning(
                "CommFuse: a parameter of %r is read inside a forward, but not by its layer. It is gathered whole for that, "
                "and its gradient is reduced, beside what the layer itself does. exclude=[%r] leaves the layer to the "
                "framework, which may be cheaper. print(report) lists all such layers.",
                layer,
                layer,
            )
        elif layer not in self.gathers:
            log.info("CommFuse: parameters of %r are gathered for reads beside their layer, too", layer)
        self.gathers[layer] += 1


class ServedSlot(Source, Protocol):
    param_name: str

    def holds_known(self, module: nn.Module) -> bool:
        """Whether `module` holds a parameter under this name that the slot stands for."""


class Reads:
    """What readers of one served module get."""

    def __init__(
        self,
        operand: ReadOperand,
        handle: int,
        slots: Sequence[ServedSlot],
        scope: Scope,
        told: ReadLog,
        wrap: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """operand, handle: of the module's unit; see `register_operand`. wrap(part, gathered): what the framework would put
        there, if that is not the gathered tensor itself."""
        self._wrap = wrap
        self.scope = scope
        self._operand = operand
        self._handle = handle
        self._slots = tuple(slots)
        self._parts = {slot.param_name: part for part, slot in enumerate(slots)}
        layer = slots[0].name.rpartition(".")[0] or slots[0].name

        # The tensors' graph refers to this, and no garbage collection looks into a graph: so neither to `self`, which has the
        # tensors, nor to the framework's model, which has `self`.
        reader = weakref.ref(scope)

        def gathered(reading: Reading) -> None:
            scope = reader()
            if scope is not None:
                scope.keep(reading)
            told.note(layer)

        self._gathered = gathered
        self._tensors: tuple[torch.Tensor, ...] = ()  # of one forward
        self._state: Any = None  # what these are up to date with

    def read(self, module: nn.Module, name: str, held: torch.Tensor | None) -> torch.Tensor | None:
        """The whole parameter, on demand: one tensor for all who read it in a forward. Anything else that the module holds
        under this name (`torch.func.functional_call` has put it there, say) as it is."""
        part = self._parts.get(name)
        if part is None or not self._slots[part].holds_known(module):
            return held
        if torch.compiler.is_compiling():
            whole = gather_parameters(self._operand, self._handle)[part]
            return stand_for(whole if self._wrap is None else self._wrap(part, whole), held)
        operand = self._operand
        state = (operand.version, operand.compute_dtype, operand.trainable, tuple(id(slot.parameter) for slot in self._slots))
        if state != self._state:
            self._tensors = self._wrapped(Reading(operand, self._slots, self._gathered))
            self._state = state
        return self._tensors[part]

    def _wrapped(self, reading: Reading) -> tuple[torch.Tensor, ...]:
        tensors = reading.tensors()
        if self._wrap is None:
            return tensors
        with torch.inference_mode(False), torch.enable_grad():
            pairs = zip(tensors, reading.stored, strict=True)
            return tuple(stand_for(self._wrap(part, whole), stored) for part, (whole, stored) in enumerate(pairs))


class _Whole(dict):  # type: ignore[type-arg]
    """A module's parameters as they read inside a forward. What is written goes to the module's own dictionary as well."""

    def __init__(self, seen: dict[str, Any], held: dict[str, Any]) -> None:
        super().__init__(seen)
        self._held = held

    def __setitem__(self, name: str, value: Any) -> None:
        self._held[name] = standing_for(value)  # what was read and is put back stays the framework's own parameter
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        del self._held[name]
        super().__delitem__(name)

    def popitem(self) -> tuple[str, Any]:
        name = next(reversed(self))
        return name, self.pop(name)

    # dict's own ways do not go through the two above
    pop, clear, setdefault, update = MutableMapping.pop, MutableMapping.clear, MutableMapping.setdefault, MutableMapping.update

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self._held),)


def properties(kind: type[nn.Module], open_reads: Callable[[Any], Reads | None]) -> dict[str, property]:
    """For the body of the class whose instances are served in place of `kind`'s.

    open_reads(module): what its readers get now; None: what the module holds.
    """

    def get_parameters(self: nn.Module) -> dict[str, Any]:
        held = parameters_of(self)
        reads = open_reads(self)
        if reads is None:
            for name, param in held.items():
                if isinstance(param, OnDemandTensor):  # written when the framework had sharded again
                    held[name] = standing_for(param)
            return held
        seen = {name: reads.read(self, name, param) for name, param in held.items()}
        return _Whole(seen, held)

    def set_parameters(self: nn.Module, value: dict[str, Any]) -> None:
        hold_parameters(self, value)

    made = {"_parameters": property(get_parameters, set_parameters)}
    for name in SERVED_NAMES:
        if not hasattr(kind, name):
            made[name] = _of_one(name, open_reads)
    return made


def _of_one(name: str, open_reads: Callable[[Any], Reads | None]) -> property:
    def get(self: nn.Module) -> Any:
        held = parameters_of(self)
        if name not in held:
            if name in self.__dict__:
                return self.__dict__[name]
            raise AttributeError(name)  # nn.Module.__getattr__ looks further
        reads = open_reads(self)
        return held[name] if reads is None else reads.read(self, name, held[name])

    def put(self: nn.Module, value: Any) -> None:  # nn.Module.__setattr__ comes first, and takes parameters
        self.__dict__[name] = value

    def delete(self: nn.Module) -> None:
        del self.__dict__[name]

    return property(get, put, delete)


__all__ = ["ReadLog", "Reads", "Scope", "properties"]
