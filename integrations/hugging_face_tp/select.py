"""Which decoder layers of a model run in shards of the sequence, which of their layers are served, and why others are not.

    layers[i]                       in shards, if a trial shows that it may (trial.py)
      input_layernorm               replicated: computes with own positions, its gradient is summed over the ranks
      self_attn                     block: q_proj, k_proj, v_proj share one gather; o_proj sums and scatters
      post_attention_layernorm      replicated
      mlp                           block; one that cannot be served gets its input whole, and its output is divided
      mlp, if it has experts        in shards like the layer: router replicated, shared experts a block, experts by themselves
    norm                            replicated
    lm_head                         column-parallel, with a gather of its own

Reads the model; changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.rules import excluded, full_name, original_type
from commfuse_dp.integrations.hugging_face_tp import compat
from commfuse_dp.integrations.hugging_face_tp.compat import COLUMN, EXPERTS, REPLICATED, ROW, HuggingFaceStyle
from commfuse_dp.integrations.hugging_face_tp.key_heads import KeyHeads, key_heads_of
from commfuse_dp.integrations.hugging_face_tp.trial import layer_obstacle_by_trial, norm_obstacle_by_trial, width_of
from commfuse_dp.integrations.tensor_parallel.select import Selected, Tree, layer_obstacle, mesh_obstacle
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from commfuse_dp.config import CommFuseConfig


class Styled(NamedTuple):
    """A module that a style of transformers was applied to."""

    name: str
    module: nn.Module
    style: HuggingFaceStyle

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass
class Block:
    """A child of a decoder layer with tensor-parallel layers inside."""

    name: str
    module: nn.Module
    columns: list[Styled] = field(default_factory=list)
    rows: list[Styled] = field(default_factory=list)
    obstacle: str | None = None  # why none of it is served
    key_heads: KeyHeads | None = None  # fewer of them than ranks


@dataclass
class DecoderLayer:
    name: str
    module: nn.Module
    blocks: list[Block] = field(default_factory=list)
    experts: list[Styled] = field(default_factory=list)  # of mixtures, which run in shards like the layer itself
    replicated: list[tuple[str, nn.Module]] = field(default_factory=list)  # modules with parameters that all ranks have alike


class _How(NamedTuple):
    """What may run in shards."""

    mixtures: bool
    others: bool  # parts made of parts, without tensor-parallel layers


_HOWS = (_How(True, True), _How(True, False), _How(False, True), _How(False, False))


@dataclass
class Selection(Selected):
    layers: list[DecoderLayer] = field(default_factory=list)
    owners: list[nn.Module] = field(default_factory=list)  # modules that call the layers one after the other
    norms: list[tuple[str, nn.Module]] = field(default_factory=list)  # of the owners, behind the layers
    heads: list[Styled] = field(default_factory=list)  # column-parallel layers outside of decoder layers
    whole: list[tuple[str, nn.Module]] = field(default_factory=list)  # stock's: get whole inputs

    @property
    def any(self) -> bool:
        return bool(self.layers)

    @property
    def unserved(self) -> dict[str, str]:
        own = {name for name, _ in self.norms}
        return {name: why for name, why in self.left.items() if name not in own}


def select(model: nn.Module, config: CommFuseConfig) -> Selection:
    out, tree = Selection(), Tree.of(model)
    styled = [Styled(name, module, style) for name, module in model.named_modules() if (style := compat.style_of(module))]
    why = _model_obstacle(model, styled, config, out)
    inside: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside and any(map(_styled_inside, module)):
            inside |= {id(inner) for inner in module.modules()}
            if why is None:
                _take_stack(name, module, config, tree, out)
    for found in styled:
        if found.style.kind == REPLICATED:
            out.left.setdefault(found.name, "replicated, and computes all positions: transformers sums its gradient")
        elif id(found.module) not in inside or why is not None:
            _take_head(found, why, config, tree, out)
    return out


def _model_obstacle(model: nn.Module, styled: list[Styled], config: CommFuseConfig, out: Selection) -> str | None:
    if config.fuse == "never":
        return "fuse='never'"
    for found in styled:
        if found.style.mesh is not None:
            why = mesh_obstacle(found.style.mesh, out)
            if why is not None:
                return why
    return None


def _styled_inside(module: nn.Module) -> bool:
    return any(compat.style_of(inner) is not None for inner in module.modules())


# ---- decoder layers --------------------------------------------------------------------------------------------------
def _take_stack(name: str, stack: nn.ModuleList, config: CommFuseConfig, tree: Tree, out: Selection) -> None:
    owner = tree.parents[id(stack)]
    before = len(out.layers)
    for number, module in enumerate(stack):
        layer, why = _tried(f"{name}.{number}", module, config, tree, out.mesh, owner)
        if why is not None:
            out.left.update(dict.fromkeys(_names(layer.name, module), why))
            out.whole.append((layer.name, module))
            continue
        out.layers.append(layer)
        for block in layer.blocks:
            if block.obstacle is not None:
                reason = f"{block.obstacle}; {block.name} gets its input whole, and its output is divided"
                out.left.update(dict.fromkeys(_names(block.name, block.module), reason))
            elif block.rows[0].style.whole:
                out.left.update(dict.fromkeys(_names(block.name, block.module), "computes on all positions and features"))
        reason = "it computes with its own positions of the sequence; its gradient is summed over the ranks"
        out.left.update({inner: reason for inner, _ in layer.replicated})
    if len(out.layers) > before:
        out.owners.append(owner)
        prefix = name.rpartition(".")[0]
        for inner, child in owner.named_children():
            if child is not stack and any(True for _ in child.parameters(recurse=False)) and not _styled_inside(child):
                _take_norm(full_name(prefix, inner), child, owner, out)


def _tried(
    name: str, module: nn.Module, config: CommFuseConfig, tree: Tree, mesh: DeviceMesh | None, owner: nn.Module
) -> tuple[DecoderLayer, str | None]:
    """The layer, and why it cannot run in shards. What may stand in the way gets its input whole: first of all parts without
    tensor-parallel layers (other kinds of attention), then mixtures of experts."""
    first = None
    for how in _HOWS:
        layer, why = _layer(name, module, config, tree, mesh, how)
        why = why or _without_any(layer) or layer_obstacle_by_trial(module, owner, layer.blocks, layer.experts)
        if why is None:
            break
        first = first or why
    for block in layer.blocks:
        if first and _has_experts(block.module.modules()):
            block.obstacle = first
    return layer, why and first


def _without_any(layer: DecoderLayer) -> str | None:
    """Why nothing of it can be served."""
    if layer.experts or not all(block.obstacle is not None for block in layer.blocks):
        return None
    return "; ".join(dict.fromkeys(str(block.obstacle) for block in layer.blocks)) or "no layer inside can be served"


def _layer(
    name: str, module: nn.Module, config: CommFuseConfig, tree: Tree, mesh: DeviceMesh | None, how: _How
) -> tuple[DecoderLayer, str | None]:
    """The layer, and why it cannot run in shards, as far as that is seen without a trial."""
    layer, why = DecoderLayer(name, module), None
    if "forward" in vars(module):
        why = f"the forward of this {original_type(module).__name__} was replaced"
    if next(module.parameters(recurse=False), None) is not None:
        why = why or f"{original_type(module).__name__} has parameters of its own beside its layers"
    if any(isinstance(inner, FSDPModule) for inner in module.modules() if inner is not module):
        why = why or "fully_shard was applied to a module inside of it"
    return layer, why or _take_parts(layer, name, module, config, tree, mesh, how)


def _take_parts(
    layer: DecoderLayer,
    name: str,
    module: nn.Module,
    config: CommFuseConfig,
    tree: Tree,
    mesh: DeviceMesh | None,
    how: _How,
) -> str | None:
    """What the layer, or a mixture in it, consists of. Returns an obstacle."""
    why = None
    for inner, child in module.named_children():
        full = f"{name}.{inner}"
        if _styled_inside(child):
            style = compat.style_of(child)
            if how.mixtures and style is not None and style.kind == EXPERTS:
                layer.experts.append(Styled(full, child, style))
                why = why or _experts_obstacle(full, child, config, tree)
            elif how.mixtures and style is None and _is_mixture(child):
                why = why or _take_parts(layer, full, child, config, tree, mesh, how)
            else:
                if style is not None:
                    why = why or f"{full} is tensor-parallel directly inside of {original_type(module).__name__}"
                layer.blocks.append(_block(full, child, config, tree))
            continue
        if not how.others and any(True for _ in child.children()) and any(True for _ in child.parameters()):
            layer.blocks.append(Block(full, child, obstacle="no style of tensor parallelism was applied inside of it"))
            continue
        for deeper, holder in child.named_modules(prefix=full):
            params = list(holder.parameters(recurse=False))
            if params and ("forward" in vars(holder) or hasattr(holder, "parametrizations")):
                why = why or f"the forward of {deeper} was replaced"
            if any(_over(mesh, param) for param in params):
                why = why or f"{deeper} is sharded in a way that is not known here"
            if any(len(tree.holders[id(param)]) > 1 for param in params) or len(tree.names[id(holder)]) > 1:
                why = why or f"parameters of {deeper} are used elsewhere, too"
            if params:
                layer.replicated.append((deeper, holder))
    return why


def _is_mixture(module: nn.Module) -> bool:
    """Whether it calls experts, and has nothing to compute with but its parts."""
    if "forward" in vars(module) or next(module.parameters(recurse=False), None) is not None:
        return False
    return _has_experts(module.children())


def _has_experts(modules: Iterable[nn.Module]) -> bool:
    return any(style.kind == EXPERTS for module in modules if (style := compat.style_of(module)))


def _experts_obstacle(name: str, module: nn.Module, config: CommFuseConfig, tree: Tree) -> str | None:
    if any(True for child in module.children() for _ in child.parameters()) or hasattr(module, "parametrizations"):
        return f"{name} has more than parameters of its own"
    if len(tree.names[id(module)]) > 1 or any(len(tree.holders[id(param)]) > 1 for param in module.parameters()):
        return f"{name} is used elsewhere, too"
    return excluded(name, config)


def _over(mesh: DeviceMesh | None, param: torch.Tensor) -> bool:
    """Whether a parameter is sharded over the mesh of tensor parallelism (and not by `fully_shard` alone)."""
    if not isinstance(param, DTensor) or mesh is None:
        return isinstance(param, DTensor)
    own = dist.get_process_group_ranks(mesh.get_group())
    return any(dist.get_process_group_ranks(group) == own for group in param.device_mesh.get_all_groups())


def _block(name: str, module: nn.Module, config: CommFuseConfig, tree: Tree) -> Block:
    block, unknown = Block(name, module), None
    if "forward" in vars(module):
        block.obstacle = f"the forward of {name} was replaced"
    for inner, holder in module.named_modules(prefix=name):
        style = compat.style_of(holder)
        if style is None:
            if next(holder.parameters(recurse=False), None) is not None:
                unknown = unknown or f"{inner} has parameters that the plan does not name"
            continue
        found = Styled(inner, holder, style)
        if style.kind == COLUMN:
            block.columns.append(found)
        elif style.kind == ROW:
            block.rows.append(found)
        if style.kind != REPLICATED:
            why = _obstacle(found, config, tree, module)
            block.obstacle = block.obstacle or (f"{inner}: {why}" if why is not None else None)
    if not all(found.style.whole for found in (*block.columns, *block.rows)):
        block.obstacle = block.obstacle or unknown  # its gradient would be partial
    if not block.columns or not block.rows:
        block.obstacle = block.obstacle or f"{name} has no column-parallel layers with a row-parallel one behind them"
    dtypes = {param.dtype for found in block.columns for param in found.module.parameters(recurse=False)}
    own = block.obstacle is None and not block.columns[0].style.whole  # heads, of what each rank computes with
    heads = key_heads_of(module, block.columns[0].style.mesh.size()) if own else None  # type: ignore[union-attr]
    if isinstance(heads, str):
        block.obstacle = heads
    else:
        block.key_heads = heads
    if len(dtypes) > 1:
        block.obstacle = block.obstacle or f"its layers have different dtypes: {', '.join(sorted(map(str, dtypes)))}"
    return block


def _obstacle(found: Styled, config: CommFuseConfig, tree: Tree, within: nn.Module | None) -> str | None:
    if found.style.kind not in (COLUMN, ROW):
        return f"its style {found.style.name} is none that is served"
    known = layer_obstacle(found.name, found.module, config, tree, within, forward_of_framework=True)
    return known or found.style.why


def _names(name: str, module: nn.Module) -> Iterator[str]:
    for inner, _ in module.named_modules(prefix=name):
        yield inner


# ---- behind them -----------------------------------------------------------------------------------------------------
def _take_norm(name: str, module: nn.Module, owner: nn.Module, out: Selection) -> None:
    if "forward" in vars(module):
        return
    why = norm_obstacle_by_trial(module, width_of(out.layers[-1].blocks, owner))
    if why is None:
        out.norms.append((name, module))
    out.left[name] = why or "it computes with its own positions of the sequence; its gradient is summed over the ranks"


def _take_head(found: Styled, why: str | None, config: CommFuseConfig, tree: Tree, out: Selection) -> None:
    if why is None and not out.layers:
        why = "no decoder layer runs in shards of the sequence"
    if why is None and found.style.kind == ROW:
        why = "it is row-parallel, but in no decoder layer"
    why = why or _obstacle(found, config, tree, None)
    if why is None:
        out.heads.append(found)
    else:
        out.left[found.name] = why
        out.whole.append((found.name, found.module))
