"""Losses, gradients and parameters over several steps: against stock FSDP2, between transports, from run to run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import commfuse_dp
from tests.parity.fsdp2.models import VOCABULARY, ByteModel, Stack, shard_layers, shard_root, token_batch, token_loss
from tests.parity.fsdp2.twin import SEED, Twin, build, gradients, local, settings
from tests.support.cells import slow


def train(rank: int, world_size: int, transport: str, order: str, wide: bool) -> str:
    with Twin(lambda: ByteModel().double() if wide else ByteModel(), config=settings(transport, order=order)) as twin:
        for _ in range(4):
            twin.step()
        assert set(twin.paths.values()) == {"fused", "gathered"}, twin.report
        return twin.report.transport


@pytest.mark.parametrize(
    ("world_size", "transport", "order", "dtype"),
    [
        (2, "tcp", "pairwise", "float32"),
        (3, "shm", "pairwise", "float32"),
        (3, "tcp", "ring", "float32"),
        slow(2, "shm", "pairwise", "float32"),
        slow(2, "tcp", "ring", "float32"),
        slow(3, "tcp", "pairwise", "float32"),
        slow(2, "shm", "pairwise", "float64"),
        slow(3, "tcp", "ring", "float64"),
    ],
)
def test_training_equals_stock(workers, world_size, transport, order, dtype):
    assert workers(world_size).run(train, transport, order, dtype == "float64") == [transport] * world_size


def train_root(rank: int, world_size: int) -> None:
    with Twin(shard=shard_root) as twin:
        for _ in range(3):
            twin.step()


def test_one_parameter_group_for_the_whole_model(workers):
    workers(2).run(train_root)


def gradients_of_three_steps(transport: str, **more) -> list[dict[str, torch.Tensor]]:
    model = build()
    commfuse_dp.apply(model, settings(transport, **more))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(SEED + torch.distributed.get_rank())
    out = []
    for _ in range(3):
        token_loss(model, token_batch(generator)).backward()
        out.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    commfuse_dp.remove(model)
    return out


def bitwise(rank: int, world_size: int) -> None:
    first = gradients_of_three_steps("shm")
    runs = {
        "again": ("shm", {}),
        "tcp": ("tcp", {}),
        "tcp, window of one slice": ("tcp", {"prefetch_bytes": 4000, "inbox_bytes": 4000, "slices_per_rank": 1}),
        "order ring": ("shm", {"order": "ring"}),
    }
    for what, (transport, more) in runs.items():
        for step, (one, other) in enumerate(zip(first, gradients_of_three_steps(transport, **more), strict=True)):
            unequal = [name for name in one if not torch.equal(one[name], other[name])]
            assert not unequal, f"{what}, step {step}: other bits in {unequal}"


@pytest.mark.parametrize("world_size", [2, slow(3)])
def test_bitwise_equal_from_run_to_run_and_across_transports(workers, world_size):
    workers(world_size).run(bitwise)


class Exact(Stack):
    """Small integers everywhere: every product and sum is exact in fp32, so that no order of summation can show."""

    def __init__(self) -> None:
        super().__init__(6, 37, 5, 4, activation=torch.relu)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-2, 3, parameter.shape))


def exact(rank: int, world_size: int, slices: int) -> None:
    with Twin(Exact, config=settings(slices_per_rank=slices), optimizer=lambda p: torch.optim.SGD(p, lr=0.5)) as twin:
        x = torch.randint(-2, 3, (4, 6), generator=twin.generator).float()
        twin.step(lambda model, x: model(x).sum(), x, rtol=0.0)


@pytest.mark.parametrize(("world_size", "slices"), [slow(2, 1), (2, 3), (4, 2)])
def test_integers_are_summed_exactly(workers, world_size, slices):
    workers(world_size).run(exact, slices)


def optimizers(rank: int, world_size: int, kind: str, built: str) -> None:
    def make(params):
        return torch.optim.AdamW(params, lr=1e-2, eps=1e-4, **{kind: True})

    before: list[torch.optim.Optimizer] = []
    prepare = (lambda model: before.append(make(model.parameters()))) if built == "before" else (lambda model: None)
    with Twin(optimizer=make, prepare=prepare) as twin:
        if before:
            twin.optimizers = tuple(before)
        for _ in range(3):
            twin.step()


@pytest.mark.parametrize(
    ("kind", "built"), [("foreach", "before"), ("fused", "after"), slow("foreach", "after"), slow("fused", "before")]
)
def test_adamw_built_before_or_after_apply(workers, kind, built):
    workers(2).run(optimizers, kind, built)


def clipping(rank: int, world_size: int) -> None:
    with Twin() as twin:
        for _ in range(3):
            twin.backward()
            stock, fused = twin.each(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1).full_tensor())
            torch.testing.assert_close(fused, stock, rtol=1e-6, atol=0)
            assert stock > 0.1  # it did clip
            twin.check_gradients(2e-6)  # the norm's own difference on top
            twin.update()


@pytest.mark.parametrize("world_size", [2, slow(3)])
def test_clip_grad_norm(workers, world_size):
    workers(world_size).run(clipping)


def alone(rank: int, world_size: int, transport: str) -> None:
    with Twin(config=settings(transport)) as twin:
        for _ in range(3):
            twin.step()
        c = twin.counters
        assert c.param_bytes_received == c.param_bytes_sent == c.grad_bytes_received == c.grad_bytes_sent == 0
        assert twin.report.minimum_bytes_per_step == 0


@pytest.mark.parametrize("transport", ["auto", slow("shm"), "tcp"])
def test_world_size_one_communicates_nothing(workers, transport):
    workers(1).run(alone, transport)


def switching(rank: int, world_size: int) -> None:
    with Twin() as twin:
        identities = {name: id(p) for name, p in twin.fused.named_parameters()}
        for applied in (True, False, True, False):
            for _ in range(2):
                twin.step()
            moved = twin.report.probe.counters.grad_bytes_received
            if applied:
                commfuse_dp.remove(twin.fused)
            else:
                twin.report = commfuse_dp.apply(twin.fused, settings("tcp"))
            if applied:
                assert moved > 0
            assert {name: id(p) for name, p in twin.fused.named_parameters()} == identities
        twin.step()


def test_remove_gives_stock_back_and_apply_works_again(workers):
    workers(2).run(switching)


def removed_equals_stock_bitwise(rank: int, world_size: int) -> None:
    with Twin() as twin:
        twin.step(update=False)
        twin.each(lambda model: model.zero_grad())
        commfuse_dp.remove(twin.fused)
        twin.step(rtol=0.0)
        assert all("forward" not in vars(module) for module in twin.fused.modules())
        twin.report = commfuse_dp.apply(twin.fused, settings())


def test_after_remove_nothing_of_ours_is_left(workers):
    workers(2).run(removed_equals_stock_bitwise)


def freeze_first(model: ByteModel) -> None:
    """What has no backward then."""
    for part in (model.embedding, model.layers[0]):
        part.requires_grad_(False)


def bytes_of_a_step(rank: int, world_size: int, keep: bool, freeze: bool = False) -> None:
    """Widths of whole cache lines on every rank, so that no padding travels; the vocabulary's 11 rows are uneven anyway."""
    width, hidden = 16 * world_size, 32 * world_size
    prepare = freeze_first if freeze else lambda model: None
    with Twin(lambda: ByteModel(width, hidden, 2), prepare=prepare, reshard_after_forward=not keep) as twin:
        twin.step()
        one = twin.counted(twin.step)
        weights = [p.numel() - local(p).numel() for p in twin.fused.parameters()]
        trained = [(name, param) for name, param in twin.fused.named_parameters() if param.requires_grad]
        fused = [param.numel() - local(param).numel() for name, param in trained if twin.paths[name] == "fused"]
        owed = sum(local(param).numel() for _, param in trained) * (world_size - 1)
        # Both passes of a fused layer read the weights where they lie; what is gathered whole is gathered once.
        assert one.param_bytes_received == 4 * (sum(weights) + sum(fused)), one
        assert one.grad_bytes_received == 4 * owed, one
        root_kept = one.param_bytes_received + one.grad_bytes_received - twin.report.minimum_bytes_per_step
        head = VOCABULARY * width - local(twin.fused.head.weight).numel()
        if not keep:  # FSDP2 keeps the root's parameters by default: its textbook minimum gathers the head once
            assert root_kept in (0, 4 * head), (root_kept, one, twin.report.minimum_bytes_per_step)


@pytest.mark.parametrize("world_size", [slow(2), 3])
def test_bytes_of_a_step_are_the_minimum(workers, world_size):
    workers(world_size).run(bytes_of_a_step, False)


def test_a_layer_before_which_nothing_is_trained_is_gathered_once(workers):
    workers(3).run(bytes_of_a_step, False, True)


def bytes_kept(rank: int, world_size: int) -> None:
    with Twin(config=settings("tcp"), reshard_after_forward=False) as twin:
        twin.step()
        one = twin.counted(twin.step)
        assert one.param_bytes_received + one.grad_bytes_received <= 1.1 * twin.report.minimum_bytes_per_step, one


def test_bytes_of_a_step_with_parameters_kept_after_forward(workers):
    workers(2).run(bytes_kept)


def shards_are_rows(rank: int, world_size: int) -> None:
    """The comparison itself can fail: a perturbed gradient is seen."""
    with Twin(lambda: Stack(5, 7, 3), shard=shard_layers) as twin:
        x = torch.randn(4, 5, generator=twin.generator)
        twin.backward(lambda model, x: model(x).square().mean(), x)
        if rank == 1:
            local(twin.fused.layers[0].weight.grad)[0, 0] *= 1 + 1e-4
        with pytest.raises(AssertionError, match="weight: relative difference"):
            twin.check_gradients()


def test_the_comparison_can_fail(workers):
    workers(2).run(shards_are_rows)
