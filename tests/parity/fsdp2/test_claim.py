"""Fused layers by public names alone: `claim` before `fully_shard`, against stock FSDP2."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commfuse_dp.integrations import fsdp2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import commfuse_dp
from commfuse_dp import ConfigError
from tests.parity.fsdp2.models import ByteModel, shard_layers, token_batch, token_loss
from tests.parity.fsdp2.test_copies import of_same_dictionary
from tests.parity.fsdp2.twin import RTOL, RTOL64, SEED, compare, gradients, local, settings
from tests.support.cells import slow

INTEGRATION = str(Path(fsdp2.__file__).parent)
PRIVATE = ("_get_fsdp_state",)  # every other private name of FSDP2 is reached through this one
STEPS = 3


class Odd(ByteModel):
    """With a parameter that no layer type claims: it stays in FSDP2's root group."""

    def __init__(self, width: int = 24) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make(seed: int = SEED, kind: Callable[[], nn.Module] = Odd) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def claimed_model(
    seed: int = SEED, kind: Callable[[], nn.Module] = Odd, *, claiming: dict[str, Any] | None = None, **options: Any
) -> tuple[nn.Module, Any]:
    """options: for `fully_shard`, and for `claim` where it has them too."""
    model = make(seed, kind)
    shared = {key: options[key] for key in ("mesh", "mp_policy", "reshard_after_forward") if key in options}
    claimed = commfuse_dp.claim(model, **(claiming or {}), **shared)
    shard_layers(model, ignored_params=claimed.params, **options)
    return model, claimed


def stock_model(seed: int = SEED, kind: Callable[[], nn.Module] = Odd, **options: Any) -> nn.Module:
    model = make(seed, kind)
    shard_layers(model, **options)
    return model


@contextmanager
def blind() -> Iterator[list[str]]:
    """A torch whose private names the integration must not touch: the probe finds them missing, using them is an error."""
    from commfuse_dp.integrations.fsdp2 import compat

    touched: list[str] = []
    probe = compat.probe
    saved = {name: FSDPModule.__dict__[name] if name in FSDPModule.__dict__ else getattr(FSDPModule, name) for name in PRIVATE}
    slots = {name: DTensor.__dict__[name] for name in ("_local_tensor", "_spec") if name in DTensor.__dict__}

    def watched(name: str, get: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def reader(self: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            if caller.startswith(INTEGRATION):
                touched.append(f"{name} in {caller}")
                raise AttributeError(f"{name} is private and missing here")
            return get(self)

        return reader

    functions = ("param_groups", "users", "local_tensor", "shard_group", "replicate_group", "keeps_after_forward")
    functions += ("reshards_to_smaller_mesh", "detach_param", "reattach_params", "set_sharded_grad", "collectives")
    functions += ("has_forward_prefetch",)
    kept = {name: getattr(compat, name) for name in functions}

    def forbidden(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kw: Any) -> Any:
            touched.append(f"compat.{name}")
            raise AttributeError(f"compat.{name} needs private names")

        return call

    try:
        compat.probe = lambda model: "torch 9.9: FSDPModule has no _get_fsdp_state"
        for name in functions:
            setattr(compat, name, forbidden(name))
        for name, method in saved.items():
            setattr(FSDPModule, name, watched(name, lambda self, method=method: method(self)))
        for name, slot in slots.items():
            setattr(DTensor, name, property(watched(name, slot.__get__), slot.__set__))
        yield touched
    finally:
        compat.probe = probe
        for name, function in kept.items():
            setattr(compat, name, function)
        for name, method in saved.items():
            setattr(FSDPModule, name, method)
        for name, slot in slots.items():
            setattr(DTensor, name, slot)


def train(
    stock: nn.Module,
    fused: nn.Module,
    *,
    rtol: float = RTOL,
    loss_rtol: float | None = None,
    steps: int = STEPS,
    clip: float | None = None,
    optimizers: Any = None,
) -> None:
    """Steps of both on the same data; gradients are compared, then the parameters made equal again (see twin.py)."""
    generator = torch.Generator().manual_seed(SEED + dist.get_rank())
    both = (stock, fused)
    optimizers = optimizers or [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in both]
    for _ in range(steps):
        batch = token_batch(generator)
        losses, norms = [], []
        for model in both:
            loss = token_loss(model, batch)
            loss.backward()
            losses.append({"loss": loss.detach()})
        compare("losses", *losses, loss_rtol or rtol)
        compare("gradients", *map(gradients, both), rtol)
        if clip is not None:
            norms = [nn.utils.clip_grad_norm_(model.parameters(), clip) for model in both]
            compare("norms", *({"norm": norm.full_tensor()} for norm in norms), rtol)
            compare("clipped gradients", *map(gradients, both), 4 * rtol)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        equalise(stock, fused, 2e-5 if rtol < 1e-3 else 1e-1)


@torch.no_grad()
def equalise(stock: nn.Module, fused: nn.Module, rtol: float) -> None:
    rows = [{name: local(p.detach()) for name, p in model.named_parameters()} for model in (stock, fused)]
    compare("parameters", *rows, rtol)
    for name, parameter in rows[1].items():
        parameter.copy_(rows[0][name])


# ---- numbers ---------------------------------------------------------------------------------------------------------
def numbers(rank: int, world_size: int, transport: str, reshard: bool) -> None:
    stock = stock_model(reshard_after_forward=reshard)
    fused, claimed = claimed_model(reshard_after_forward=reshard)
    assert all(isinstance(param, DTensor) and isinstance(param, nn.Parameter) for param in claimed.params)
    report = commfuse_dp.apply(fused, settings(transport))
    train(stock, fused, clip=0.5)
    rows = {row.name: row for row in report.rows}
    assert rows.keys() == {name for name, _ in fused.named_parameters()}
    assert rows["layers.0.up.weight"].path == "fused" and rows["embedding.weight"].path == "gathered"
    assert "claimed" in rows["layers.0.up.weight"].reason
    assert {name for name, row in rows.items() if row.path == "hooks"} == {"scale"}
    counters = report.probe.counters
    before = counters.snapshot()
    token_loss(fused, token_batch(torch.Generator())).backward()
    moved = counters.since(before)
    minimum = report.minimum_bytes_per_step
    assert 0.5 * minimum <= moved.param_bytes_received + moved.grad_bytes_received <= 1.1 * minimum + 512, (moved, minimum)
    assert counters.order_misses == 0
    commfuse_dp.remove(fused)


@pytest.mark.parametrize(("world_size", "transport"), [(2, "shm"), (3, "tcp")])
def test_gradients_clipping_and_updates(workers, world_size, transport):
    workers(world_size).run(numbers, transport, world_size == 2)


def on_and_off(rank: int, world_size: int) -> None:
    """Plain, applied, removed, applied again: always right, and by public names only. fp64: the steps need no new start."""
    kind = lambda: Odd().double()  # noqa: E731
    stock, (fused, _) = stock_model(kind=kind), claimed_model(kind=kind)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4, fused=True) for m in (stock, fused)]
    with blind() as touched:
        for on in (False, True, False, True):
            if on:
                report = commfuse_dp.apply(fused, settings())
            train(stock, fused, rtol=RTOL64, steps=2, clip=0.5, optimizers=optimizers)
            with torch.no_grad():
                batch = token_batch(torch.Generator().manual_seed(7))
                compare("evaluation", *({"loss": token_loss(model, batch)} for model in (stock, fused)), RTOL64)
            if on:
                assert {row.path for row in report.rows} == {"fused", "gathered", "hooks"}
                commfuse_dp.remove(fused)
    assert touched == []
    with pytest.raises(ConfigError, match="remove"):
        commfuse_dp.remove(fused)


@pytest.mark.parametrize("world_size", [2, slow(3)])
def test_applied_and_removed_by_public_names_only(workers, world_size):
    workers(world_size).run(on_and_off)


def low_precision(rank: int, world_size: int, reduce: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    stock = stock_model(mp_policy=policy)
    fused, _ = claimed_model(mp_policy=policy)
    report = commfuse_dp.apply(fused, settings())
    before = report.probe.counters.snapshot()
    # One rounding of a bf16 activation more or less, here and there: 2**-8 each, over four layers. Measured: below 0.02.
    train(stock, fused, rtol=2.0**-4, loss_rtol=2.0**-7)
    moved = report.probe.counters.since(before)
    remote = sum(p.numel() - local(p).numel() for p in fused.parameters())
    assert moved.param_bytes_received <= STEPS * 2 * 2 * remote * 1.05 + 4096  # two bytes an element, at most two gathers
    assert all(p.dtype == torch.float32 and p.grad is None for p in fused.parameters())
    commfuse_dp.remove(fused)
    train(stock, fused, rtol=2.0**-4, loss_rtol=2.0**-7, steps=1)


@pytest.mark.parametrize("reduce", [torch.float32, None], ids=["reduce-fp32", "reduce-bf16"])
def test_mixed_precision(workers, reduce):
    workers(2).run(low_precision, reduce)


# ---- settings --------------------------------------------------------------------------------------------------------
def accumulate(rank: int, world_size: int, through: str) -> None:
    kind = lambda: Odd().double()  # noqa: E731  # gloo lacks the reduce op that stock asks for in fp32
    stock = stock_model(kind=kind)
    fused, claimed = claimed_model(kind=kind)
    if through == "claimed":
        claimed.set_gradient_divide_factor(3.0)
    report = commfuse_dp.apply(fused, settings())
    if through == "model":
        for module in fused.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(3.0)
    for module in stock.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(3.0)
    fused.set_gradient_divide_factor(3.0)  # `scale` is in the root's group
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        sent = []
        for microbatch in range(3):
            batch = token_batch(generator)
            for model in (stock, fused):
                model.set_requires_gradient_sync(microbatch == 2)
            if through == "claimed":
                claimed.set_requires_gradient_sync(microbatch == 2)
            before = report.probe.counters.snapshot()
            for model in (stock, fused):
                token_loss(model, batch).backward()
            sent.append(report.probe.counters.since(before).grad_bytes_received)
        assert sent[:2] == [0, 0] and sent[2] > 0, sent
        compare("gradients", gradients(stock), gradients(fused), RTOL64)
        for model in (stock, fused):
            model.zero_grad()
    assert {layer.policy.divide_factor for layer in claimed.layers.values()} == {3.0}
    commfuse_dp.remove(fused)


@pytest.mark.parametrize("through", [slow("model"), "claimed"])
def test_accumulation_and_divide_factor(workers, through):
    workers(2).run(accumulate, through)


def settings_reach(rank: int, world_size: int) -> None:
    """FSDP2's setters reach exactly the layers that would be in the module's group."""
    fused, claimed = claimed_model()
    commfuse_dp.apply(fused, settings())
    fused.layers[0].set_gradient_divide_factor(7.0)
    fused.layers[1].set_reshard_after_forward(False)
    fused.set_requires_all_reduce(False, recurse=False)
    for name, layer in claimed.layers.items():
        assert (layer.policy.divide_factor == 7.0) == name.startswith("layers.0"), name
        assert layer.policy.keep_after_forward == name.startswith("layers.1"), name
        assert layer.policy.all_reduce_grads == name.startswith("layers."), name
    fused.set_reshard_after_forward(False, recurse=True)
    assert all(layer.policy.keep_after_forward for layer in claimed.layers.values())
    for duplicate in (copy.copy, of_same_dictionary):  # ordinary modules, as of stock: they have no such setters
        with pytest.raises(AttributeError, match="set_reshard_after_forward"):
            duplicate(fused).set_reshard_after_forward(True)
    assert all(layer.policy.keep_after_forward for layer in claimed.layers.values())
    commfuse_dp.remove(fused)


def test_fsdp2_setters_reach_the_claimed_layers(workers):
    workers(2).run(settings_reach)


def hybrid(rank: int, world_size: int, public: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    stock = stock_model(mesh=mesh)
    fused, _ = claimed_model(mesh=mesh)
    for name, param in stock.named_parameters():
        other = fused.get_parameter(name)
        assert (other.placements, other.device_mesh) == (param.placements, param.device_mesh)
    if public:
        with blind() as touched:
            commfuse_dp.apply(fused, settings())
            train(stock, fused, clip=0.5)
            commfuse_dp.remove(fused)
        assert touched == []
    else:
        commfuse_dp.apply(fused, settings())
        train(stock, fused, clip=0.5)
        commfuse_dp.remove(fused)
    train(stock, fused, steps=1)


@pytest.mark.parametrize("public", [slow(False), slow(True)])
def test_hybrid_sharding(workers, public):
    workers(4).run(hybrid, public)


# ---- without private names, and without claim ------------------------------------------------------------------------
def unclaimed(rank: int, world_size: int) -> tuple[str, str, str]:
    """apply() alone: everything over the hooks, said loudly."""
    stock, fused = stock_model(), stock_model()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage()) if record.levelno == logging.WARNING else None
    logging.getLogger("commfuse_dp").addHandler(handler)
    try:
        with blind() as touched:
            with pytest.raises(ConfigError, match="always") as refused:
                commfuse_dp.apply(fused, settings(fuse="always"))
            report = commfuse_dp.apply(fused, settings())
            train(stock, fused)
            assert report.probe.counters.grad_bytes_received > 0
            commfuse_dp.remove(fused)
            sent = report.probe.counters.grad_bytes_received
            train(stock, fused, steps=1)
            assert report.probe.counters.grad_bytes_received == sent
    finally:
        logging.getLogger("commfuse_dp").removeHandler(handler)
    assert touched == []
    assert {row.path for row in report.rows} == {"hooks"} and len(report.rows) == len(list(fused.parameters()))
    (message,) = messages
    return message, str(report), str(refused.value)


def test_without_private_names_the_hooks_serve_and_claim_is_named(workers):
    for message, report, refused in workers(2).run(unclaimed):
        for text in (message, report, refused):
            assert "_get_fsdp_state" in text and "claim(model)" in text and "fully_shard" in text


def really_missing(rank: int, world_size: int) -> list[str | None]:
    """The probe itself, on torches that lack one name or the other."""
    from commfuse_dp.integrations.fsdp2 import compat

    model = stock_model()
    found = [compat.probe(model)]
    whole = FSDPModule._get_fsdp_state
    state = model._get_fsdp_state()

    class Bare:
        pass

    groups = "_fsdp_param_groups" if hasattr(state, "_fsdp_param_groups") else "_fsdp_param_group"
    for lacking in (groups, "_states_to_forward_prefetch"):
        bare = Bare()
        for name in (groups, "_states_to_forward_prefetch"):
            if name != lacking:
                setattr(bare, name, getattr(state, name))
        FSDPModule._get_fsdp_state = lambda self, bare=bare: bare
        found.append(compat.probe(model))
    del FSDPModule._get_fsdp_state
    found.append(compat.probe(model))
    FSDPModule._get_fsdp_state = whole
    return found


def test_the_probe_names_what_is_missing(workers):
    for fine, groups, prefetch, state in workers(1).run(really_missing):
        assert fine is None
        assert "_fsdp_param_groups" in groups and "_states_to_forward_prefetch" in prefetch and "_get_fsdp_state" in state


# ---- what is claimed, and wrong use ----------------------------------------------------------------------------------
def choices(rank: int, world_size: int) -> None:
    tied = make(kind=lambda: ByteModel(tied=True))
    tied.layers[0].up.forward = tied.layers[0].up.forward
    claimed = commfuse_dp.claim(tied, settings(exclude=("layers.1.*",)))
    assert claimed.left["head"] == "tied: weight is shared by 2 modules" and "embedding" in claimed.left
    assert claimed.left["layers.1.up"] == "excluded by 'layers.1.*'"
    assert "replaced" in claimed.left["layers.0.up"]
    assert set(claimed.layers) == {f"layers.{i}.{n}" for i in (0, 2) for n in ("up", "down", "norm")} - {"layers.0.up"} | {
        "norm"
    }
    for off in (settings(enabled=False), settings(fuse="never")):
        assert commfuse_dp.claim(make(), off).params == set()
    # apply() may exclude or switch off what was claimed: those layers stay plain, and right
    for config in (settings(exclude=("layers.*.up",)), settings(fuse="never"), settings(enabled=False)):
        stock, (fused, _) = stock_model(), claimed_model()
        report = commfuse_dp.apply(fused, config)
        rows = {row.name: row for row in report.rows}
        assert rows["layers.0.up.weight"].path == "plain"
        assert (rows["layers.0.down.weight"].path == "fused") == bool(config.exclude)
        train(stock, fused, steps=2)
        if config.enabled:
            commfuse_dp.remove(fused)


def test_what_is_claimed(workers):
    workers(2).run(choices)


def misuse(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match="before the first fully_shard"):
        commfuse_dp.claim(stock_model())
    model = make()
    commfuse_dp.claim(model)
    with pytest.raises(ConfigError, match="twice"):
        commfuse_dp.claim(model)
    with pytest.raises(ConfigError, match="fully_shard"):
        commfuse_dp.apply(model, settings())
    with pytest.raises(TypeError):  # torch's own message; a fully_shard that was not told
        fully_shard(model.layers[0])
    with pytest.raises(ConfigError, match="reshard_after_forward=2"):
        commfuse_dp.claim(make(), reshard_after_forward=2)
    if world_size > 1:
        model = make()
        claimed = commfuse_dp.claim(model, settings(exclude=("head",) if rank else ()))
        shard_layers(model, ignored_params=claimed.params)
        with pytest.raises(commfuse_dp.MismatchError, match="claimed layers"):
            commfuse_dp.apply(model, settings())


@pytest.mark.parametrize("world_size", [1, 2])
def test_misuse(workers, world_size):
    workers(world_size).run(misuse)


def whole_model(rank: int, world_size: int) -> None:
    """Nothing is left to FSDP2; one rank included."""
    stock, (fused, claimed) = stock_model(kind=ByteModel), claimed_model(kind=ByteModel)
    assert not claimed.left
    with blind() as touched:
        report = commfuse_dp.apply(fused, settings(fuse="always"))
        train(stock, fused)
        commfuse_dp.remove(fused)
    assert touched == []
    assert {row.path for row in report.rows} == {"fused", "gathered"}


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_every_parameter_claimed(workers, world_size):
    workers(world_size).run(whole_model)
