"""PyTorch's styles of tensor parallelism, served by CommFuse without a call of apply().

    from commfuse_dp.integrations.tensor_parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

    parallelize_module(model, mesh, {"norm": SequenceParallel(), "output": ColwiseParallel(input_layouts=Shard(1))})

Arguments and results are those of torch.distributed.tensor.parallel. The module that holds them and is called first is served
whole, below `fully_shard` too, as `commfuse_dp.apply(model)` would serve it before its forward, with the settings of the
environment (COMMFUSE_...). A call of `apply` before goes first."""

from __future__ import annotations

from commfuse_dp.integrations.unmodified.first_call import watch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import parallel


class _Served(parallel.ParallelStyle):
    """Of every drop-in: what it has been applied to is served."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return watch(super()._apply(module, device_mesh), explicit=True)  # type: ignore[safe-super]  # torch's style is next


class ColwiseParallel(_Served, parallel.ColwiseParallel):
    """torch's, served by CommFuse: columns that share an input share one gather, and compute it slice by slice."""


class RowwiseParallel(_Served, parallel.RowwiseParallel):
    """torch's, served by CommFuse: partial sums of a sharded output are sent as they are computed."""


class SequenceParallel(_Served, parallel.SequenceParallel):
    """torch's; nothing of it communicates in forward."""


class PrepareModuleInput(_Served, parallel.PrepareModuleInput):
    """torch's, served by CommFuse: the input that it gathers is gathered by the layers that compute with it."""
