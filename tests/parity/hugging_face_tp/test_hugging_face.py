"""Models that transformers shards, with CommFuse: losses, gradients and parameters are those of stock and of the whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from commfuse_dp.integrations.attach.attachment import attachment_of
from commfuse_dp.integrations.attach.forwards import TENSOR_ATTACHMENT
from commfuse_dp.integrations.hugging_face_tp import register_attention
from torch import nn

from commfuse_dp.errors import ConfigError
from tests.parity.hugging_face_tp import models
from tests.parity.hugging_face_tp.models import alike, batch, full, gradients, load, saved, train
from tests.support import graphs
from tests.support.selective import contexts
from tests.support.serving import applied


def _quick(rank: int, n: int) -> None:
    """Attention by the ops of CommFuse, in sequences that do not divide evenly; and again as stock's."""
    register_attention()
    with saved("llama", attention_bias=True) as path:
        whole, model = load(path), load(path, n, attn_implementation="commfuse")
    tokens = batch(0, length=7)
    wanted = gradients(whole, tokens)
    with applied(model) as report:
        paths = {row.name.removeprefix("model.layers.1."): row.path for row in report.rows}
        assert paths["self_attn.k_proj.weight"] == paths["mlp.up_proj.weight"] == "column"
        assert paths["self_attn.o_proj.weight"] == paths["mlp.down_proj.weight"] == "row"
        assert paths["lm_head.weight"] == "column" and paths["input_layernorm.weight"] == "stock"
        alike(gradients(model, tokens), wanted)
        first = gradients(model, tokens)
        alike(gradients(model, tokens), first, 0.0)
        with torch.no_grad():
            assert torch.allclose(model(tokens).logits, whole(tokens).logits, rtol=1e-10, atol=1e-10)
        assert not report.gathered_inputs
    assert attachment_of(model, TENSOR_ATTACHMENT) is None
    alike(gradients(model, tokens), wanted)


def test_a_model_of_transformers(workers: Any) -> None:
    workers(2).run(_quick, timeout=120)


def _trained(rank: int, n: int, kind: str, sizes: dict[str, Any], loading: dict[str, Any], settings: dict[str, Any]) -> None:
    """In float64, where 20 steps of AdamW let nothing but another order of summation show."""
    register_attention()
    with saved(kind, **sizes) as path:
        whole, stock, model = load(path, **loading), load(path, n, **loading), load(path, n, **loading)
    wanted = train(whole.train(), 20)
    # Its norms compute in float32: another order of summation before them is another rounding to 1.2e-7, and 20 steps of AdamW
    # make up to 1.1e-6 of that on the processors tried. A gradient that lacks a term is off by 1e-3 and more.
    # Routers do, too.
    tolerance = 4e-6 if kind == "gemma3_text" or "experts_implementation" in loading else 1e-8
    alike(train(stock.train(), 20), wanted, tolerance)
    with applied(model, **settings) as report:
        assert {row.path for row in report.rows} == {"column", "row", "stock"}
        alike(train(model.train(), 20), wanted, tolerance)


MOE = {"experts_implementation": "eager"}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED = {"shared_expert_intermediate_size": 12, "num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "n_group": 1}
DEEP = {
    **LATENT,
    "topk_group": 1,
    "n_routed_experts": 4,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
}
OURS = {"attn_implementation": "commfuse"}
THIRDS = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3}
GEMMA = {"head_dim": 4, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
BIASED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "kind", "sizes", "loading", "settings"),
    [
        (2, "llama", {}, {}, {}),
        (2, "llama", BIASED, OURS, {"save_activations": "gathered"}),
        (3, "llama", THIRDS, {}, {"slices_per_rank": 2, "order": "ring"}),
        (3, "llama", THIRDS, OURS, {"transport": "tcp"}),
        (4, "mistral", {"num_key_value_heads": 4, "sliding_window": 5}, OURS, {}),
        (2, "qwen2", {}, OURS, {}),
        (2, "qwen3", {"head_dim": 4}, {}, {}),
        (2, "starcoder2", {"residual_dropout": 0.0, "embedding_dropout": 0.0}, {}, {}),
        (2, "olmo2", {}, {}, {}),
        (2, "gemma3_text", GEMMA, {}, {}),
        (2, "gemma3_text", {**GEMMA, "tie_word_embeddings": True}, OURS, {}),
        (2, "qwen3_moe", {"head_dim": 4, "num_experts": 8, "moe_intermediate_size": 8, "decoder_sparse_step": 2}, MOE, {}),
        (3, "mixtral", {**THIRDS, **MIXTURE}, MOE, {"slices_per_rank": 3, "order": "ring"}),
        (2, "qwen2_moe", SHARED, MOE, {"transport": "tcp"}),
        (2, "deepseek_v3", {**DEEP, "first_k_dense_replace": 1}, MOE, {}),
        (2, "phi3", {}, {}, {}),
        (3, "phi3", THIRDS, {}, {"save_activations": "gathered"}),
    ],
)
def test_trained_as_stock_and_as_whole(
    workers: Any, n: int, kind: str, sizes: dict[str, Any], loading: dict[str, Any], settings: dict[str, Any]
) -> None:
    workers(n).run(_trained, kind, sizes, loading, settings, timeout=200)


def _float32(rank: int, n: int, kind: str, low: bool) -> None:
    """No farther from the whole model in float64 than twice stock is; norms of some compute in float32 always."""
    with saved(kind, head_dim=4) as path:
        exact, *models = load(path), *(load(path, n, dtype=torch.float32) for _ in range(2))

    def worst(model: Any) -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            found = gradients(model, batch(0))
        return max(float((found[name] - value).abs().max() / value.abs().max()) for name, value in wanted.items())

    wanted = gradients(exact, batch(0))
    stock = worst(models[0])
    with applied(models[1]):
        fused = worst(models[1])
    assert fused <= 2 * stock, (fused, stock)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "low"), [("gemma2", False), ("llama", False), ("llama", True)])
def test_float32_and_autocast(workers: Any, kind: str, low: bool) -> None:
    workers(2).run(_float32, kind, low, timeout=120)


# ---- ways of calling -------------------------------------------------------------------------------------------------
def _ways(rank: int, n: int, kind: str, sizes: dict[str, Any], tolerance: float) -> None:
    loading = MOE if kind == "mixtral" else {}
    with saved(kind, num_key_value_heads=4, **sizes) as path:
        whole, model = load(path, **loading), load(path, n, **loading)
    tokens = batch(0, length=9)
    alike = partial(models.alike, tolerance=tolerance)
    with applied(model):
        generated = [one.generate(tokens, max_new_tokens=6, do_sample=False) for one in (whole, model)]
        assert torch.equal(*generated)
        outs = [one(tokens, output_hidden_states=True) for one in (whole, model)]
        for a, b in zip(*(out.hidden_states for out in outs), strict=True):
            assert torch.allclose(a, b, rtol=tolerance, atol=tolerance)
        if kind == "mixtral":  # scores of all positions, and what they add to the loss
            wanted, found = (one(tokens, labels=tokens, output_router_logits=True) for one in (whole, model))
            assert torch.allclose(full(found.loss), wanted.loss, rtol=tolerance)
            for a, b in zip(wanted.router_logits, found.router_logits, strict=True):
                assert torch.allclose(a, b, rtol=tolerance, atol=tolerance)
        for length in (2, 3, 5, 8):  # also fewer positions than ranks
            alike(gradients(model, batch(1, length=length)), gradients(whole, batch(1, length=length)))
        kept = [one(tokens, logits_to_keep=3).logits for one in (whole, model)]
        assert torch.allclose(*kept, rtol=1e-10, atol=1e-10)
        padded = torch.ones_like(tokens)
        padded[0, :4] = 0
        alike(gradients(model, tokens, attention_mask=padded), gradients(whole, tokens, attention_mask=padded))
        inner = [one.model(tokens).last_hidden_state * 2 for one in (whole, model)]
        assert torch.allclose(*inner, rtol=1e-10, atol=1e-10)
        selective = {"use_reentrant": False, "context_fn": partial(contexts, "products and sums")}
        for how in ({"use_reentrant": False}, {"use_reentrant": True}, selective):
            for one in (whole.train(), model.train()):
                one.gradient_checkpointing_enable(how)
                one.enable_input_require_grads()
            alike(gradients(model, tokens), gradients(whole, tokens))
        for one in (whole, model):
            one.gradient_checkpointing_disable()
        for step in range(3):  # gradients add up
            for one in (whole, model):
                one(batch(step), labels=batch(step)).loss.backward()
        for a, b in zip(whole.parameters(), model.parameters(), strict=True):
            assert torch.allclose(full(a.grad), full(b.grad), rtol=10 * tolerance, atol=tolerance / 100)
        model.zero_grad(), whole.zero_grad()
        for name, param in [*whole.named_parameters(), *model.named_parameters()]:
            param.requires_grad_("norm" in name)
        for one in (whole, model):
            one.disable_input_require_grads()
            one(tokens, labels=tokens).loss.backward()
        for a, b in zip(whole.parameters(), model.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.allclose(full(a.grad), full(b.grad), rtol=10 * tolerance, atol=tolerance / 100)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "kind", "sizes", "tolerance"),
    [(2, "llama", {}, 1e-10), (4, "llama", {}, 1e-10), (2, "mixtral", MIXTURE, 1e-6), (4, "mixtral", MIXTURE, 1e-6)],
)
def test_ways_of_calling_a_model_of_transformers(
    workers: Any, n: int, kind: str, sizes: dict[str, Any], tolerance: float
) -> None:
    workers(n).run(_ways, kind, sizes, tolerance, timeout=200)


def _bytes(rank: int, n: int, save: str) -> tuple[int, int]:
    """Bytes that one more decoder layer sends, forward and backward, beside the gradients of its norms; and U."""
    sent = []
    for layers in (1, 2):
        with saved("llama", num_hidden_layers=layers) as path:
            model = load(path, n)
        tokens = batch(0, length=8)
        with applied(model, save_activations=save):
            gradients(model, tokens)
            counters = attachment_of(model, TENSOR_ATTACHMENT).transport.probe.counters
            before = counters.snapshot()
            gradients(model, tokens)
            since = counters.since(before)
            sent.append(since.param_bytes_sent + since.grad_bytes_sent)
    unit = (n - 1) * tokens.numel() * 16 * 8 // n
    return sent[1] - sent[0] - 2 * (n - 1) * 16 * 8, unit


@pytest.mark.slow
@pytest.mark.parametrize(("save", "units"), [("shard", 10), ("gathered", 8)])
def test_bytes_of_a_decoder_layer(workers: Any, save: str, units: int) -> None:
    for layer, unit in workers(2).run(_bytes, save, timeout=100):
        assert layer == units * unit, (layer, unit)


def _shared_heads(rank: int, n: int, kind: str, sizes: dict[str, object], implementation: str) -> None:
    """Fewer key heads than ranks, which transformers fails on: as the whole model. Qwen3 norms keys in float32:
    there each rank's share of a key's gradient is rounded, not their sum."""
    tolerance = 1e-6 if kind == "qwen3" else 1e-10
    register_attention()
    with saved(kind, **sizes) as path:
        whole, model = load(path), load(path, n, attn_implementation=implementation)
    tokens = batch(0, length=7)
    if n == 2:  # with more, not all ranks fail, and the others wait
        with pytest.raises(RuntimeError):
            model(tokens)
    with applied(model) as report:
        paths = {row.name: row.path for row in report.rows}
        assert paths["model.layers.0.self_attn.k_proj.weight"] == "column"
        alike(gradients(model, tokens), gradients(whole, tokens), tolerance)
        generated = [one.generate(tokens, max_new_tokens=5, do_sample=False) for one in (whole, model)]
        assert torch.equal(*generated)
        padded = torch.ones_like(tokens)
        padded[0, :4] = 0
        alike(gradients(model, tokens, attention_mask=padded), gradients(whole, tokens, attention_mask=padded), tolerance)
        with pytest.raises(ConfigError, match="fewer key heads than ranks"):
            model(tokens, output_hidden_states=True)
        if kind != "qwen3":
            alike(train(model.train(), 5), train(whole.train(), 5), 1e-9)
    assert model.model.layers[0].self_attn.num_key_value_groups == whole.model.layers[0].self_attn.num_key_value_groups


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "kind", "sizes", "implementation"),
    [
        (2, "llama", {"num_key_value_heads": 1, "attention_bias": True}, "sdpa"),
        (2, "qwen2", {"num_key_value_heads": 1}, "commfuse"),
        (4, "qwen3", {"num_key_value_heads": 2, "head_dim": 6}, "sdpa"),
        (3, "mistral", {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 4}, "commfuse"),
    ],
)
def test_fewer_key_heads_than_ranks(workers: Any, n: int, kind: str, sizes: dict[str, Any], implementation: str) -> None:
    workers(n).run(_shared_heads, kind, sizes, implementation, timeout=150)


# ---- inside torch.compile --------------------------------------------------------------------------------------------
def _last_in_place(layers: nn.ModuleList) -> None:
    layers[1].compile(backend="aot_eager")


def _last_wrapped(layers: nn.ModuleList) -> None:
    layers[1] = torch.compile(layers[1], backend="aot_eager")


def _an_mlp(layers: nn.ModuleList) -> None:
    layers[1].mlp.compile(backend="aot_eager")


def _a_forward(layers: nn.ModuleList) -> None:
    layers[1].forward = torch.compile(layers[1].forward, backend="aot_eager")


def _compiled(rank: int, n: int, part: Callable[[nn.ModuleList], None], early: bool) -> None:
    """Behind a layer that is not: nothing may enter a graph that only stands for a tensor."""
    graphs.fresh()
    with saved("llama") as path:
        whole, model = load(path), load(path, n)
    wanted = gradients(whole, batch(0))
    if early:
        part(model.model.layers)
    with applied(model):
        if not early:
            alike(gradients(model, batch(0)), wanted)
            part(model.model.layers)
        found = gradients(model, batch(0))
        alike({name.replace("._orig_mod", ""): value for name, value in found.items()}, wanted)
    graphs.fresh()


@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("part", [_last_in_place, _last_wrapped, _an_mlp, _a_forward])
def test_a_compiled_part(workers: Any, part: Callable[[nn.ModuleList], None], early: bool) -> None:
    workers(2).run(_compiled, part, early, timeout=120)
