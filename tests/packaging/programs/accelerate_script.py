"""For configs/launch.md: a script for Accelerate that knows nothing of CommFuse."""

import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(4, 256), torch.randint(0, 5, (4,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=2))
x, y = next(iter(loader))
for _ in range(4):
    loss = torch.nn.functional.cross_entropy(model(x).float(), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if torch.distributed.get_rank() == 0:
        print(f"loss {loss.item():.9f}", flush=True)
torch.distributed.destroy_process_group()  # else threads of stock gloo abort the process at its exit, now and then
