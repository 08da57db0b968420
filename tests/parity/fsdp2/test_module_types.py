"""Modules of every type, dtype and policy: which path they take, and that the results are those of stock FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import parametrizations

import commfuse_dp
from commfuse_dp import ConfigError
from tests.parity.fsdp2.models import (
    VOCABULARY,
    Block,
    ByteModel,
    Stack,
    mean_square,
    shard_root,
)
from tests.parity.fsdp2.twin import Twin, build, local, settings
from tests.support.cells import slow


# ---- types of modules ------------------------------------------------------------------------------------------------
class Shouting(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Zoo(nn.Module):
    """[batch, length] ids -> [batch, length, VOCABULARY] through modules that cannot be served by slices, and some that can."""

    def __init__(self) -> None:
        super().__init__()
        width = 8
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=3)
        self.encoder = nn.TransformerEncoderLayer(width, 2, 19, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.group_norm = nn.GroupNorm(2, width)
        self.wide_norm = nn.LayerNorm((7, width), bias=False)
        self.subclass = Shouting(width, 11)
        self.bilinear = nn.Bilinear(11, 3, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.normed = parametrizations.weight_norm(nn.Linear(width, width))
        self.extra = nn.Linear(width, width, bias=False)
        self.extra.scale = nn.Parameter(torch.rand(width))  # used by the hook below, as adapters do
        self.extra.register_forward_hook(lambda module, args, out: out * module.scale)
        self.plain = nn.Linear(width, width)
        self.read = nn.Linear(width, VOCABULARY)  # its weight is read directly: excluded
        self.table = nn.Parameter(torch.rand(width, width))
        self.layers = nn.ModuleList([])
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.embedding(ids))
        x = x + self.attention(x, x, x)[0]
        x = x + self.group_norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
        y = torch.tanh(self.subclass(self.wide_norm(x)))
        x = x + self.bilinear(y, y[..., :3].contiguous())
        x = x + self.gru(x)[0] + self.normed(x) + self.extra(x) + self.plain(x) @ self.table
        return F.linear(x, self.read.weight, self.read.bias)


ZOO = {
    "embedding.": ("gathered", ""),
    "wide_norm.": ("gathered", ""),
    "plain.": ("fused", ""),
    "encoder.linear1": ("hooks", "TransformerEncoderLayer reads"),
    "encoder.norm1": ("hooks", "TransformerEncoderLayer reads"),
    "encoder.self_attn.in_proj": ("hooks", "MultiheadAttention"),
    "attention.in_proj": ("hooks", "MultiheadAttention"),
    "attention.out_proj": ("hooks", ""),
    "conv.": ("hooks", "Conv1d"),
    "group_norm.": ("hooks", "GroupNorm"),
    "subclass.": ("hooks", "Shouting"),
    "bilinear.": ("hooks", "Bilinear"),
    "gru.": ("hooks", "GRU"),
    "normed.": ("hooks", "Parametri"),
    "extra.": ("hooks", "scale"),
    "read.": ("hooks", "excluded by 'read'"),
    "table": ("hooks", "Zoo"),
}


def zoo(rank: int, world_size: int, transport: str) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    with Twin(Zoo, shard=shard_root, config=settings(transport, exclude=("read",))) as twin:
        for _ in range(3):
            twin.step(loss)
        assert {row.name for row in twin.report.rows} == {name for name, _ in twin.fused.named_parameters()}
        for part, (path, reason) in ZOO.items():
            found = [row for row in twin.report.rows if row.name.startswith(part)]
            assert found and all(row.path == path and reason in row.reason for row in found), (part, found)
        ids, _ = twin.batch()
        for model in (twin.stock, twin.fused):  # eval takes the encoder's fast path, which reads its children's weights
            model.eval()
        with torch.no_grad():
            stock, fused = twin.each(lambda model: model(ids))
        torch.testing.assert_close(fused, stock, rtol=1e-10, atol=1e-12)
        whole = twin.fused.embedding.weight.grad
        assert whole is None
        for model in (twin.stock, twin.fused):
            model.train()
        twin.step(loss, (torch.full((3, 7), 3), ids), update=False)  # nothing but padding: no gradient for the embedding
        assert not local(twin.fused.embedding.weight.grad).any()


@pytest.mark.parametrize(("world_size", "transport"), [slow(2, "shm"), (2, "tcp"), slow(3, "tcp")])
def test_modules_of_unusual_type(workers, world_size, transport):
    workers(world_size).run(zoo, transport)


def extra_names(rank: int, world_size: int) -> None:
    """A further parameter on a layer must not be taken for its bias."""

    def make() -> nn.Module:
        stack = Stack(6, 6, 6, bias=False)
        stack.layers[0].register_parameter("scale", nn.Parameter(torch.rand(6)))
        stack.layers[0].register_forward_pre_hook(lambda module, args: (args[0] * module.scale,))
        return stack.double()

    with Twin(make, config=settings("tcp")) as twin:
        assert twin.paths == {"layers.0.weight": "hooks", "layers.0.scale": "hooks", "layers.1.weight": "fused"}
        for _ in range(2):
            twin.step(mean_square, torch.randn(4, 6, generator=twin.generator).double())


def test_a_linear_with_a_further_parameter(workers):
    workers(2).run(extra_names)


def ignored(rank: int, world_size: int) -> None:
    """What FSDP2 was told to ignore is no business of ours: here the bias of one linear, and a whole one."""

    def shard(model: nn.Module) -> None:
        fully_shard(model, ignored_params={model.layers[0].bias, *model.layers[1].parameters()})

    with Twin(lambda: Stack(6, 9, 6, 4).double(), shard=shard, config=settings("tcp")) as twin:
        for _ in range(3):
            twin.step(mean_square, torch.randn(4, 6, generator=twin.generator).double(), update=False)
        assert twin.paths == {"layers.0.weight": "hooks", "layers.2.weight": "fused", "layers.2.bias": "fused"}
        assert "bias" in twin.rows["layers.0.weight"].reason


def test_ignored_parameters(workers):
    workers(2).run(ignored)


def embeddings(rank: int, world_size: int) -> None:
    def make() -> nn.Module:
        model = ByteModel(blocks=1).double()
        model.embedding = nn.Embedding(VOCABULARY, 24, padding_idx=-1, scale_grad_by_freq=True).double()
        return model

    with Twin(make) as twin:
        assert twin.paths["embedding.weight"] == "gathered"
        for _ in range(2):
            twin.step()


def test_embedding_options(workers):
    workers(2).run(embeddings)


# ---- dtypes ----------------------------------------------------------------------------------------------------------
class Cast(nn.Module):
    """One block for each dtype, a frozen bf16 embedding in front."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12).to(torch.bfloat16).requires_grad_(False)
        self.layers = nn.ModuleList([Block(12, 19).to(dtype) for dtype in dtypes])
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x.to(layer.up.weight.dtype))
        return self.head(x.float())


def dtypes(rank: int, world_size: int, transport: str) -> None:
    with Twin(lambda: Cast(torch.float32, torch.float64), config=settings(transport)) as twin:
        for _ in range(3):
            twin.step()
        assert twin.paths_of("up.") == twin.paths_of("head.") == {"fused"}
        assert twin.paths_of("embedding") == {"gathered"}
        kinds = {local(p).dtype for p in twin.fused.parameters()}
        assert kinds == {torch.float32, torch.float64, torch.bfloat16}
        assert all(p.grad.dtype == p.dtype for p in twin.fused.parameters() if p.grad is not None)


@pytest.mark.parametrize("transport", ["shm", slow("tcp")])
def test_layers_of_several_dtypes(workers, transport):
    workers(2).run(dtypes, transport)


def policies(rank: int, world_size: int) -> None:
    """One layer computes in bf16, another in fp32, each under the policy of its own fully_shard."""

    def shard(model: nn.Module) -> None:
        low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
        fully_shard(model.layers[1], mp_policy=low)
        fully_shard(model)

    with Twin(shard=shard) as twin:
        seen: tuple[list, list] = ([], [])
        for model, log in zip((twin.stock, twin.fused), seen, strict=True):
            for block in model.layers:
                block.up.register_forward_hook(lambda module, args, out, log=log: log.append(out.dtype))
        for _ in range(2):
            twin.step(rtol=0.02, update=False)
            twin.each(lambda model: model.zero_grad())
        assert seen[0] == seen[1] == [torch.float32, torch.bfloat16, torch.float32] * 2


def test_layers_with_policies_of_their_own(workers):
    workers(2).run(policies)


# ---- direct use of a weight ------------------------------------------------------------------------------------------
class ReadsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.layers[0](x), self.layers[1].weight, self.layers[1].bias)


def read_directly(rank: int, world_size: int) -> None:
    """A weight read past its module, served or excluded; see test_reads.py."""
    for exclude in ((), ("layers.1",)):
        with Twin(ReadsWeight, shard=shard_root, config=settings(exclude=exclude)) as twin:
            for _ in range(2):
                twin.step(mean_square, torch.randn(3, 6, generator=twin.generator).double())
    model = build(ReadsWeight, shard_root)
    with pytest.raises(ConfigError, match=r"layers\.1\.weight \(excluded by 'layers\.1'\)"):
        commfuse_dp.apply(model, settings(fuse="always", exclude=("layers.1",)))


def test_a_weight_read_past_its_module(workers):
    workers(2).run(read_directly)
