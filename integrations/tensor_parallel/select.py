"""Which tensor-parallel layers are served, and why others stay as they are. Reads the model; changes nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.attachment import attachment_of
from commfuse_dp.integrations.attach.forwards import TENSOR_ATTACHMENT, own_class
from commfuse_dp.integrations.attach.rules import excluded, form_of, full_name, original_type
from commfuse_dp.integrations.hugging_face_tp.compat import sharded
from commfuse_dp.integrations.tensor_parallel import compat
from commfuse_dp.integrations.tensor_parallel.compat import COLUMN, INPUT, ROW, SEQUENCE, Style
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from commfuse_dp.config import CommFuseConfig


@dataclass
class Member:
    name: str
    module: nn.Module
    style: Style


@dataclass
class Group:
    """Column-parallel layers that share one gather: of the input of `module`."""

    name: str
    module: nn.Module  # where the gather belongs: the members' parent, or the only member itself
    style: Style
    position: int  # of the gathered input among the module's
    members: list[Member]


@dataclass
class Siblings:
    """Column-parallel layers of one module whose input every rank has whole: they may get the same one."""

    name: str
    members: list[Member]


@dataclass
class Selected(ABC):
    """What is served of a model, by whatever it was sharded."""

    mesh: DeviceMesh | None = None
    left: dict[str, str] = field(default_factory=dict)  # module -> why it stays as it is

    @property
    @abstractmethod
    def any(self) -> bool:
        """Whether anything is served."""

    @property
    def unserved(self) -> dict[str, str]:
        """What is not taken care of: the same on all ranks, or they would wait for each other."""
        return self.left

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Over which what is served communicates; None: nothing is."""
        return self.mesh.get_group() if self.mesh is not None and self.any else None

    @property
    def device(self) -> torch.device:
        """Of this rank, in the mesh."""
        kind = "cpu" if self.mesh is None else self.mesh.device_type
        return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


@dataclass
class Selection(Selected):
    groups: list[Group] = field(default_factory=list)
    siblings: list[Siblings] = field(default_factory=list)
    rows: list[Member] = field(default_factory=list)
    stock_gathers: list[str] = field(default_factory=list)  # modules whose sharded input the framework gathers
    layer_norms: list[Member] = field(default_factory=list)  # sequence-parallel

    @property
    def any(self) -> bool:
        return bool(self.groups or self.siblings or self.rows)


def parallelized(model: nn.Module) -> bool:
    """Whether a style of torch.distributed.tensor.parallel, or of transformers, was applied to anything in the model, and
    whether it is served already: no style is left to be seen then."""
    served = any(attachment_of(module, TENSOR_ATTACHMENT) is not None for module in model.modules())
    return served or sharded(model) or any(compat.styles_of(module) for module in model.modules())


class Tree(NamedTuple):
    """What is asked of a model again and again. Keys are ids."""

    names: dict[int, list[str]]  # of modules: all that lead to it
    parents: dict[int, nn.Module]
    styles: dict[int, list[Style]]
    holders: dict[int, set[int]]  # parameter -> modules that hold it

    @classmethod
    def of(cls, model: nn.Module) -> Tree:
        names: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            names.setdefault(id(module), []).append(name)
        holders: dict[int, set[int]] = {}
        for module in model.modules():
            for param in module.parameters(recurse=False):
                holders.setdefault(id(param), set()).add(id(module))
        parents = {id(child): module for module in model.modules() for child in module.children()}
        return cls(names, parents, {id(module): compat.styles_of(module) for module in model.modules()}, holders)


def select(model: nn.Module, config: CommFuseConfig) -> Selection:
    out, tree = Selection(), Tree.of(model)
    grouped: set[int] = set()  # layers that have been looked at as members of a group
    for name, module in model.named_modules():
        if compat.unreadable(module) and any(isinstance(param, DTensor) for param in module.parameters()):
            out.left[name] = "its hooks are not those of PyTorch's own styles: they cannot be read"
        for style in tree.styles[id(module)]:
            if style.kind == INPUT:
                grouped |= _take_input(Member(name, module, style), config, tree, out)
    for name, module in model.named_modules():
        for style in tree.styles[id(module)]:
            if id(module) in grouped or style.kind == INPUT:
                continue
            if style.kind == SEQUENCE:
                out.left[name] = "sequence-parallel: it computes with its own tokens, nothing is moved"
                if isinstance(module, nn.LayerNorm):
                    out.layer_norms.append(Member(name, module, style))
            elif style.kind == COLUMN:
                _take_column(Member(name, module, style), config, tree, out)
            elif style.kind == ROW:
                _take_row(Member(name, module, style), config, tree, out)
    return out


# ---- groups ----------------------------------------------------------------------------------------------------------
def _take_input(holder: Member, config: CommFuseConfig, tree: Tree, out: Selection) -> set[int]:
    """Serve the column-parallel layers below a PrepareModuleInput, or say why not. Returns the ids of these layers."""
    name, module, style = holder.name, holder.module, holder.style
    gathered = [at for at, pair in enumerate(zip(style.inputs, style.wanted, strict=True)) if _is_gather(*pair)]
    members = [
        Member(full_name(name, inner), child, column)
        for inner, child in _inside(module, tree)
        for column in tree.styles[id(child)]
        if column.kind == COLUMN and _is_replicated(column.inputs)
    ]
    if not gathered and not any(_is_gather(*pair) for pair in style.keywords):
        return set()  # nothing of this module's input is gathered; its members are looked at one by one
    why = "fuse='never'" if config.fuse == "never" else excluded(name, config)
    moved = sum(_is_moved(*pair) for pair in zip(style.inputs, style.wanted, strict=True))
    if why is None and style.keywords:
        why = "PrepareModuleInput converts keyword arguments: one positional input is served"
    if why is None and moved > 1:
        why = "PrepareModuleInput moves more than one positional input"
    if why is None and not members:
        why = "no column-parallel layer inside takes what PrepareModuleInput gathers"
    why = why or mesh_obstacle(style.mesh, out)
    for member in members:
        obstacle = why or layer_obstacle(member.name, member.module, config, tree, within=module)
        if obstacle is not None and why is None:
            why = f"{member.name}, which shares its input, is not served: {obstacle}"
    widths = {str(getattr(member.module, "in_features", None)) for member in members}
    if why is None and len(widths) > 1:
        why = f"the column-parallel layers inside do not all take its input: they take {' and '.join(sorted(widths))} features"
    dtypes = {param.dtype for member in members for param in member.module.parameters(recurse=False)}
    if why is None and len(dtypes) > 1:
        why = f"its input's members have different dtypes: {', '.join(sorted(map(str, dtypes)))}"
    if why is not None:
        out.stock_gathers.append(name)
        out.left.update({member.name: why for member in members})
    else:
        out.groups.append(Group(name, module, style, gathered[0], members))
    return {id(member.module) for member in members}


def _inside(module: nn.Module, tree: Tree) -> Iterator[tuple[str, nn.Module]]:
    """Modules below `module`, without those below another PrepareModuleInput."""
    for name, child in module.named_children():
        if any(style.kind == INPUT for style in tree.styles[id(child)]):
            continue
        yield name, child
        for inner, deeper in _inside(child, tree):
            yield f"{name}.{inner}", deeper


def _take_column(member: Member, config: CommFuseConfig, tree: Tree, out: Selection) -> None:
    name, module, style = member.name, member.module, member.style
    gathers, whole = _is_gather(style.inputs[0], style.wanted[0]), _is_replicated(style.inputs)
    why = "fuse='never'" if config.fuse == "never" else None
    if why is None and not gathers and not whole:
        why = f"its input is laid out as {style.inputs[0]}: one that is replicated, or sharded along the sequence, is served"
    why = why or mesh_obstacle(style.mesh, out) or layer_obstacle(name, module, config, tree)
    if why is None and gathers:
        out.groups.append(Group(name, module, style, 0, [member]))
        return
    if why is None:
        _join_siblings(member, tree, out)
        return
    out.left[name] = why
    if gathers:
        out.stock_gathers.append(name)


def _join_siblings(member: Member, tree: Tree, out: Selection) -> None:
    def like(found: Member) -> tuple[object, ...]:
        parent, weight = tree.parents.get(id(found.module)), found.module.weight
        return id(parent), weight.shape[1], weight.dtype  # type: ignore[index, union-attr]

    for siblings in out.siblings:
        if like(siblings.members[0]) == like(member):
            siblings.members.append(member)
            return
    out.siblings.append(Siblings(member.name, [member]))


def _take_row(member: Member, config: CommFuseConfig, tree: Tree, out: Selection) -> None:
    name, module, style = member.name, member.module, member.style
    why = "fuse='never'" if config.fuse == "never" else None
    if why is None and not isinstance(module, nn.Embedding):
        layout = style.outputs[0]
        if not isinstance(layout, Replicate) and (not isinstance(layout, Shard) or layout.dim < 0):
            why = f"its output is laid out as {layout}: one that is replicated, or sharded along the sequence, is served"
        elif not isinstance(style.inputs[0], Shard):
            why = f"its input is laid out as {style.inputs[0]}, not sharded along its features"
    why = why or layer_obstacle(name, module, config, tree) or mesh_obstacle(style.mesh, out)
    if why is None:
        out.rows.append(member)
    else:
        out.left[name] = why


# ---- obstacles -------------------------------------------------------------------------------------------------------
def _is_gather(given: Placement | None, wanted: Placement | None) -> bool:
    return isinstance(given, Shard) and given.dim >= 0 and isinstance(wanted, Replicate)


def _is_moved(given: Placement | None, wanted: Placement | None) -> bool:
    return None not in (given, wanted) and given != wanted


def _is_replicated(layouts: tuple[Placement | None, ...]) -> bool:
    return len(layouts) == 1 and isinstance(layouts[0], Replicate)


def mesh_obstacle(mesh: DeviceMesh, out: Selected) -> str | None:
    """Why layers on this mesh are not served. The first mesh that is asked about is the one that is served."""
    if mesh.ndim != 1:
        return f"its mesh has {mesh.ndim} dimensions: one is served"
    if mesh.size() == 1:
        return "its mesh has one rank: nothing is to be communicated"
    if mesh.device_type not in ("cpu", "cuda"):
        return f"its mesh is of {mesh.device_type}: tensor parallelism is served on CPUs and CUDA GPUs"
    if out.mesh is None:
        out.mesh = mesh
    if mesh != out.mesh:
        return f"it is sharded over {mesh}, other layers over {out.mesh}: one mesh is served"
    return None


def layer_obstacle(
    name: str,
    module: nn.Module,
    config: CommFuseConfig,
    tree: Tree,
    within: nn.Module | None = None,
    *,
    forward_of_framework: bool = False,
) -> str | None:
    """Why a layer is not served (None: it is). forward_of_framework: the one in its dictionary, if any, is known."""
    kind = original_type(module)
    why = excluded(name, config)
    if why is not None:
        return why
    form = form_of(module)
    if form is None or form.transposed:
        return f"{kind.__name__} does not compute what nn.Linear does"
    if own_class(module).forward is not kind.forward or ("forward" in vars(module) and not forward_of_framework):
        return f"the forward of this {kind.__name__} was replaced"
    if hasattr(module, "parametrizations"):
        return "its parameters are parametrized"
    if len(tree.names[id(module)]) > 1:
        return f"the same module is used as {' and as '.join(tree.names[id(module)])}"
    if any(len(tree.holders[id(param)]) > 1 for param in module.parameters(recurse=False)):
        return "its parameters are tied to those of another module"
    beside = _beside(module, tree, within)
    if beside is not None:
        return f"{beside} computes with other weights beside it, from the same input"
    dtypes = {param.dtype for param in module.parameters(recurse=False)}
    if len(dtypes) > 1:
        return f"its parameters are of different dtypes: {', '.join(sorted(map(str, dtypes)))}"
    return None


def _beside(module: nn.Module, tree: Tree, within: nn.Module | None) -> str | None:
    """The adapter (LoRA, say) that a layer is wrapped in: its parent, with plain weights beside this layer's sharded ones."""
    parent = tree.parents.get(id(module))
    if within is None or parent is None or parent is within:
        return None
    inside = {id(param) for param in module.parameters()}
    plain = [param for param in parent.parameters() if id(param) not in inside and not isinstance(param, DTensor)]
    return original_type(parent).__name__ if plain else None
