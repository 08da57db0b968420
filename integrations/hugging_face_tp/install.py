"""Puts what is selected into a model, through an attachment's transaction, so that all of it can be taken back."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

from commfuse_dp.integrations.attach.attachment import Attachment
from commfuse_dp.integrations.attach.forwards import Service, serve
from commfuse_dp.integrations.attach.report import ParameterRow
from commfuse_dp.integrations.hugging_face_tp.attention import attends, project
from commfuse_dp.integrations.hugging_face_tp.compat import hooks_of_fsdp
from commfuse_dp.integrations.hugging_face_tp.experts import Experts, HeldExperts
from commfuse_dp.integrations.hugging_face_tp.key_heads import GROUPS
from commfuse_dp.integrations.hugging_face_tp.layers import (
    BlockEnters,
    BlockLeaves,
    ColumnGroup,
    HeldForward,
    LayerEnters,
    LayerLeaves,
    OwnerEnters,
    RootLeaves,
    RowLayer,
    Running,
    ShardEntered,
    ShardEnters,
    WholeEnters,
    layer_forward,
    replicated_forward,
)
from commfuse_dp.integrations.hugging_face_tp.select import Block, Selection, Styled
from commfuse_dp.integrations.tensor_parallel.rows import module_rows, shared_gather
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.transport.base import Transport


def install(
    attachment: Attachment, model: nn.Module, selection: Any, config: CommFuseConfig, transport: Transport
) -> tuple[list[ParameterRow], dict[str, int]]:
    """Returns the rows of what is served, and where inputs are counted that were gathered once more."""
    assert isinstance(selection, Selection)
    running = Running(transport, config)
    before = functools.partial(_before, attachment)
    after = functools.partial(_after, attachment)
    rows: list[ParameterRow] = []
    for name, module in selection.whole:
        before(module, WholeEnters(module, name, running), first=True)
    mixtures = any(layer.experts for layer in selection.layers)
    for owner in selection.owners:
        before(owner, OwnerEnters(owner, running, [found.module for found in selection.heads], mixtures))
    for layer in selection.layers:
        before(layer.module, LayerEnters(layer.module, layer.name, running), first=True)
        after(layer.module, LayerLeaves(layer.module, layer.name, running), with_kwargs=True)
        serve(attachment.transaction, layer.module, Service(layer.module, layer_forward(running)))
        for block in layer.blocks:
            rows += _install_block(attachment, block, running)
        for found in layer.experts:
            attachment.transaction.set(vars(found.module), "forward", HeldExperts(found, Experts(found, running)))
            reason = "tokens come by slices, and partial sums leave as they are computed"
            rows += module_rows(found.name, found.module, "column", reason)
    for name, module in [*selection.norms, *(pair for layer in selection.layers for pair in layer.replicated)]:
        serve(attachment.transaction, module, Service(module, replicated_forward(name, running)))
    for name, module in [*selection.norms, *((found.name, found.module) for found in selection.heads)]:
        if _under_fsdp(module):
            before(module, ShardEnters(module, name, running), first=True)
            before(module, ShardEntered(module, name, running))
    for found in selection.heads:
        group = ColumnGroup(found.name, [found], running)
        _hold(attachment, found, group.forward_alone)
        rows += module_rows(found.name, found.module, "column", shared_gather(found.name, found.name, []))
    after(model, RootLeaves(model, "", running), with_kwargs=False)
    return rows, running.gathered_inputs


def _install_block(attachment: Attachment, block: Block, running: Running) -> list[ParameterRow]:
    if block.obstacle is not None:
        _before(attachment, block.module, BlockEnters(block, running, None))
        _after(attachment, block.module, BlockLeaves(block.module, block.name, running), with_kwargs=False)
        return []
    rows: list[ParameterRow] = []
    group = ColumnGroup(block.name, block.columns, running, block.key_heads)
    if block.key_heads is not None:
        running.least = 1  # stock cannot
        attachment.transaction.set(vars(block.module), GROUPS, block.key_heads.groups)
    _before(attachment, block.module, BlockEnters(block, running, group))
    names = [found.name for found in block.columns]
    for found in block.columns:
        _hold(attachment, found, group.forward)
        rows += module_rows(found.name, found.module, "column", shared_gather(block.name, found.name, names))
    for found in block.rows:
        row = RowLayer(found, running)
        _hold(attachment, found, row.forward)
        reason = "partial sums leave as they are computed"
        if len(block.rows) == 1 and not found.style.whole and attends(block.module):
            project(attachment.transaction, block.module, row)
            reason = "attention and partial sums by slices of queries, which leave as they are computed"
        rows += module_rows(found.name, found.module, "row", reason)
    return rows


def _under_fsdp(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to it."""
    return isinstance(module, FSDPModule)


def _hold(attachment: Attachment, found: Styled, compute: Any) -> None:
    attachment.transaction.set(vars(found.module), "forward", HeldForward(found, compute))


def _before(attachment: Attachment, module: nn.Module, hook: Any, *, first: bool = False) -> None:
    """first: ahead of the hooks of `fully_shard`, which must see own positions."""

    def register() -> RemovableHandle:
        return module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first and _under_fsdp(module))

    attachment.transaction.acquire(register, RemovableHandle.remove)


def _after(attachment: Attachment, module: nn.Module, hook: Any, *, with_kwargs: bool) -> None:
    """Ahead of the hooks of others, who must not see shards; but behind those of `fully_shard` (with_kwargs: of a layer)."""

    hooks: OrderedDict[int, Any] = module._forward_hooks  # type: ignore[assignment]
    before = list(hooks)

    def register() -> RemovableHandle:
        handle = module.register_forward_hook(hook, prepend=True, with_kwargs=with_kwargs)
        for key in reversed(hooks_of_fsdp(hooks) if with_kwargs else []):
            hooks.move_to_end(key, last=False)
        return handle

    def give_back(handle: RemovableHandle) -> None:
        handle.remove()
        later = [key for key in hooks if key not in before]
        for key in (*before, *later):
            if key in hooks:
                hooks.move_to_end(key)

    attachment.transaction.acquire(register, give_back)
