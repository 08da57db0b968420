"""What of a model of transformers stays stock, and why; all or nothing; unmodified scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from commfuse_dp.integrations.hugging_face_tp import attention, compat, layers
from commfuse_dp.integrations.tensor_parallel import applied as applied_to
from commfuse_dp.integrations.unmodified import first_call
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import commfuse_dp
from commfuse_dp.errors import CommFuseError, ConfigError
from tests.parity.hugging_face_tp.models import alike, batch, config_of, gradients, load, saved
from tests.support.launching import launch
from tests.support.serving import applied, config

SCRIPT = str(Path(__file__).parent / "programs" / "hugging_face_script.py")


def _reasons(rank: int, n: int, kind: str, sizes: dict[str, Any], settings: dict[str, Any]) -> dict[str, str]:
    loading = {"experts_implementation": "eager"} if "num_local_experts" in sizes else {}
    with saved(kind, **sizes) as path:
        whole, model = load(path, **loading), load(path, n, **loading)
    with applied(model, **settings) as report:
        found = {row.name.removeprefix("model."): f"{row.path}: {row.reason}" for row in report.rows}
        alike(gradients(model, batch(0)), gradients(whole, batch(0)), 1e-6)  # Mixtral's router computes in float32
    return found


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "whole inputs of o_proj": (
        "olmo2",
        {},
        {},
        {
            "layers.0.self_attn.o_proj.weight": "row: partial sums leave as they are computed",
            "layers.0.self_attn.q_norm.weight": "stock: computes on all positions and features",
        },
    ),
    "routing by chance": (
        "phimoe",
        {"num_local_experts": 4},
        {},
        {"layers.0.mlp.experts.down_proj": "stock: PhimoeDecoderLayer draws random numbers"},
    ),
    "noise before routing": (
        "mixtral",
        {"num_local_experts": 4, "router_jitter_noise": 0.1},
        {},
        {
            "layers.0.mlp.experts.down_proj": "stock: MixtralDecoderLayer draws random numbers",
            "layers.0.self_attn.q_proj.weight": "column: one gather",
        },
    ),
    "other attention": (
        "olmo_hybrid",
        {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4},
        {},
        {
            "layers.0.linear_attn.q_proj.weight": "stock: no style of tensor parallelism was applied inside of it; model",
            "layers.0.mlp.down_proj.weight": "row: partial sums",
        },
    ),
    **{
        f"dropout of {kind}": (
            kind,
            {"residual_dropout": 0.1},
            {},
            {
                f"layers.1.mlp.{first}.weight": f"stock: {layer} draws random numbers (dropout) between its tensor-parallel",
                "lm_head.weight": "stock: no",
            },
        )
        for kind, layer, first in (
            ("starcoder2", "Starcoder2DecoderLayer", "c_fc"),
            ("seed_oss", "SeedOssDecoderLayer", "up_proj"),
        )
    },
    "experts": (
        "mixtral",
        {"num_local_experts": 4},
        {},
        {
            "layers.0.mlp.experts.gate_up_proj": "column: tokens come by slices, and partial sums leave",
            "layers.0.mlp.gate.weight": "stock: it computes with its own positions of the sequence; its gradient is summed",
            "layers.0.self_attn.q_proj.weight": "column: one gather of model.layers.0.self_attn's input with",
        },
    ),
    "experts excluded": (
        "mixtral",
        {"num_local_experts": 4},
        {"exclude": ("model.layers.0.mlp.experts",)},
        {
            "layers.0.mlp.experts.gate_up_proj": "stock: excluded by 'model.layers.0.mlp.experts'; model.layers.0.mlp gets its",
            "layers.1.mlp.experts.gate_up_proj": "column: tokens come by slices",
        },
    ),
    "excluded": (
        "llama",
        {},
        {"exclude": ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn", "model.layers.1.*")},
        {
            "layers.0.mlp.down_proj.weight": "stock: model.layers.0.mlp.up_proj: excluded by 'model.layers.0.mlp.up_proj'",
            "layers.1.mlp.gate_proj.weight": "stock: model.layers.1.self_attn.q_proj: excluded by",
            "layers.0.self_attn.o_proj.weight": "row: partial sums",
            "lm_head.weight": "column: a gather of its own",
        },
    ),
    "tied": (
        "qwen3",
        {"head_dim": 4, "tie_word_embeddings": True},
        {},
        {
            "embed_tokens.weight": "stock: its style EmbeddingParallel is none that is served",
            "layers.1.self_attn.q_norm.weight": "stock: replicated, and computes all positions: transformers sums its gradient",
            "layers.1.input_layernorm.weight": "stock: it computes with its own positions of the sequence; its",
            "norm.weight": "stock: it computes with its own positions",
        },
    ),
    "never": ("llama", {}, {"fuse": "never"}, {"layers.0.self_attn.q_proj.weight": "stock: fuse='never'"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_of_transformers_stays_stock_and_why(workers: Any, name: str) -> None:
    kind, sizes, settings, expected = CASES[name]
    for found in workers(2).run(_reasons, kind, sizes, settings, timeout=100):
        for parameter, reason in expected.items():
            assert found[parameter].startswith(reason), found[parameter]


# ---- attention -------------------------------------------------------------------------------------------------------
def _deferred(rank: int, n: int) -> None:
    """Which attention is computed by slices of queries, and that the rest is transformers' own to the last digit."""
    attention.register_attention()
    calls: list[str] = []
    stock = layers.row_parallel_attention

    def counted(*args: Any, **kw: Any) -> torch.Tensor:
        calls.append("causal" if kw["causal"] else "all")
        return stock(*args, **kw)

    layers.row_parallel_attention = counted
    try:
        with saved("llama", attention_dropout=0.5) as path:
            sdpa, model = load(path, n), load(path, n, attn_implementation="commfuse")
        tokens, padded = batch(0, length=7), torch.ones(2, 7, dtype=torch.long)
        padded[0, :3] = 0
        assert torch.equal(model(tokens).logits, sdpa(tokens).logits) and not calls
        with applied(model):
            model(tokens)
            assert calls == ["causal"] * 2
            for block in model.model.layers:
                block.self_attn.is_causal = False
            model(tokens)
            assert calls == ["causal"] * 2 + ["all"] * 2
            model(tokens, attention_mask=padded)  # a mask of its own
            model.train()(tokens)  # dropout
            model.eval().generate(tokens[:, :6], max_new_tokens=1, do_sample=False)
            assert len(calls) == 6  # the prompt's alone
            read = attention.attention_forward(
                model.model.layers[0].self_attn, *(torch.ones(1, 2, 7, 4) for _ in range(3)), None
            )
            assert type(read[0]) is torch.Tensor  # outside of a layer
    finally:
        layers.row_parallel_attention = stock


@pytest.mark.slow
def test_which_attention_is_query_split(workers: Any) -> None:
    workers(2).run(_deferred, timeout=100)


# ---- bad input -------------------------------------------------------------------------------------------------------
def _refused(rank: int, n: int) -> None:
    with saved("llama") as path:
        model, twin = load(path, n), load(path, n)
    before = {name: vars(module).get("forward") for name, module in model.named_modules()}
    with pytest.raises(ConfigError, match="matches no module"):
        commfuse_dp.apply(model, config(exclude=("nothing",)))
    with pytest.raises(ConfigError, match="these linears cannot be fused"):
        commfuse_dp.apply(model, config(fuse="always", exclude=("lm_head",)))
    with pytest.raises(CommFuseError, match="setting save_activations"):
        commfuse_dp.apply(model, config(save_activations=("shard", "gathered")[rank]))
    with applied(model), pytest.raises(ConfigError, match="called twice"):
        commfuse_dp.apply(model, config())
    assert {name: vars(module).get("forward") for name, module in model.named_modules()} == before
    assert type(model.model.layers[0]) is type(twin.model.layers[0])
    tokens = batch(0)
    alike(gradients(model, tokens), gradients(twin, tokens), 0.0)
    with (
        applied(model),
        pytest.raises(CommFuseError, match=r"model\.layers\.0\.self_attn: sizes=.* were given, but the ranks have"),
    ):
        model(inputs_embeds=torch.randn(2, 6 + 2 * rank, 16, dtype=torch.float64))


@pytest.mark.slow
def test_what_is_refused_and_what_is_left(workers: Any) -> None:
    workers(2).run(_refused, timeout=100)


def _otherwise(rank: int, n: int) -> None:
    """Experts that are called otherwise than they were tried: they would be given own tokens in the place of all."""
    with saved("mixtral", num_local_experts=4) as path:
        model = load(path, n, experts_implementation="eager")
    mixture = model.model.layers[1].mlp

    def by_keyword(hidden_states: torch.Tensor) -> torch.Tensor:
        flat = hidden_states.flatten(0, 1)
        _, weights, index = mixture.gate(flat)
        return mixture.experts(flat, index, top_k_weights=weights).view_as(hidden_states)

    with applied(model):
        mixture.forward = by_keyword
        with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts: called with 2 arguments and \['top_k_weights'\]"):
            model(batch(0))
        del mixture.forward


@pytest.mark.slow
def test_experts_that_are_called_otherwise(workers: Any) -> None:
    workers(2).run(_otherwise, timeout=100)


def _unknown(rank: int, n: int) -> None:
    """Functions that look like transformers' own, but are not."""
    linear = nn.Linear(2, 2)
    assert compat.style_of(linear) is None
    linear.forward = lambda x: x  # type: ignore[method-assign]
    assert compat.style_of(linear) is None
    from transformers.distributed.tensor_parallel import ColwiseParallel

    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
    module = nn.Linear(4, 4)
    twice = ColwiseParallel().install_forward(ColwiseParallel().install_forward(module, mesh), mesh)
    style = compat.style_of(twice)
    assert style is not None and style.kind == compat.OTHER
    assert config_of("llama").model_type == "llama"


@pytest.mark.slow
def test_forwards_that_are_not_known(workers: Any) -> None:
    workers(2).run(_unknown, timeout=100)


def _evaluated_first(rank: int, n: int) -> None:
    """The trial of its layers computes gradients, whatever the first forward is for."""
    with saved("llama") as path:
        whole, model = load(path), load(path, n)
    with mock.patch.dict("os.environ", {"COMMFUSE_DEADLINE_S": "30", "COMMFUSE_INBOX_BYTES": "65536"}):
        first_call.watch(model)
        with torch.inference_mode():
            model(batch(0))
    assert applied_to(model)
    alike(gradients(model, batch(0)), gradients(whole, batch(0)))
    commfuse_dp.remove(model)


@pytest.mark.slow
def test_served_in_an_evaluation(workers: Any) -> None:
    workers(2).run(_evaluated_first, timeout=100)


# ---- scripts ---------------------------------------------------------------------------------------------------------
def _save(rank: int, n: int, folder: str) -> None:
    import shutil

    with saved("llama") as path:
        if rank == 0:
            shutil.copytree(path, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "kind", "paths"),
    [(2, "auto", {"column", "row"}), (2, "sharded", {"fused", "gathered"}), (4, "both", {"column", "row", "hooks"})],
)
def test_an_unmodified_script_of_transformers(workers: Any, tmp_path: Path, n: int, kind: str, paths: set[str]) -> None:
    folder = str(tmp_path / "model")
    workers(2).run(_save, folder, timeout=100)
    command = ["torchrun", "--nproc-per-node", str(n), "--master-port", "{port}"]
    stock, err = launch([*command, SCRIPT, folder, "size" if kind == "auto" else kind], tmp_path)
    assert "CommFuse" not in err and len(stock.splitlines()) == 4
    out, err = launch([*command, SCRIPT, folder, kind], tmp_path, COMMFUSE="1")
    assert out == stock
    assert paths <= {line.split()[0] for line in err.splitlines() if line.startswith("  ") and "parameters" in line}, err
