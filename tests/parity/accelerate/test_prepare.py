"""A real Accelerator with CommFuse asked for, against the same without: DDP, FSDP1, FSDP2."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from commfuse_dp.integrations.accelerate.prepare import check_run
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from commfuse_dp.errors import ConfigError
from tests.parity.accelerate.harness import Net, accelerator, commfuse, make, moved, reset, train, whole
from tests.parity.ddp.nets import worst, worst_tensor
from tests.support.cells import slow

# Against stock in the same process. DDP and FSDP1 with N = 2: the same sums (halving is exact). FSDP2: GEMM tiling by slices.
# N = 3: rounding of division. bf16: stock reduces in bf16, see tests/parity/fsdp1 and tests/parity/fsdp2.
FP32, BF16 = 2e-5, 5e-2
STEPS = 6


def run(
    kind: str, fused: bool, folder: str, steps: range, *, load: str = "", save: str = "", **options: Any
) -> tuple[Any, str]:
    """((losses, norms, state dict), what was said on stderr)."""
    said = io.StringIO()
    with commfuse(fused), contextlib.redirect_stderr(said):
        acc = accelerator(kind, **options)
        model, optimizer = make(acc, seed=99 if load else 3)
        before = whole(acc, model)
        if load:
            acc.load_state(f"{folder}/{load}")
        losses, norms = train(acc, model, optimizer, steps)
        after = whole(acc, model)
        assert moved(before, after)
        if save:
            acc.save_state(f"{folder}/{save}", safe_serialization=False)
        return (losses, norms, after), said.getvalue()


def check(found: Any, wanted: Any, limit: float) -> None:
    assert worst(found[0], wanted[0]) <= limit, (found[0], wanted[0])
    assert worst(found[1], wanted[1]) <= limit, (found[1], wanted[1])
    assert found[2].keys() == wanted[2].keys()
    if wanted[2]:
        assert worst_tensor(found[2], wanted[2]) <= limit


SAID = {
    "ddp": "CommFuse for DDP: {n} ranks, transport shm",
    "fsdp1": "CommFuse for FSDP1: {n} ranks, transport shm",
    "fsdp2": "CommFuse: {n} ranks, transport shm",
}


def twin(rank: int, world_size: int, kind: str, limit: float, options: dict[str, Any]) -> str:
    wanted, nothing = run(kind, False, "", range(STEPS), **options)
    found, said = run(kind, True, "", range(STEPS), **options)
    assert "CommFuse" not in nothing
    check(found, wanted, limit)
    assert (SAID[kind].format(n=world_size) in said) == (rank == 0), said
    return said


def cells() -> Iterator[Any]:
    quick = {("ddp", "no", 1), ("fsdp1", "no", 1), ("fsdp2", "bf16", 3)}
    for cell in itertools.product(("ddp", "fsdp1", "fsdp2"), ("no", "bf16"), (1, 3)):
        yield cell if cell in quick else slow(*cell)


@pytest.mark.parametrize(("kind", "precision", "accumulation"), list(cells()))
def test_training_equals_stock(workers, kind, precision, accumulation):
    options = {"mixed_precision": precision, "gradient_accumulation_steps": accumulation}
    said = workers(2).run(twin, kind, BF16 if precision == "bf16" else FP32, options)[0]
    if kind == "fsdp2":
        assert "fused" in said and "stock" not in said, said


@pytest.mark.slow
def test_three_processes(workers):
    """FSDP2 only: tests/parity/ddp and fsdp1 have the others, and each more process imports Accelerate first."""
    workers(3).run(twin, "fsdp2", FP32, {})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ddp", {"ddp": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1, "static_graph": True}}),
        ("fsdp1", {"fsdp": {"sharding_strategy": "SHARD_GRAD_OP", "use_orig_params": False}}),
        slow("fsdp2", {"fsdp": {"reshard_after_forward": False}}),
        ("fsdp2", {"fsdp": {"activation_checkpointing": True}}),
    ],
    ids=["ddp", "fsdp1", "fsdp2-keeps", "fsdp2-checkpointing"],
)
def test_options_of_accelerate(workers, kind, options):
    workers(2).run(twin, kind, FP32, options)


def carried_over(rank: int, world_size: int, kind: str, folder: str) -> None:
    """save_state of either kind into load_state of the other, and on from there, as stock does with a checkpoint of its own.

    (Not as a run without interruption: a new optimizer of FSDP1 does not get back all of its state in stock Accelerate 1.15.)
    """
    begun, _ = run(kind, False, folder, range(2), save="stock")
    wanted, _ = run(kind, False, folder, range(2, 4), load="stock")
    fused, _ = run(kind, True, folder, range(2), save="fused")
    check(fused, begun, FP32)
    check(run(kind, True, folder, range(2, 4), load="stock")[0], wanted, FP32)
    check(run(kind, False, folder, range(2, 4), load="fused")[0], wanted, FP32)


@pytest.mark.parametrize("kind", ["ddp", slow("fsdp1"), "fsdp2"])
def test_save_state_and_load_state_both_ways(workers, tmp_path, kind):
    workers(2).run(carried_over, kind, str(tmp_path))


def llama(rank: int, world_size: int) -> list[tuple[list[float], list[float], str]]:
    """A transformers model, whose outputs are dataclasses, under FSDP2."""
    from transformers import LlamaConfig, LlamaForCausalLM

    results = []
    for fused in (False, True):
        said = io.StringIO()
        with commfuse(fused), contextlib.redirect_stderr(said):
            acc = accelerator("fsdp2", layers=["LlamaDecoderLayer"])
            torch.manual_seed(3)
            sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 52, "max_position_embeddings": 32}
            heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
            model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
            model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4))
            losses, norms = [], []
            for step in range(5):
                generator = torch.Generator().manual_seed(10 * step + rank)
                tokens = torch.randint(0, 64, (2, 9), generator=generator)
                loss = model(input_ids=tokens, labels=tokens).loss
                acc.backward(loss)
                norms.append(float(acc.clip_grad_norm_(model.parameters(), 1.0).full_tensor()))
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        results.append((losses, norms, said.getvalue()))
    return results


@pytest.mark.slow
def test_a_transformers_model(workers):
    stock, fused = workers(2).run(llama)[0]
    assert worst(fused[0], stock[0]) <= FP32 and worst(fused[1], stock[1]) <= FP32
    assert "fused" in fused[2] and "CommFuse" not in stock[2]


# ---- what is left alone, and said so ---------------------------------------------------------------------------------
def own_hook(rank: int, world_size: int) -> str:
    """Registered by Accelerate for the script, and by the script itself after `prepare`."""
    from accelerate import DDPCommunicationHookType

    said = io.StringIO()
    with commfuse(True), contextlib.redirect_stderr(said):
        acc = accelerator("ddp")
        model, optimizer = make(acc)
        model.register_comm_hook(None, allreduce_hook)
        train(acc, model, optimizer, range(2))
    return said.getvalue() + run("ddp", True, "", range(2), ddp={"comm_hook": DDPCommunicationHookType.FP16})[1]


def test_a_hook_of_the_script_stays(workers):
    said = workers(2).run(own_hook)[0]
    assert "CommFuse leaves DDP as it is: the script set a communication hook of its own (fp16_compress_hook)" in said
    assert "CommFuse leaves DDP as it is: the script set a communication hook of its own (allreduce_hook)" in said


def own_hook_of_one(rank: int, world_size: int, where: int) -> str:
    """Which other ranks would wait for: CommFuse's hook is set up by all of them together."""
    said = io.StringIO()
    with commfuse(True), contextlib.redirect_stderr(said):
        acc = accelerator("ddp")
        model, optimizer = make(acc)
        if rank == where:
            model.register_comm_hook(None, allreduce_hook)
        train(acc, model, optimizer, range(2))
    return said.getvalue()


@pytest.mark.parametrize("where", [0, 1])
def test_a_hook_on_one_rank_stays_and_the_others_train_as_stock(workers, where):
    said = workers(2).run(own_hook_of_one, where, timeout=60)[0]
    place = "on rank 1 " if where else ""
    assert f"CommFuse leaves DDP as it is: {place}the script set a communication hook of its own (allreduce_hook)" in said


def hybrid(rank: int, world_size: int) -> str:
    """A model that the script wrapped itself, which Accelerate takes as it is."""
    said = io.StringIO()
    with commfuse(True), contextlib.redirect_stderr(said):
        acc = accelerator("fsdp1")
        mesh = torch.distributed.init_device_mesh("cpu", (1, world_size))
        strategy = ShardingStrategy.HYBRID_SHARD
        model = FullyShardedDataParallel(Net(), device_mesh=mesh, sharding_strategy=strategy, device_id=torch.device("cpu"))
        assert acc.prepare_model(model) is model
    return said.getvalue()


def test_what_hooks_cannot_do_is_left_to_fsdp1(workers):
    said = workers(2).run(hybrid)[0]
    assert "CommFuse leaves FSDP1 as it is: FSDP1 module '(root)' uses HYBRID_SHARD" in said


def insisted(rank: int, world_size: int, kind: str) -> None:
    with commfuse(True, COMMFUSE_FUSE="always"):
        acc = accelerator(kind)
        with pytest.raises(ConfigError, match="fuse='always'"):
            make(acc)


def test_fusion_insisted_on(workers):
    for kind in ("ddp", "fsdp1"):
        workers(2).run(insisted, kind)


def wrong_settings(rank: int, world_size: int) -> None:
    with commfuse(True, COMMFUSE_TRANSPORT="smoke"), pytest.raises(ConfigError, match="COMMFUSE_TRANSPORT='smoke'"):
        accelerator("fsdp2")


def test_wrong_settings_are_refused_before_a_model_is_built(workers):
    workers(2).run(wrong_settings)


def alone(rank: int, world_size: int) -> list[str]:
    """Started by a launcher, but nobody has told Accelerate of the CPU."""
    from accelerate import Accelerator

    said = []
    for started in (world_size, 1):
        caught, out = io.StringIO(), io.StringIO()
        handler = logging.StreamHandler(caught)
        logging.getLogger("commfuse_dp").addHandler(handler)
        variables = {"RANK": str(rank), "WORLD_SIZE": str(started)}
        with commfuse(True), mock.patch.dict(os.environ, variables), contextlib.redirect_stderr(out):
            reset()
            assert Accelerator().num_processes == 1
        logging.getLogger("commfuse_dp").removeHandler(handler)
        said.append(caught.getvalue() + out.getvalue())
    return said


def test_processes_that_train_alone_are_told(workers):
    (warned, single), (quiet, _) = workers(2).run(alone)
    assert "2 processes each train alone" in warned and "ACCELERATE_USE_CPU=1" in warned
    assert "train alone" not in quiet + single
    assert "CommFuse has nothing to do: this is a run of one process" in single


@pytest.mark.parametrize("kind", ["DEEPSPEED", "NO"])
def test_ranks_that_deepspeed_will_connect_do_not_train_alone(kind, monkeypatch, caplog):
    """Nor is it CommFuse that does nothing there. (On a CPU that Accelerate was not told of it knows of one process.)"""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("commfuse_dp.autoload._warned", set())
    check_run(types.SimpleNamespace(num_processes=1, distributed_type=kind, device="cpu"))
    assert ("train alone" in caplog.text) == (kind == "NO")


def prepared_twice(rank: int, world_size: int) -> str:
    said = io.StringIO()
    with commfuse(True), contextlib.redirect_stderr(said):
        acc = accelerator("ddp")
        model, optimizer = make(acc)
        assert acc.prepare(model) is model
        frozen = acc.prepare_model(torch.nn.Linear(3, 3).requires_grad_(False), evaluation_mode=True)
        frozen(torch.zeros(3))
        if rank == 0:  # as a script that evaluates on the main process does
            model.eval()
            with torch.no_grad():
                model.module(torch.zeros(1, 24))
                model(torch.zeros(1, 24))
        model.train()
        assert not said.getvalue()
        train(acc, model, optimizer, range(2))
    return said.getvalue()


def test_preparing_twice_hooks_once(workers):
    assert workers(2).run(prepared_twice)[0].count("CommFuse for DDP") == 1
