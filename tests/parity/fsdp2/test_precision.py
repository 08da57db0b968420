"""Low precision. Two ways to round differently can both be right, so the measure is a float64 model without any sharding:
our error may be at most twice stock FSDP2's (they round at the same places, but sum in another order)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.parity.fsdp2.models import ByteModel, Stack, shard_layers, shard_root, token_batch, token_loss
from tests.parity.fsdp2.twin import SEED, Twin, settings
from tests.support.cells import slow

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FLOOR = 1e-6  # where stock happens to be exact

POLICIES = {
    "bf16, reduced in fp32": {"param_dtype": BF16, "reduce_dtype": FP32},
    "bf16, reduced in fp32, output fp32": {"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": FP32},
    "bf16 throughout": {"param_dtype": BF16},
    "fp32, reduced in bf16": {"reduce_dtype": BF16},
    "fp16, reduced in fp32": {"param_dtype": FP16, "reduce_dtype": FP32},
}


def float_batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 12, generator=generator), torch.randn(6, 9, generator=generator)


def float_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, target = batch
    return (model(x) - target).square().mean()


def float_stack() -> Stack:
    return Stack(12, 37, 9)


class Reference:
    """The unsharded model in float64; gradients are means over the ranks."""

    def __init__(self, make) -> None:
        torch.manual_seed(SEED)
        self.model = copy.deepcopy(make()).double()

    def gradients(self, loss_of, batch: Any) -> dict[str, torch.Tensor]:
        wide = tuple(t.double() if t.is_floating_point() else t for t in batch)
        self.model.zero_grad()
        loss_of(self.model, wide).backward()
        out = {}
        for name, parameter in self.model.named_parameters():
            dist.all_reduce(parameter.grad)
            out[name] = parameter.grad / dist.get_world_size()
        return out


def errors(model: torch.nn.Module, reference: dict[str, torch.Tensor]) -> dict[str, float]:
    out = {}
    for name, parameter in model.named_parameters():
        whole = parameter.grad.full_tensor().double()
        out[name] = ((whole - reference[name]).norm() / reference[name].norm()).item()
    return out


def check(twin: Twin, reference: dict[str, torch.Tensor], coarse: float) -> None:
    stock, fused = twin.each(lambda model: errors(model, reference))
    for name, error in fused.items():
        assert stock[name] < coarse, f"stock itself is far off in {name}: {stock[name]}"
        assert error <= 2 * stock[name] + FLOOR, f"{name}: relative error {error:.3g}, stock {stock[name]:.3g}"
    dtypes = twin.each(lambda model: {name: p.grad.dtype for name, p in model.named_parameters()})
    assert dtypes[0] == dtypes[1]


def precision(rank: int, world_size: int, transport: str, policy: dict[str, Any], kind: str, shard: Any) -> None:
    make, loss, draw = (ByteModel, token_loss, token_batch) if kind == "tokens" else (float_stack, float_loss, float_batch)
    mp = MixedPrecisionPolicy(**policy)
    with Twin(make, shard=shard, config=settings(transport), mp_policy=mp) as twin:
        reference = Reference(make)
        seen: tuple[list, list] = ([], [])
        for model, dtypes in zip((twin.stock, twin.fused), seen, strict=True):
            for module in model.modules():
                module.register_forward_hook(lambda m, args, out, dtypes=dtypes: dtypes.append((args[0].dtype, out.dtype)))
        batch = draw(twin.generator)
        twin.each(lambda model: loss(model, batch).backward())
        assert seen[0] == seen[1]  # inputs and outputs of every module are cast alike
        check(twin, reference.gradients(loss, batch), coarse=0.2)
        for optimizer in twin.optimizers:  # and the sharded parameters stay what they were
            optimizer.step()
        assert {p.dtype for p in twin.fused.parameters()} == {FP32}


KINDS = ("tokens", "floats")


@pytest.mark.parametrize(
    ("kind", "policy"),
    # every policy once, every kind of input under some
    [
        (kind, name) if (number + (kind == "floats")) % 2 else slow(kind, name)
        for number, name in enumerate(POLICIES)
        for kind in KINDS
    ],
)
def test_mixed_precision(workers, policy, kind):
    # With one policy for all, only the root may change its output: stock's next layers want the compute dtype.
    shard = shard_root if "output_dtype" in POLICIES[policy] else shard_layers
    workers(2).run(precision, "shm", POLICIES[policy], kind, shard)


@pytest.mark.parametrize("policy", ["bf16, reduced in fp32", "fp32, reduced in bf16"])
def test_mixed_precision_over_tcp_and_three_ranks(workers, policy):
    workers(3).run(precision, "tcp", POLICIES[policy], "tokens", shard_root)


def uncast(rank: int, world_size: int) -> None:
    """Without the input cast, a model fed with the compute dtype works, and one fed with another raises as stock does."""
    mp = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, cast_forward_inputs=False)
    with Twin(float_stack, mp_policy=mp) as twin:
        reference = Reference(float_stack)
        x, target = float_batch(twin.generator)
        batch = x.to(BF16), target
        twin.each(lambda model: float_loss(model, batch).backward())
        check(twin, reference.gradients(float_loss, batch), coarse=0.2)
        twin.each(lambda model: model.zero_grad())
        for model in (twin.stock, twin.fused):
            with pytest.raises(RuntimeError, match="dtype"):
                float_loss(model, (x, target))


def test_cast_forward_inputs_off(workers):
    workers(2).run(uncast)


def autocast(rank: int, world_size: int, transport: str) -> None:
    with Twin(config=settings(transport)) as twin:
        reference = Reference(ByteModel)
        batch = twin.batch()

        def run(model: torch.nn.Module) -> torch.dtype:
            with torch.autocast("cpu", BF16):
                logits = model(batch[0])
                loss = token_loss(lambda ids: logits, batch)
            loss.backward()
            return logits.dtype

        assert twin.each(run) == (BF16, BF16)
        check(twin, reference.gradients(token_loss, batch), coarse=0.2)


@pytest.mark.parametrize("transport", [slow("shm"), "tcp"])
def test_autocast(workers, transport):
    workers(2).run(autocast, transport)


def low_precision_parameters(rank: int, world_size: int) -> None:
    """The parameters themselves are bf16: gradients come back in bf16, summed wide."""
    with Twin(lambda: ByteModel().to(BF16)) as twin:
        reference = Reference(lambda: ByteModel().to(BF16))
        batch = twin.batch()
        twin.each(lambda model: token_loss(model, batch).backward())
        check(twin, reference.gradients(token_loss, batch), coarse=0.2)


def test_bf16_parameters(workers):
    workers(2).run(low_precision_parameters)


def half_the_bytes(rank: int, world_size: int) -> None:
    moved = {}
    for name, policy in (("fp32", {}), ("bf16", {"param_dtype": BF16, "reduce_dtype": FP32})):
        with Twin(lambda: Stack(64, 64, 64, bias=False), mp_policy=MixedPrecisionPolicy(**policy)) as twin:
            x = torch.randn(3, 64, generator=twin.generator)
            moved[name] = twin.counted(
                lambda model=twin.fused, x=x: model(x).float().square().mean().backward()  # type: ignore[misc]
            )
            assert moved[name].grad_bytes_received > 0
    assert 2 * moved["bf16"].param_bytes_received == moved["fp32"].param_bytes_received
    # Partials travel as they were computed, in bf16, and are summed in fp32 at their owner.
    assert 2 * moved["bf16"].grad_bytes_received == moved["fp32"].grad_bytes_received


def test_bf16_moves_half_the_bytes(workers):
    workers(2).run(half_the_bytes)


def accumulated_in_fp32(rank: int, world_size: int) -> None:
    """Microbatches without synchronisation are added up in reduce_dtype, not in the compute dtype."""
    mp = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    with Twin(float_stack, mp_policy=mp) as twin:
        reference = Reference(float_stack)
        batches = [float_batch(twin.generator) for _ in range(8)]
        total: dict[str, torch.Tensor] = {}
        for number, batch in enumerate(batches):
            for model in (twin.stock, twin.fused):
                model.set_requires_gradient_sync(number == len(batches) - 1)
                float_loss(model, batch).backward()
            for name, gradient in reference.gradients(float_loss, batch).items():
                total[name] = total.get(name, 0) + gradient
        check(twin, total, coarse=0.2)


def test_accumulation_is_wide(workers):
    workers(2).run(accumulated_in_fp32)
