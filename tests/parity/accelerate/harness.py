"""A real Accelerator inside a worker of a pool, on CPU, with and without CommFuse.

Accelerate cannot do FSDP on CPU: without an accelerator it finds no backend and becomes NO distribution. The one thing replaced
here is that finding (`PartialState._prepare_backend`), for the time of the Accelerator's construction: everything after it, the
wrapping above all, is Accelerate's own code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

if TYPE_CHECKING:  # imported where it is used: the processes that run other tests collect these, too
    from accelerate import Accelerator

SETTINGS = {"COMMFUSE_DEADLINE_S": "20", "COMMFUSE_INBOX_BYTES": "65536"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 37)
        self.down = nn.Linear(37, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 24, classes: int = 11) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """These variables, and no other COMMFUSE*, for the length of a block."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("COMMFUSE")}
    with mock.patch.dict(os.environ, {**kept, **values}, clear=True):
        yield


@contextmanager
def commfuse(on: bool, **settings: str) -> Iterator[None]:
    if not on:
        with environment():
            yield
        return
    with environment(COMMFUSE="1", **SETTINGS, **settings):
        from commfuse_dp.integrations.accelerate import autohook

        autohook.register()  # as autoload does
        yield


def reset() -> None:
    """Accelerate keeps its state for the life of the process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def accelerator(kind: str, *, layers: Sequence[str] = ("Block",), **options: Any) -> Accelerator:
    """kind: 'ddp', 'fsdp1' or 'fsdp2'. layers: classes of the modules that FSDP wraps.

    options: of the FSDP plugin (`fsdp=...`), of DDP (`ddp=...`), of Accelerator.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
    from accelerate.state import DistributedType, PartialState

    reset()
    fsdp, ddp = options.pop("fsdp", {}), options.pop("ddp", None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    launcher = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    with mock.patch.dict(os.environ, {key: str(value) for key, value in launcher.items()}):
        if kind == "ddp":
            handlers = [] if ddp is None else [DistributedDataParallelKwargs(**ddp)]
            return Accelerator(cpu=True, kwargs_handlers=handlers, **options)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2 if kind == "fsdp2" else 1,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=list(layers),
            cpu_ram_efficient_loading=False,
            state_dict_type="SHARDED_STATE_DICT",
            **fsdp,
        )
        found = ("gloo", DistributedType.MULTI_GPU)
        with (
            mock.patch.object(PartialState, "_prepare_backend", lambda *_: found),
            mock.patch.dict(os.environ, {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}),
        ):
            return Accelerator(fsdp_plugin=plugin, **options)


def make(acc: Accelerator, seed: int = 3) -> tuple[Any, Any]:
    from accelerate.state import DistributedType

    torch.manual_seed(seed)
    model = Net()
    if acc.distributed_type == DistributedType.FSDP and not acc.is_fsdp2:  # as Accelerate wants it for FSDP1: the model first
        model = acc.prepare(model)
        return model, acc.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4))
    return acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4))


def train(acc: Accelerator, model: Any, optimizer: Any, steps: range) -> tuple[list[float], list[float]]:
    """A loop as in Accelerate's documentation. Losses of every micro-batch, gradient norms of every step."""
    losses, norms = [], []
    micro = acc.gradient_accumulation_steps
    for step in steps:
        for part in range(micro):
            generator = torch.Generator().manual_seed(1000 * step + 10 * part + acc.process_index)
            with acc.accumulate(model):
                x, wanted = torch.randn(5, 24, generator=generator), torch.randint(0, 11, (5,), generator=generator)
                loss = torch.nn.functional.cross_entropy(model(x).float(), wanted)
                acc.backward(loss)
                if acc.sync_gradients:
                    norm = acc.clip_grad_norm_(model.parameters(), 1.0)
                    norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses, norms


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    """Whether training has changed every parameter."""
    return all(not torch.equal(before[name], value) for name, value in after.items())


def whole(acc: Accelerator, model: Any) -> dict[str, torch.Tensor]:
    """The full state dict, on the first process (empty on the others of FSDP2)."""
    if isinstance(model, FullyShardedDataParallel):  # stock FSDP1 cannot offload to CPU what is on CPU, as get_state_dict does
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
            return {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {name: value.detach().clone() for name, value in acc.get_state_dict(model).items()}
