"""Finds out at start, not by a hang, that ranks were given different models or settings."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.errors import MismatchError
from commfuse_dp.transport.exchange import exchange_of


def describe(model: nn.Module, config: CommFuseConfig) -> list[tuple[str, str]]:
    """What must be equal on all ranks, as (what, value) pairs in a fixed order."""
    from commfuse_dp import __version__

    facts = [("commfuse_dp", __version__), ("torch", torch.__version__)]
    facts += [(f"setting {key}", repr(value)) for key, value in config.model_dump().items()]
    facts += [
        (f"parameter {name}", f"{tuple(param.shape)} {param.dtype} requires_grad={param.requires_grad}")
        for name, param in model.named_parameters()
    ]
    return facts


def check_same_left(left: Mapping[str, str], group: dist.ProcessGroup) -> None:
    """Collective. left: name -> why it stays with the framework. Raises MismatchError on every rank if one can serve what
    another cannot: they would wait for each other in the first step."""
    everyone = exchange_of(group)(dict(left))
    numbers = dist.get_process_group_ranks(group)
    common = set.intersection(*map(set, everyone))
    for rank, found in zip(numbers, everyone, strict=True):
        for name, why in found.items():
            if name not in common:
                others = [number for number, other in zip(numbers, everyone, strict=True) if name not in other]
                raise MismatchError(
                    f"rank {rank} cannot serve {name!r} ({why}), but rank {others[0]} can. Mend that, or leave it to the "
                    f"framework on all ranks: exclude=({name!r},)"
                )


def check_equal(facts: list[tuple[str, str]], group: dist.ProcessGroup) -> None:
    """Collective. Raises MismatchError on every rank, naming the first difference and who has what."""
    everyone = exchange_of(group)(facts)
    numbers = dist.get_process_group_ranks(group)
    for rank, other in zip(numbers, everyone, strict=True):
        if other == everyone[0]:
            continue
        for first, second in zip(everyone[0], other, strict=False):
            if first != second:
                raise MismatchError(
                    f"ranks of this group were started differently: rank {numbers[0]} has {first[0]} = {first[1]}, "
                    f"rank {rank} has {second[0]} = {second[1]}. Start all ranks with the same model and the same settings."
                )
        raise MismatchError(
            f"ranks of this group have different models: rank {numbers[0]} has {len(everyone[0])} entries, rank {rank} "
            f"{len(other)}. Start all ranks with the same model."
        )
