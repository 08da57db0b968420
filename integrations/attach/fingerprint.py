"""Finds out at start, not by a hang, that ranks were given different models or settings."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.ranks import Ranks
from commfuse_dp.integrations.attach.report import Path
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


OFF: Mapping[str, tuple[Path, str]] = {"(all of it)": ("stock", "enabled=False")}  # for `check_same_left`: no module's name


def check_same_left(
    left: Mapping[str, tuple[Path, str]], facts: Sequence[tuple[str, str]], groups: Sequence[dist.ProcessGroup]
) -> None:
    """Collective over all of these groups. left: module -> what becomes of it instead of being served, and why. Raises
    MismatchError on every rank if ranks differ in that: they would wait for each other in the first step, or take one layer
    for another. facts: what else must be equal on all ranks; if that is not, the error says that."""
    for number, group in enumerate(groups):
        compared = functools.partial(_check_same_left, dict(left), list(facts), group)
        Ranks([group, *groups[:number], *groups[number + 1 :]]).together(compared)


def _check_same_left(left: dict[str, tuple[Path, str]], facts: list[tuple[str, str]], group: dist.ProcessGroup) -> None:
    everyone = exchange_of(group)((facts, left))
    numbers = dist.get_process_group_ranks(group)
    ranks = list(zip(numbers, [found for _, found in everyone], strict=True))
    differences = [
        (rank, name, path, why, other, theirs.get(name))
        for rank, found in ranks
        for name, (path, why) in found.items()
        for other, theirs in ranks
        if name not in theirs or theirs[name][0] != path
    ]
    if not differences:
        return
    _compare([facts for facts, _ in everyone], numbers)
    rank, name, path, why, other, instead = min(differences, key=lambda found: found[-1] is not None)
    if instead is None:
        raise MismatchError(
            f"rank {rank} cannot serve {name!r} ({why}), but rank {other} can. Mend that, or leave it to the framework on all "
            f"ranks: exclude=({name!r},)"
        )
    raise MismatchError(
        f"rank {rank} takes the path {path!r} for {name!r} ({why}), but rank {other} {instead[0]!r} ({instead[1]}). Mend that: "
        "all ranks must communicate alike."
    )


def check_equal(facts: list[tuple[str, str]], group: dist.ProcessGroup) -> None:
    """Collective. Raises MismatchError on every rank, naming the first difference and who has what."""
    _compare(exchange_of(group)(facts), dist.get_process_group_ranks(group))


def _compare(everyone: Sequence[list[tuple[str, str]]], numbers: Sequence[int]) -> None:
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
