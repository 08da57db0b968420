"""FSDP2's own ways to make communication disturb compute less, and why a variant cannot run here. Not yet run on a GPU.

| name | what |
| --- | --- |
| fsdp2-symm | all-gather buffers in NCCL's symmetric memory, and a communicator without CTAs: copy engines, where NCCL can |
| fsdp2-rs-group | reduce-scatter over a communicator of its own, so that it need not queue behind all-gathers |

[Note: One backend of symmetric memory per process]
Torch allows one backend for all symmetric memory of a process, and none to be changed after its first use. fsdp2-symm needs
"NCCL", CommFuse's transport `symmetric` needs "CUDA": under torchrun they run in processes of their own (job.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from commfuse_dp.integrations.fsdp2.hooks import StockCollective, reduce_scatter
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from benchmarks import models_llama
from benchmarks.case import Case
from benchmarks.variants import Fsdp2

_SYMMETRIC = "set_symm_mem_for_comm"
_SEPARATE = "set_separate_reduce_scatter_group"


class Fsdp2Symmetric(Fsdp2):
    """All-gathers by `set_symm_mem_for_comm`, over a communicator of the policy that lets NCCL use copy engines.

    NCCL does not say whether it did: it falls back to kernels on some GPUs and between hosts.
    """

    def mesh(self) -> DeviceMesh:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        policy = getattr(ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO", None)
        if policy is not None:
            options.config.cta_policy = policy  # type: ignore[attr-defined]
        self.notes["copy_engines"] = "asked for" if policy is not None else "not asked for: this torch has no CTA policies"
        return DeviceMesh.from_group(dist.new_group(backend="nccl", pg_options=options), self.case.device)

    def prepare(self) -> None:
        super().prepare()
        for module in fsdp_modules(self.module):  # the setter does not look into children
            getattr(module, _SYMMETRIC)("NCCL")


class Fsdp2SeparateGroup(Fsdp2):
    """Reduce-scatter over a communicator of its own: by FSDP2's setter where it has one, else by its public hook."""

    def prepare(self) -> None:
        super().prepare()
        assert isinstance(self.module, FSDPModule)
        if hasattr(self.module, _SEPARATE):
            getattr(self.module, _SEPARATE)(True)
            self.notes["separate_group"] = _SEPARATE
        else:
            reduce_over_own_group(self.module)
            self.notes["separate_group"] = "set_custom_reduce_scatter"


class GroupReduceScatter(StockCollective):
    """What FSDP2 does by itself, over another group of the same ranks in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(reduce_scatter)
        self._group = group

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **how: Any) -> dist.Work | None:
        return super().__call__(output_tensor, input_tensor, **{**how, "group": self._group})


def reduce_over_own_group(model: nn.Module) -> None:
    """Collective. One new group of all ranks for the reduce-scatters of every FSDP2 module; needs public names only."""
    group = dist.new_group()
    for module in fsdp_modules(model):
        module.set_custom_reduce_scatter(GroupReduceScatter(group))


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def why_not(name: str, case: Case) -> str | None:
    """Why this torch, this hardware or this case cannot run a variant; None if nothing speaks against trying."""
    if name == "ddp" and case.precision != "fp32":
        return "DistributedDataParallel is timed in fp32 only (--precision fp32)"
    if name != "fsdp2-symm":
        return None
    if case.device != "cuda":
        return "NCCL's symmetric memory needs GPUs (--device cuda)"
    if not hasattr(FSDPModule, _SYMMETRIC):
        return f"torch {torch.__version__}: FSDPModule has no {_SYMMETRIC} (torch 2.13 has it)"
    version = torch.cuda.nccl.version()
    if version < (2, 28):
        return f"NCCL {'.'.join(map(str, version))} is too old: copy engines need 2.28"
    return None


def resident_bytes(case: Case) -> int:
    """Device bytes that a rank holds between steps, all variants together: fp32 parameters, gradients and AdamW's two moments,
    sharded; `compute` holds bf16 parameters and gradients whole besides. 0: a small model."""
    if case.model not in models_llama.SHAPES:
        return 0
    model = models_llama.meta_model(case.model, recompute=False)
    numel = sum(parameter.numel() for parameter in model.parameters())
    shards = 16 * numel // case.world_size
    return sum(shards + (4 * numel if name == "compute" else 0) for name in case.variants)
