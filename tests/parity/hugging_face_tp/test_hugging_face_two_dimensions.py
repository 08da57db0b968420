"""transformers' `tp_size` below its `fsdp_size`, 2 x 2 ranks: as stock, and as the whole model with both batches."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests.parity.hugging_face_tp.models import alike, batch, full, load, quiet, saved
from tests.support.serving import applied

warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def _load(
    path: str, n: int, *, dtype: torch.dtype = torch.float64, sizes: dict[str, Any] | None = None, **settings: Any
) -> Any:
    """sizes: of transformers' DistributedConfig, beside its tp_size."""
    import transformers
    from transformers.distributed import DistributedConfig

    with quiet():
        config = DistributedConfig(tp_size=2, **(sizes or {"fsdp_size": n // 2}))
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, distributed_config=config, **settings)


def _step(model: Any, tokens: list[torch.Tensor]) -> torch.Tensor:
    """Gradients of the mean over some batches. Returns the first loss."""
    losses = [model(one, labels=one).loss for one in tokens]
    (sum(losses) / len(losses)).backward()
    return losses[0].detach()


def _train(model: Any, rank: int, replicas: int, steps: int) -> dict[str, torch.Tensor]:
    """replicas: data-parallel ranks, each with a batch of its own; 0: all of them here."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    found = {}
    for step in range(steps):
        batches = [batch(10 * step + number, length=7) for number in range(2)]
        loss = _step(model, batches[rank // 2 : rank // 2 + 1] if replicas else batches)
        if rank < 2:  # the whole model's first batch
            found[f"loss {step}"] = full(loss)
        if step == 0:
            found.update({f"gradient of {name}": full(param.grad) for name, param in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    found.update({name: full(param) for name, param in model.named_parameters()})
    return found


def _trained(rank: int, n: int, kind: str, sizes: dict[str, Any], loading: dict[str, Any], steps: int) -> None:
    from commfuse_dp.integrations.hugging_face_tp import register_attention

    register_attention()
    with saved(kind, **sizes) as path:
        routed = loading if "experts_implementation" in loading else {}  # torch has no grouped product of float64
        whole, stock, model = load(path, **routed), _load(path, n, **routed), _load(path, n, **loading)
    tolerance = 1e-6 if kind == "gemma3_text" or routed else 1e-8
    wanted = _train(whole.train(), rank, 0, steps)
    shared = sizes.get("num_key_value_heads") == 1  # stock fails with fewer key heads than ranks
    if not shared:
        alike(_train(stock.train(), rank, n // 2, steps), wanted, tolerance)
    with applied(model) as report:
        paths = {row.name: row for row in report.rows}
        served = paths[f"model.layers.1.self_attn.{'qkv_proj' if kind == 'phi3' else 'k_proj'}.weight"]
        slices = "data parallel: fused" in served.reason
        assert served.path == "column" and slices == (sizes.get("num_key_value_heads") != 1), served
        if kind == "mixtral":
            assert paths["model.layers.0.mlp.experts.down_proj"].path == "column"
        else:
            assert paths["model.layers.0.mlp.down_proj.weight"].path == "row"
            assert "data parallel: fused" in paths["model.layers.0.mlp.down_proj.weight"].reason
        assert report.tensor_parallel is not None
        alike(_train(model.train(), rank, n // 2, steps), wanted, tolerance)
        if shared:
            return
        tokens = batch(3, length=6)
        with torch.no_grad():
            assert torch.allclose(model.eval()(tokens).logits, stock.eval()(tokens).logits, rtol=tolerance, atol=tolerance)
            one = tokens[:, :1]  # fewer positions than ranks
            assert torch.allclose(model(one).logits, stock(one).logits, rtol=tolerance, atol=tolerance)
        for each in (model, stock):
            each.gradient_checkpointing_enable({"use_reentrant": False})
            _step(each.train(), [tokens])
            _step(each, [one])
        for a, b in zip(model.parameters(), stock.parameters(), strict=True):
            assert torch.allclose(full(a.grad), full(b.grad), rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, stock(tokens).logits, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "loading"),
    [
        ("llama", {}, {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, {"attn_implementation": "commfuse"}),
        ("qwen3", {"head_dim": 4}, {}),
        ("llama", {"num_key_value_heads": 1}, {}),
        ("mixtral", {"num_local_experts": 4}, {"experts_implementation": "eager"}),
        ("phi3", {}, {}),
        ("gemma3_text", {"head_dim": 4, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}, {}),
    ],
)
def test_tensor_parallelism_below_fsdp_size(workers: Any, kind: str, sizes: dict[str, Any], loading: dict[str, Any]) -> None:
    workers(4).run(_trained, kind, sizes, loading, 5, timeout=250)


def _rounded(rank: int, n: int, kind: str, dtype: torch.dtype, sizes: dict[str, Any]) -> None:
    settings = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 32} if "moe" in kind else {}
    with saved(kind, **settings) as path:
        whole = load(path, experts_implementation="eager")  # torch has no grouped product of float64
        stock, model = (_load(path, n, dtype=dtype, sizes=sizes) for _ in range(2))
    batches = [batch(number, length=7) for number in range(2)]
    _step(whole.train(), batches)
    _step(stock.train(), batches[rank // 2 : rank // 2 + 1])
    with applied(model) as report:
        assert report.tensor_parallel is not None
        paths = {row.name: row for row in report.rows}
        served = paths["model.layers.0.self_attn.o_proj.weight"]
        assert served.path == "row" and "data parallel: fused" in served.reason, served
        _step(model.train(), batches[rank // 2 : rank // 2 + 1])
    errors = {"stock": 0.0, "ours": 0.0}
    for exact, a, b in zip(whole.parameters(), stock.parameters(), model.parameters(), strict=True):
        scale = float(exact.grad.norm())
        for name, param in (("stock", a), ("ours", b)):
            errors[name] += float((full(param.grad).double() - exact.grad).norm()) / scale
    # In float32 both errors are of rounding alone, which another order of summation may double.
    assert 0 < errors["ours"] <= (1.1 if dtype == torch.bfloat16 or "fsdp_mixed_precision" in sizes else 2) * errors["stock"], (
        errors
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.float32, {"fsdp_size": 2, "fsdp_mixed_precision": True}),
        (torch.bfloat16, {"fsdp_size": 2}),
        (torch.float32, {"fsdp_size": 1, "dp_replicate_size": 2}),
    ],
)
def test_gradients_are_as_near_to_float64_as_those_of_stock(
    workers: Any, kind: str, dtype: torch.dtype, sizes: dict[str, Any]
) -> None:
    workers(4).run(_rounded, kind, dtype, sizes, timeout=250)
