"""One case of the training-step benchmark: what the launcher hands to its workers and what they hand back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VARIANTS = ("compute", "fsdp2", "fsdp2-best", "ddp", "commfuse", "commfuse-unfused")  # those run if nothing is said
SEPARATE = ("fsdp2-symm", "fsdp2-rs-group")  # FSDP2's own ways to less contention, of use on GPUs
JOB_VARIANTS = ("fsdp2", *SEPARATE, "commfuse")  # those run under torchrun if nothing is said
FLAT = "commfuse-flat"  # order pairwise, where CommFuse would take the hierarchical one: several ranks per host
DEFERRED = ("zero1-commfuse-deferred", "zero2-commfuse-deferred")  # with defer_gather
DEEPSPEED = (*(f"zero{stage}{kind}" for stage in (1, 2, 3) for kind in ("", "-commfuse")), *DEFERRED)


class BenchmarkError(RuntimeError):
    """A run that cannot give figures; the message names the rank and what it last said."""


@dataclass
class Case:
    """Settings of one launch, equal on all ranks. Sizes in bytes."""

    world_size: int = 2
    ranks_per_host: int = 1  # behind one link, where there are links
    variants: tuple[str, ...] = VARIANTS
    steps: int = 3  # steps of one timed block
    rounds: int = 5  # timed blocks of every variant
    warmup: int = 2  # untimed steps of every variant (CommFuse records the order of layers in the first)
    model: str = "linears"
    tokens: int = 512  # per rank
    keep: bool = False  # parameters stay gathered after forward (reshard_after_forward=False)
    optimizer: str = "fused"
    transport: str = "auto"
    order: str = "auto"
    prefetch_bytes: int | None = None  # None: CommFuse's default
    device: str = "cpu"
    seed: int = 0
    search_rounds: int = 2  # timed steps of each candidate when fsdp2-best and ddp look for their best settings
    deadline_s: float = 120.0
    precision: str = "fp32"  # "bf16": FSDP2's mixed precision, gradients reduced in fp32
    sequence: int = 0  # tokens of a sequence, and sequences a rank: tokens = sequence x batch; 0: the model has none
    batch: int = 0
    checkpoint_activations: bool = False
    kernels: str = "auto"
    schedule: str = "auto"  # "alternating" blocks, or "one-by-one": built, timed and freed in turn; "auto": by memory
    peak_tflops: float | None = None  # of one device, for the model FLOPs utilisation
    sleep_gflops: float | None = None  # compute is replaced by sleeping, at this speed
    job: bool = False  # a rank of a job that was started by torchrun: its network is not the benchmark's to count

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Case:
        data = json.loads(path.read_text())
        data["variants"] = tuple(data["variants"])
        return cls(**data)


@dataclass
class Block:
    """One timed block of one variant on one rank. Times in seconds for the whole block, bytes for the whole block."""

    wall_s: float
    exposed_s: float | None  # compute blocked on communication; None: cannot be observed
    cpu_s: float  # user and system time of the whole process
    main_cpu_s: float  # of which: the thread that trains
    threads_cpu_s: dict[str, float]  # by thread name, the other threads
    softirq_s: float  # of the whole host (all ranks and everybody else)
    tx_bytes: int | None  # None: not counted
    rx_bytes: int | None
    host_s: float | None = None  # until the host had enqueued the block; None: on the CPU there is no queue
    ends: list[tuple[int, int]] | None = None  # of each step: backward computed, gradients there; ns of a clock that all share
    peak_bytes: int | None = None  # device memory above what was allocated when the block began


@dataclass
class VariantRecord:
    """All blocks of one variant: blocks[round][rank]."""

    name: str
    blocks: list[list[Block]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)  # rank 0's loss of every step since the seed


@dataclass
class CaseResult:
    """What the workers measured in one launch."""

    layer_bytes: int  # parameters of the layers
    root_bytes: int  # parameters of no layer (embeddings, head)
    minimum_bytes: int  # per step and rank (host, with several ranks per host), each way
    variants: list[VariantRecord]
    left_out: dict[str, str] = field(default_factory=dict)  # variant -> why it cannot run here
    facts: dict[str, Any] = field(default_factory=dict)  # what it ran on, and how

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> CaseResult:
        data = json.loads(path.read_text())
        records = [
            VariantRecord(
                name=item["name"],
                blocks=[[Block(**block) for block in ranks] for ranks in item["blocks"]],
                notes=item["notes"],
                losses=item["losses"],
            )
            for item in data["variants"]
        ]
        return cls(**{**data, "variants": records})


def minimum_bytes(layer_bytes: int, root_bytes: int, world_size: int, *, keep: bool, ranks_per_host: int = 1) -> int:
    """Bytes that a rank must send (and receive) in a step: (N-1)/N x (2 all-gathers + 1 reduce-scatter).

    One all-gather only with `keep`, and for what belongs to no layer: FSDP2's root keeps its parameters after forward.

    With several ranks per host, those of a host, with H hosts: (H-1)/H x (1 all-gather + 1 reduce-scatter), as a host can keep
    for backward what has crossed to it.
    """
    if ranks_per_host > 1:
        hosts = world_size // ranks_per_host
        return 2 * (layer_bytes + root_bytes) * (hosts - 1) // hosts
    return ((2 if keep else 3) * layer_bytes + 2 * root_bytes) * (world_size - 1) // world_size
