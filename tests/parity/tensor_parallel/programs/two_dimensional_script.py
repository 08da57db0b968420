"""A script that knows nothing of CommFuse: FSDP2 over tensor and sequence parallelism, two ranks each."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.in_proj = nn.Linear(10, 32)
        self.out_proj = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out_proj(torch.relu(self.in_proj(self.norm(x))))


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer()).double()
    plan = {
        "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
        "in_proj": ColwiseParallel(input_layouts=Shard(0)),
        "out_proj": RowwiseParallel(output_layouts=Shard(0)),
    }
    for layer in model:
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    for step in range(4):
        torch.manual_seed(step * 10 + dist.get_rank())
        loss = model(torch.rand(5, 10, dtype=torch.float64)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"{float(total):.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
