"""DeepSpeed's Ulysses, served, against DeepSpeed itself in the same processes: values, gradients, what is said."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from commfuse_dp.integrations.ulysses import LocalAttention, compat, report, serve, settings
from torch import nn

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.errors import CommFuseError, TransportError
from tests.parity.deepspeed.pair import launched
from tests.support.cells import slow

LENGTH, WIDTH = 6, 4


@contextmanager
def deepspeed_at(rank: int, n: int) -> Iterator[Any]:
    """DeepSpeed, and at the end nothing of ours in it."""
    gc.collect()  # the report names the attention of tests before this one for as long as it lives
    with launched(rank, n) as deepspeed:
        settings.configure(None)  # the block of an engine that was here before: stock would be served by it
        deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
        try:
            yield deepspeed
        finally:
            dist.barrier()
            settings.configure(None)
            give_back()


def give_back() -> None:
    """DeepSpeed has its own forwards again; attention that is served afterwards opens other transports."""
    for home, name in compat.CLASSES.items():
        cls = getattr(sys.modules.get(home), name, None)
        if cls is not None and hasattr(cls.forward, "commfuse"):
            cls.forward = cls.forward.__wrapped__
    for opened in serve._transports.values():
        for transport, _ in opened.values():
            transport.close()
    serve._transports.clear()


@contextmanager
def served(module: Any, **options: Any) -> Iterator[None]:
    settings.configure(CommFuseConfig(deadline_s=20.0, inbox_bytes=1 << 20, **options))
    serve.install(module)
    with mock.patch.object(dist, "all_to_all_single", side_effect=AssertionError("an all-to-all of DeepSpeed")):
        yield
    settings.configure(None)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(ours: list[torch.Tensor], stock: list[torch.Tensor]) -> None:
    for a, b in zip(ours, stock, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
        assert (a - b).norm() <= 1e-6 * b.norm()


# ---- DistributedAttention --------------------------------------------------------------------------------------------
def layer(rank: int, n: int, causal: bool, batch_first: bool, groups: int) -> None:
    with deepspeed_at(rank, n):
        from deepspeed.sequence import layer as home

        attention = home.DistributedAttention(
            LocalAttention(causal=causal, batch_first=batch_first), dist.group.WORLD, 2, 1 if batch_first else 0
        )

        def step() -> list[torch.Tensor]:
            torch.manual_seed(rank)
            lead = (2, LENGTH) if batch_first else (LENGTH, 2)
            q, k, v = (torch.randn(*lead, heads, WIDTH, requires_grad=True) for heads in (2 * n, groups, groups))
            o = attention(q, k, v, 0 if batch_first else 1)
            o.backward(torch.randn(o.shape))
            return [o.detach(), q.grad, k.grad, v.grad]  # type: ignore[list-item]

        stock = step()
        with served(home):
            close(step(), stock)
        (row,) = [row for row in report().rows if row.name == "DistributedAttention(LocalAttention)"]
        assert row.path == "ulysses" and "transport shm" in row.reason


@pytest.mark.parametrize(("n", "causal", "batch_first", "groups"), [(2, True, True, 2), slow(4, False, False, 8)])
def test_distributed_attention(workers: Any, n: int, causal: bool, batch_first: bool, groups: int) -> None:
    workers(n).run(layer, causal, batch_first, groups, timeout=120)


def another_transport(rank: int, n: int) -> None:
    with deepspeed_at(rank, n):
        from deepspeed.sequence import layer as home

        attention = home.DistributedAttention(LocalAttention(causal=True), dist.group.WORLD, 2, 1)
        inputs = [tensor.requires_grad_() for tensor in torch.randn(3, 2, LENGTH, n, WIDTH, generator=seeded(rank))]
        weights = torch.randn(2, LENGTH, n, WIDTH, generator=seeded(n + rank))

        def gradients(o: torch.Tensor) -> list[torch.Tensor]:
            return [o.detach(), *torch.autograd.grad(o, inputs, weights)]

        opened: list[Any] = []

        def recording(*args: Any, **kwargs: Any) -> Any:
            opened.append(stock_open(*args, **kwargs))
            return opened[-1]

        stock, stock_open = gradients(attention(*inputs, 0)), serve.open_for
        with mock.patch.object(serve, "open_for", side_effect=recording):
            with served(home, transport="shm"):
                before = attention(*inputs, 0)
            with served(home, transport="p2p"):
                after = attention(*inputs, 0)
                close(gradients(after), stock)
                close(gradients(before), stock)  # over the transport that its forward had
            with served(home, transport="shm"):
                close(gradients(attention(*inputs, 0)), stock)
            with served(home, transport="symmetric"), pytest.raises(TransportError, match="CUDA"):
                attention(*inputs, 0)
        assert [transport.name for transport, _ in opened] == ["shm", "p2p"]  # each opened once


def test_the_next_configuration_gets_the_transport_that_it_asks_for(workers: Any) -> None:
    workers(2).run(another_transport, timeout=120)


def one_has_none(rank: int, n: int, when: str) -> None:
    with deepspeed_at(rank, n):
        from deepspeed.sequence import layer as home

        attention = home.DistributedAttention(LocalAttention(causal=True), dist.group.WORLD, 2, 1)
        inputs = [torch.randn(2, LENGTH, n, WIDTH, generator=seeded(rank)) for _ in range(3)]
        stock, opened = attention(*inputs, 0), []

        def failing(*args: Any, **kwargs: Any) -> Any:
            if rank == n - 1 and when == "before":
                raise OSError("no memory, on purpose")
            opened.append(original(*args, **kwargs))
            if rank == n - 1:
                raise OSError("no memory, on purpose")
            return opened[-1]

        original = serve.open_for
        with served(home, transport="shm"):
            kind = OSError if rank == n - 1 else CommFuseError
            with (
                mock.patch.object(serve, "open_for", failing),
                pytest.raises(kind, match="no memory, on purpose") as error,
            ):
                attention(*inputs, 0)
            assert rank == n - 1 or f"rank {n - 1}" in str(error.value)
            assert not serve._transports[dist.group.WORLD]
            close([attention(*inputs, 0)], [stock])
        for transport, _ in opened:  # that of the rank that failed had no owner yet
            transport.close()


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_a_rank_that_can_open_no_transport_leaves_nobody_waiting(workers: Any, when: str) -> None:
    workers(2).run(one_has_none, when, timeout=60)


# ---- UlyssesSPAttentionHF --------------------------------------------------------------------------------------------
@contextmanager
def llama(deepspeed: Any, n: int, heads: int, groups: int, **more: Any) -> Iterator[tuple[Any, Any]]:
    """(a Llama whose attention is DeepSpeed's, mpu)"""
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as state
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    torch.manual_seed(7)
    sizes = {"hidden_size": heads * 4, "intermediate_size": 24, "vocab_size": 31, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=groups, attn_implementation="sdpa")
    model = LlamaForCausalLM(config)
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model, "sdpa", sequence_parallel_size=n, micro_batch_size=2, seq_length_is_variable=True, **more
        )
        yield model, mpu
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = before
        state._release_sequence_parallel_groups()
        deepspeed.utils.groups.mpu = None  # an engine leaves it for those that come later


def tokens(rank: int, n: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, positions) of a rank."""
    ids = torch.randint(0, 31, (2, n * length), generator=torch.Generator().manual_seed(length))
    positions = torch.arange(n * length).expand(2, -1)
    return ids.chunk(n, 1)[rank].contiguous(), positions.chunk(n, 1)[rank].contiguous()


def hugging_face(rank: int, n: int, heads: int, groups: int) -> None:
    with deepspeed_at(rank, n) as deepspeed, llama(deepspeed, n, heads, groups) as (model, _):
        model.double()
        from deepspeed.runtime.sequence_parallel import ulysses_sp as home

        def step(length: int) -> list[torch.Tensor]:
            ids, positions = tokens(rank, n, length)
            model.zero_grad()
            logits = model(input_ids=ids, position_ids=positions).logits
            logits.sin().sum().backward()
            return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

        lengths = (LENGTH, 1, 5)  # another number of tokens in each step
        stock = [step(length) for length in lengths]
        with served(home), mock.patch.object(dist, "all_gather", side_effect=AssertionError("of position_ids")):
            for length, wanted in zip(lengths, stock, strict=True):
                for a, b in zip(step(length), wanted, strict=True):
                    assert (a - b).norm() <= 1e-12 * b.norm().clamp(min=1.0)  # gradients of scores nearly cancel
        (row,) = [row for row in report().rows if row.name.startswith("UlyssesSPAttentionHF")]
        assert row.path == "ulysses"


@pytest.mark.slow
@pytest.mark.parametrize(("n", "heads", "groups"), [(2, 4, 4), (4, 8, 2), (4, 8, 4)])
def test_hugging_face(workers: Any, n: int, heads: int, groups: int) -> None:
    """Also with fewer key heads than ranks."""
    workers(n).run(hugging_face, heads, groups, timeout=240)


def ended(engine: Any) -> None:
    from commfuse_dp.integrations.deepspeed import engine_of, remove

    if engine_of(engine) is not None:
        remove(engine)
    engine.destroy()


def with_a_block(rank: int, n: int, block: dict[str, Any] | None) -> tuple[list[float], list[str]]:
    with deepspeed_at(rank, n) as deepspeed, llama(deepspeed, n, 4, 2) as (model, mpu):
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4, "torch_adam": True}},
            "sequence_parallel_size": n,
            **({} if block is None else {"commfuse": block}),
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=mpu)
        losses = []
        for length in itertools.islice(itertools.cycle((LENGTH, 5)), 4):
            ids, positions = tokens(rank, n, length)
            logits = engine(input_ids=ids, position_ids=positions).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        rows = [f"{row.path}: {row.reason}" for row in report().rows if row.name.startswith("UlyssesSPAttentionHF")]
        ended(engine)
        return losses, rows


@pytest.mark.slow
def test_the_block_switches_it_on_in_an_unmodified_script(workers: Any) -> None:
    pool = workers(2)
    stock = pool.run(with_a_block, None, timeout=240)
    off = pool.run(with_a_block, {"enabled": False}, timeout=240)
    ours = pool.run(with_a_block, {"deadline_s": 20.0, "inbox_bytes": 1 << 20}, timeout=240)
    for (wanted, nothing), (same, none), (found, rows) in zip(stock, off, ours, strict=True):
        assert nothing == none == [] and same == wanted
        assert rows and all(row.startswith("ulysses: ") for row in rows)
        assert found == pytest.approx(wanted, rel=1e-5)


# ---- beside fused gradients ------------------------------------------------------------------------------------------
class Layers(nn.Module):
    """Attention over the ranks between linears that ZeRO shards over the same ranks. DeepSpeed knows nothing of the former."""

    def __init__(self, layers: int = 3, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        from deepspeed.sequence.layer import DistributedAttention

        self.heads = heads
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.attention = DistributedAttention(LocalAttention(causal=True), dist.group.WORLD, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(x).unflatten(2, (-1, self.heads, x.shape[2] // self.heads)).unbind(2)
            x = x + out(self.attention(q, k, v, 0).flatten(2))
        return x


def beside_zero(rank: int, n: int, stage: int, block: dict[str, Any] | None) -> tuple[list[float], list[str], bool]:
    with deepspeed_at(rank, n) as deepspeed:
        from commfuse_dp.integrations.deepspeed import engine_of

        torch.manual_seed(3)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4, "torch_adam": True}},
            **({} if block is None else {"commfuse": block}),
        }
        model = Layers()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        losses = []
        torch.manual_seed(rank)
        for _ in range(4):
            loss = (engine(torch.randn(2, LENGTH, 16)) - 1).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        paths = [row.path for row in report().rows if row.name == "DistributedAttention(LocalAttention)"]
        fused = engine_of(engine) is not None
        ended(engine)
        return losses, paths, fused


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_beside_fused_gradients(workers: Any, stage: int) -> None:
    """Room for a message or two: ranks wait for credit all the time, and not in a circle."""
    pool = workers(2)
    stock = pool.run(beside_zero, stage, None, timeout=120)
    ours = pool.run(beside_zero, stage, {"deadline_s": 20.0, "inbox_bytes": 4096}, timeout=120)
    for (wanted, _, _), (found, paths, fused) in zip(stock, ours, strict=True):
        assert fused and "ulysses" in paths
        assert found == pytest.approx(wanted, rel=1e-5)
