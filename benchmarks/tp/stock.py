"""The same model as a user has it today: PyTorch's tensor and sequence parallel styles over DTensor, collectives of gloo."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

from benchmarks.tp.models import Shape


class _Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.depth = shape.width // shape.heads
        self.q, self.k, self.v, self.o = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [layer(x).view(x.shape[0], -1, self.depth).transpose(0, 1).unsqueeze(0) for layer in (self.q, self.k, self.v)]
        return self.o(F.scaled_dot_product_attention(*heads).squeeze(0).transpose(0, 1).flatten(1))


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.width, self.attention, self.mlp = shape.width, _Attention(shape), _Mlp(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(F.rms_norm(x, (self.width,)))
        return x + self.mlp(F.rms_norm(x, (self.width,)))


def stock(op: str, shape: Shape, shards: dict[str, torch.Tensor], ranks: int) -> nn.Module:
    """A module [s, D] -> [s, D], whose shards are those given."""
    model = {"mlp": _Mlp, "attention": _Attention, "block": _Block}[op](shape)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    whole = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True)
    columns = {name: ColwiseParallel() for name in ("up", "q", "k", "v")}
    rows = {name: RowwiseParallel(output_layouts=Shard(0)) for name in ("down", "o")}
    for module in model.modules():
        if isinstance(module, (_Mlp, _Attention)):
            plan = {name: style for name, style in {**columns, **rows}.items() if hasattr(module, name)}
            parallelize_module(module, mesh, {"": whole, **plan})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.to_local().copy_(shards[name.split(".")[-2]])  # type: ignore[attr-defined]
    return model
