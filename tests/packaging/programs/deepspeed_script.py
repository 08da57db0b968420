"""For configs/launch.md: a script for DeepSpeed that knows nothing of CommFuse."""

import argparse

import deepspeed
import torch

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 5))
engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
torch.manual_seed(1 + torch.distributed.get_rank())
x, y = torch.randn(2, 256), torch.randint(0, 5, (2,))
for _ in range(4):
    loss = torch.nn.functional.cross_entropy(engine(x.to(model[0].weight.dtype)).float(), y)
    engine.backward(loss)
    engine.step()
    if torch.distributed.get_rank() == 0:
        print(f"loss {loss.item():.9f}", flush=True)
torch.distributed.destroy_process_group()  # else threads of stock gloo abort the process at its exit, now and then
