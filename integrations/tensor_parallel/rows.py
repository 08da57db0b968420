"""Rows of the report of tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping

from commfuse_dp.integrations.attach.report import ParameterRow, Path
from commfuse_dp.integrations.attach.rules import full_name
from commfuse_dp.integrations.tensor_parallel.compat import Style
from torch import nn
from torch.distributed.tensor import Replicate

_UNKNOWN = "no style of tensor parallelism that moves a sequence was applied to it"


def module_rows(name: str, module: nn.Module, path: Path, reason: str) -> list[ParameterRow]:
    return [
        ParameterRow(full_name(name, inner), path, reason, param.numel())
        for inner, param in module.named_parameters(recurse=False)
    ]


def shared_gather(holder: str, name: str, members: list[str]) -> str:
    """The reason of a column-parallel layer."""
    others = [member for member in members if member != name]
    return f"one gather of {holder}'s input with {', '.join(others)}" if others else "a gather of its own"


def summed_gradient(name: str, siblings: list[str]) -> str:
    """The reason of a column-parallel layer whose input every rank has whole."""
    others = [sibling for sibling in siblings if sibling != name]
    shared = f", once for {', '.join(others)} as well where they get the same input" if others else ""
    return f"its input's gradient is summed for all ranks as it is computed{shared}"


def partial_sums(style: Style) -> str:
    """The reason of a row-parallel layer."""
    back = ", and come back to all ranks" if isinstance(style.outputs[0], Replicate) else ""
    return f"partial sums leave as they are computed{back}"


def left_rows(model: nn.Module, left: Mapping[str, str], known: set[str]) -> list[ParameterRow]:
    """Every parameter that is not served, with the reason of the module that it belongs to."""
    rows: list[ParameterRow] = []
    for name, module in model.named_modules():
        rows += [row for row in module_rows(name, module, "stock", left.get(name, _UNKNOWN)) if row.name not in known]
    return rows
