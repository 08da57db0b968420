"""A training script for DeepSpeed by someone who never heard of CommFuse."""

import argparse

import deepspeed
import torch

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 37), torch.nn.GELU(), torch.nn.Linear(37, 5))
engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
torch.manual_seed(1 + torch.distributed.get_rank())
for step in range(4):
    x, y = torch.randn(2, 16), torch.randint(0, 5, (2,))
    loss = torch.nn.functional.cross_entropy(engine(x), y)
    engine.backward(loss)
    engine.step()
    if torch.distributed.get_rank() == 0:
        print(f"loss {step} {loss.item():.9f}", flush=True)
torch.distributed.destroy_process_group()  # else threads of stock gloo abort the process at its exit, now and then
