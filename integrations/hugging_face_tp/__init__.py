"""Hugging Face transformers' own tensor parallelism (`from_pretrained(..., distributed_config=DistributedConfig(tp_size=N))`),
run with sequence parallelism in place of its all-reduces. `commfuse_dp.apply(model)` and COMMFUSE=1 lead here through
`integrations.tensor_parallel.serving`.

Nothing here imports transformers: what it has left on a model is read from the model (compat.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commfuse_dp.integrations.hugging_face_tp.attention import register_attention


def __getattr__(name: str) -> Any:
    if name != "register_attention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from commfuse_dp.integrations.hugging_face_tp.attention import register_attention

    return register_attention


__all__ = ["register_attention"]
