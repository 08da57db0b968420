"""Tensor-parallel layers whose parameters `fully_shard` has sharded once more, by rows over data-parallel ranks.

Each is a unit of data parallelism's engine. Its `Service` computes by a `UnitLayer`, through which the op of its layer takes
the slices of the weight as they come and sends those of its gradient; removing data parallelism alone gives the layer back to
tensor parallelism's own `Service`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from commfuse_dp.integrations.attach.forwards import SERVICE, Service, own_class, whole_function
from commfuse_dp.integrations.attach.rules import original_type
from commfuse_dp.integrations.fsdp2.layers import TensorLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from commfuse_dp.engine.operand import UnitOperand
from commfuse_dp.ops.gathered import ShardedWeights, gather_parameters

Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class UnitLayer:
    """`Service.compute` of a layer whose parameters are a unit."""

    __slots__ = ("_compute", "_forward", "_handle", "_wrap", "operand")

    def __init__(
        self,
        forward: Forward,
        compute: Callable[[nn.Module, torch.Tensor, Sequence[torch.Tensor]], torch.Tensor],
        wrap: Callable[[int, torch.Tensor], torch.Tensor],
        operand: UnitOperand,
        handle: int,
    ) -> None:
        """forward: of tensor parallelism. compute(module, input, params): of the module's class."""
        self._forward, self._compute, self._wrap, self.operand, self._handle = forward, compute, wrap, operand, handle

    def __call__(self, module: nn.Module, input: torch.Tensor) -> torch.Tensor:
        return self._forward(module, input)

    def gathered(self) -> tuple[torch.Tensor, ...]:
        """Tensor parallelism's part of weight and bias, gathered over the data-parallel ranks."""
        return gather_parameters(self.operand, self._handle)

    def stock(self, module: nn.Module, input: torch.Tensor) -> torch.Tensor:
        """The module's own forward with its weight gathered over the data-parallel ranks, as the framework calls it."""
        return self._compute(module, input, [self._wrap(part, whole) for part, whole in enumerate(self.gathered())])


def tensor_layer(module: nn.Module, forward: Forward, mesh: DeviceMesh, holder: str, dim: int) -> TensorLayer:
    """How a layer that is served by `forward` computes with a unit. dim: along which tensor parallelism shards its weight."""
    shapes = [tuple(param.shape) for param in (module.weight, module.bias) if isinstance(param, DTensor)]
    placements: tuple[Placement, ...] = (Shard(dim), Shard(0) if dim == 0 else Replicate())

    def wrap(part: int, whole: torch.Tensor) -> torch.Tensor:
        shape = torch.Size(shapes[part])
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(whole, mesh, (placements[part],), run_check=False, shape=shape, stride=stride)

    compute = whole_function(original_type(module))
    return TensorLayer(module, holder, lambda operand, handle: UnitLayer(forward, compute, wrap, operand, handle), wrap)


def unit_layer(module: nn.Module | None) -> UnitLayer | None:
    service = _service(module)
    return service.compute if service is not None and isinstance(service.compute, UnitLayer) else None


def _service(module: nn.Module | None) -> Service | None:
    return None if module is None else vars(module).get(SERVICE)


def holds_unit(module: nn.Module) -> bool:
    """Whether a layer holds the parameters of its unit; `functional_call` may have put others in."""
    service = _service(module)
    return service is not None and service.serves(module)


def sharded_weights(modules: Sequence[nn.Module | None]) -> ShardedWeights | None:
    """The weights and biases of layers that compute together, if they are units whose slices an op takes as they come."""
    if torch.compiler.is_compiling():
        return None
    layers = [layer for layer in map(unit_layer, modules) if layer is not None]
    if not layers:
        return None
    dtype, device = layers[0].operand.compute_dtype, layers[0].operand.anchor.device.type
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    return ShardedWeights([layer.operand for layer in layers], dtype, recorded=torch.is_grad_enabled())


def stock_forward(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    """What the framework computes: its parameters are gathered, if they are a unit."""
    layer = unit_layer(module)
    return own_class(module).forward(module, input) if layer is None else layer.stock(module, input)
