"""Parameters that are read beside their layer's call in a forward: as stock, in values, gradients and kind."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import commfuse_dp
from commfuse_dp.observe import UnshardedPeak
from tests.parity.fsdp2.models import ByteModel, mean_square, shard_layers, shard_root, token_loss
from tests.parity.fsdp2.readers import WIDTH, Readers
from tests.parity.fsdp2.test_precision import Reference, check
from tests.parity.fsdp2.twin import Twin, settings
from tests.support import graphs
from tests.support.cells import slow

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
RTOL = 3e-6  # sums of several gradients of one parameter, in another order than stock's


def floats(twin: Twin) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=twin.generator, dtype=next(twin.stock.parameters()).dtype)


def wide(*patterns: str) -> Readers:
    return Readers(*patterns).double()


def every_pattern(rank: int, world_size: int, transport: str) -> None:
    with Twin(wide, config=settings(transport)) as twin:
        assert twin.paths_of("") == {"fused", "gathered", "hooks"}
        for _ in range(2):
            twin.step(mean_square, floats(twin))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                x = floats(twin)
                twin.check_outputs(lambda model, x=x: model(x))
        twin.step(mean_square, floats(twin))


@pytest.mark.parametrize(("world_size", "transport"), [slow(2, "shm"), (2, "tcp"), slow(3, "tcp")])
def test_every_pattern_trains_as_stock(workers, world_size, transport):
    workers(world_size).run(every_pattern, transport, timeout=120)


def low_precision(rank: int, world_size: int, policy: MixedPrecisionPolicy, patterns: tuple[str, ...]) -> None:
    make = partial(Readers, *patterns)
    with Twin(make, mp_policy=policy) as twin:
        for _ in range(2):
            x = floats(twin)
            twin.backward(mean_square, x, rtol=2**-6)
            reference = Reference(make).gradients(lambda model, batch: mean_square(model, batch[0]), (x,))
            check(twin, reference, 0.2)
            for optimizer in twin.optimizers:
                optimizer.zero_grad()


DTYPES = ("lora", "t5", "own dtype", "without gradient")  # what they compute depends on a parameter's dtype


@pytest.mark.parametrize(("world_size", "patterns"), [slow(2, ()), slow(3, ()), (2, DTYPES)], ids=["2", "3", "dtypes"])
def test_every_pattern_in_bf16(workers, world_size, patterns):
    workers(world_size).run(low_precision, BF16, patterns, timeout=120)


def with_a_half() -> Readers:
    model = Readers("lora", "half", "norm by hand")
    model.layers[1].up.half()
    return model


def shard_half(model: nn.Module, **options: Any) -> None:
    """A group of FSDP2 has one dtype."""
    fully_shard(model.layers[1].up, **options)
    shard_layers(model, **options)


def one_in_float16(rank: int, world_size: int) -> None:
    with Twin(with_a_half, shard=shard_half) as twin:
        assert twin.paths_of("layers.1.up") == {"fused"}
        for _ in range(3):
            twin.step(mean_square, floats(twin), rtol=2**-9, update=False)
            assert twin.fused.layers[1].up.weight.grad.dtype == torch.float16
            for optimizer in twin.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            twin.backwards = 0


def test_one_submodule_in_float16(workers):
    """What of it reaches other layers is rounded to 2^-11; a slice's product may be rounded to the number beside stock's."""
    workers(2).run(one_in_float16)


# ---- when a forward is ------------------------------------------------------------------------------------------------
SOME = ("beit", "penalty", "dora", "t5", "norm by hand")


def some() -> Readers:
    return wide(*SOME)


def checkpointed(reentrant: bool) -> Any:
    def prepare(model: Readers) -> None:
        model.call = lambda block, x: checkpoint(block, x, use_reentrant=reentrant)

    return prepare


def situations(rank: int, world_size: int, transport: str) -> None:
    config = settings(transport)
    for reentrant in (False, True):
        with Twin(some, config=config, prepare=checkpointed(reentrant)) as twin:
            for _ in range(2):
                twin.step(mean_square, floats(twin))
    for shard, options in ((shard_layers, {"reshard_after_forward": False}), (shard_root, {})):
        with Twin(some, config=config, shard=shard, **options) as twin:
            for _ in range(2):
                twin.step(mean_square, floats(twin))
    with Twin(some, config=config) as twin:
        for last in (False, False, True):  # accumulation
            twin.each(lambda model, last=last: model.set_requires_gradient_sync(last))
            twin.backward(mean_square, floats(twin))
        twin.check_gradients()
        twin.update()
        twin.step(
            lambda model, x: mean_square(model, x) + mean_square(model, x / 2), floats(twin)
        )  # two forwards, one backward
        twin.step(after_the_forward, floats(twin))
        with torch.no_grad():
            x = floats(twin)
            twin.check_outputs(lambda model: after_the_forward(model, x))
        for model in (twin.stock, twin.fused):
            model.reshard()  # an evaluation leaves the root unsharded
        twin.step(mean_square, floats(twin))


def two_forwards(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return mean_square(model, x) + mean_square(model, x / 2)


def after_the_forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss that projects by itself, with the weight of the root, which stays unsharded until the backward."""
    return F.linear(model(x), model.head.weight).square().mean()


@pytest.mark.parametrize(("world_size", "transport"), [slow(2, "shm"), slow(2, "tcp"), slow(3, "shm")])
def test_checkpointing_accumulation_resharding_and_reads_behind_the_forward(workers, world_size, transport):
    workers(world_size).run(situations, transport, timeout=180)


def outside(rank: int, world_size: int) -> None:
    with Twin(some) as twin:
        own = dict(twin.fused.named_parameters())
        assert all(type(param) is DTensor for param in own.values())
        x = floats(twin)
        twin.fused(x)
        layer = twin.fused.head
        whole = layer.weight  # the root's: unsharded until the backward
        assert isinstance(whole, nn.Parameter) and not isinstance(whole, DTensor) and whole is layer.weight
        state = twin.fused.state_dict()  # shards again, as stock
        assert all(type(value) is DTensor for value in state.values())
        twin.fused.load_state_dict(state)
        found = dict(twin.fused.named_parameters())
        assert all(found[name] is param for name, param in own.items())
        twin.step(mean_square, x)
        with torch.no_grad():
            twin.fused(x)
            twin.stock(x)
        twin.fused.zero_grad()  # finds the gradients, which are those of the sharded parameters
        for unsharded in (False, True, False):
            for model in (twin.stock, twin.fused):
                for module in (model, *model.layers):
                    (module.unshard if unsharded else module.reshard)()
            for name in ("head", "layers.0.up", "layers.4.norm"):
                stock, ours = twin.each(lambda model, name=name: model.get_submodule(name).weight)
                assert (type(stock) is DTensor) == (type(ours) is DTensor) == (not unsharded)
                assert (stock.shape, stock.dtype, stock.requires_grad) == (ours.shape, ours.dtype, ours.requires_grad)
                if unsharded:
                    assert torch.allclose(stock, ours, rtol=1e-9, atol=1e-12) and ours.is_leaf
        found = dict(twin.fused.named_parameters())
        assert all(found[name] is param and param.grad is None for name, param in own.items())
        twin.optimizers[0].zero_grad()
        twin.step(mean_square, x)


def test_outside_a_forward_parameters_are_sharded_and_the_same(workers):
    workers(2).run(outside, timeout=120)


def costs(rank: int, world_size: int) -> None:
    """Only values cost, once a forward; they are gone when FSDP2 shards again; the report names them."""
    kinds = ("lora", "t5", "own dtype")
    with Twin(partial(wide, *kinds), config=settings("tcp")) as twin:
        twin.step(mean_square, floats(twin))
        assert set(twin.report.reads) == {"table", "norm", "head"}  # of the root
    with Twin(partial(wide, "beit", "dictionaries")) as twin:
        for count in (1, 2, 3):
            twin.step(mean_square, floats(twin))
            reads = dict(twin.report.reads)
            # `beit` multiplies by the weight: for the backward it is gathered again, as FSDP2 does after its reshard
            assert reads == {"layers.0.up": 2 * count, "layers.1.down": 2 * count} | dict.fromkeys(
                ("table", "norm", "head"), count
            ), reads
        text = str(twin.report)
        assert "layers.0.up" in text[text.index("read beside") :] and "exclude" in text
    with Twin(partial(wide, "beit"), config=settings(exclude=("layers.0.up", "head", "norm", "table"))) as twin:
        twin.step(mean_square, floats(twin))
        assert not twin.report.reads


def test_only_values_cost_and_the_report_says_so(workers):
    workers(2).run(costs, timeout=120)


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.write: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.write is not None:
            with torch.no_grad():
                self.write(self.layers[0])
        return self.layers[0](x)


def writes(rank: int, world_size: int) -> list[str]:
    texts = []
    with Twin(Writer, shard=shard_root) as twin:
        for write in (lambda layer: layer.weight.clamp_(-1, 1), lambda layer: layer.bias.data[0].zero_()):
            twin.fused.write = write
            with pytest.raises(RuntimeError) as error:
                twin.fused(floats(twin))
            texts.append(str(error.value))
        twin.fused.write = None
        twin.fused.reshard()
        twin.step(mean_square, floats(twin), rtol=RTOL)
    return texts


def test_a_write_inside_a_forward_is_refused(workers):
    for weight, bias in workers(2).run(writes):
        assert "'layers.0.weight' was written to" in weight and "exclude=['layers.0']" in weight and "CommFuse" in weight
        assert "'layers.0.bias' was written to" in bias


def hot_path(rank: int, world_size: int) -> None:
    """Where nobody reads, nothing of this runs but a word per parameter group when FSDP2 shards it again."""
    with Twin(partial(ByteModel)) as twin:
        twin.step()
        called: Counter[str] = Counter()

        def profile(frame: Any, event: str, arg: Any) -> None:
            if event == "call" and frame.f_code.co_filename.endswith(("attach/reads.py", "ops/on_demand.py")):
                called[frame.f_code.co_name] += 1

        batch = twin.batch()
        twin.optimizers[1].zero_grad()
        sys.setprofile(profile)
        try:
            token_loss(twin.fused, batch).backward()
        finally:
            sys.setprofile(None)
        groups = 1 + len(twin.fused.layers)
        assert set(called) == {"close"} and called["close"] <= 2 * groups, called


def test_where_nobody_reads_nothing_is_paid(workers):
    workers(2).run(hot_path)


def compiled(rank: int, world_size: int, patterns: tuple[str, ...]) -> int:
    graphs.fresh()

    def prepare(model: Readers) -> None:
        for layer in model.layers:
            layer.compile(backend="aot_eager")

    with Twin(partial(wide, *patterns), prepare=prepare) as twin:
        for _ in range(2):
            twin.step(mean_square, floats(twin), rtol=1e-9)
        with torch.no_grad():
            x = floats(twin)
            twin.check_outputs(lambda model: model(x), 1e-9)
    return sum(counters["graph_break"].values())


COMPILED = ("t5", "beit", "penalty", "functional_call")
MORE_COMPILED = ("lora", "norm by hand", "own dtype", "without gradient", "dora", "mamba")


@pytest.mark.parametrize("patterns", [slow(COMPILED), *(slow((name,)) for name in MORE_COMPILED)])
def test_a_compiled_block_reads_what_stock_reads(workers, patterns):
    """In a graph the whole parameter is what an op of it gathers: no graph break."""
    for breaks in workers(2).run(compiled, patterns, timeout=240):
        assert breaks == 0 or patterns[0] not in COMPILED


# ---- what looks at all parameters ------------------------------------------------------------------------------------
def peak(rank: int, world_size: int) -> int:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    fully_shard(model)
    commfuse_dp.apply(model, settings("shm"))
    with UnshardedPeak(model) as seen:
        model(torch.ones(2, 8)).sum().backward()
    commfuse_dp.remove(model)
    return seen.nbytes


def test_what_stands_for_a_parameter_is_not_counted_as_memory(workers):
    assert workers(2).run(peak) == [0, 0]
