"""What torch does on a simulated device, inline, as work of the stream that is current: see fake_device.py."""

from __future__ import annotations

from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.fake_device import FakeDevice

_COLLECTIVES = ("c10d", "_c10d_functional")  # torch's own, in which one rank waits for another


class Watched(TorchDispatchMode):
    """Inline: torch's own operations count as accesses of the stream that is current. Only memory that was copied to or
    from, or is symmetric, is looked at."""

    sees_inside_commfuse = True

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with its local tensors comes here again
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return func(*args, **kwargs)  # tensors without memory
        if func.namespace == "commfuse":  # a registered op of ours: what it is made of is watched, and it waits for peers
            with torch.no_grad(), self:
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        schema = func._schema
        aliases = [value.alias_info for value in schema.returns if value.alias_info is not None]
        if all(not alias.is_write for alias in aliases) and aliases:
            return func(*args, **kwargs)  # a view touches nothing
        world, stream = self._device.world, self._device.current_stream()
        with world.changed:
            if func.namespace not in _COLLECTIVES:
                self._device.stand_at_times()
            stream.clock[stream] = stream.clock.get(stream, 0) + 1
            stream.now += world.cost(stream, str(func), 0)
            named = {argument.name: argument for argument in schema.arguments}
            given = [*zip(schema.arguments, args, strict=False), *((named[name], value) for name, value in kwargs.items())]
            for argument, value in given:
                write = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(tensor, torch.Tensor):
                        world.access(stream, tensor, write=write, what=str(func))
            if func.namespace not in _COLLECTIVES:
                return func(*args, **kwargs)
        return func(*args, **kwargs)
