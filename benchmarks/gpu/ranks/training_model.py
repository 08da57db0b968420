"""The model, data and settings that the training part and its ranks share. Widths divide by everything, so that few kernels are
compiled; uneven shards are the kernels part's business and `make test`'s."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 512
STEP_SIZE = 0.05  # of plain SGD


@dataclass(frozen=True)
class Job:
    """One training run. dtype: "float32" or "bfloat16" (mixed precision, gradients reduced in float32). tensor_parallel: ranks
    that share one batch and every layer; the others are data-parallel, by FSDP2."""

    world_size: int
    dtype: str
    device: str
    transport: str = "auto"
    tensor_parallel: int = 1
    width: int = 256
    hidden: int = 1024
    blocks: int = 3
    tokens: int = 512  # a rank
    steps: int = 3
    seed: int = 0
    deadline_s: float = 60.0

    @property
    def batches(self) -> int:
        """In a step."""
        return self.world_size // self.tensor_parallel

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Job:
        return cls(**json.loads(text))


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Token ids [tokens] -> logits [tokens, VOCABULARY]."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, job.width)
        self.layers = nn.ModuleList(Block(job.width, job.hidden) for _ in range(job.blocks))
        self.norm = nn.LayerNorm(job.width)
        self.head = nn.Linear(job.width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build(job: Job) -> Net:
    """On the host in float32, the same values for the same seed."""
    torch.manual_seed(job.seed)
    return Net(job)


def batch(job: Job, number: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, wanted) of one of `job.batches`, on the job's device."""
    generator = torch.Generator().manual_seed(1000 + 97 * step + number)
    ids = torch.randint(0, VOCABULARY, (2, job.tokens), generator=generator)
    return ids[0].to(job.device), ids[1].to(job.device)


def loss_of(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(data[0]).float(), data[1])
