"""What serves an unmodified script under COMMFUSE=1: models that transformers makes tensor-parallel, from their first forward
on, and `attn_implementation="commfuse"`."""

from __future__ import annotations

from types import ModuleType


def register() -> None:
    """Called once, when transformers is imported first."""
    from commfuse_dp.integrations.unmodified.autohook import follow

    from commfuse_dp.autoload import ON, when_imported, wish

    if wish() in ON:
        # The model is remembered: its weights are loaded afterwards, into the same object.
        when_imported("transformers.distributed.mixin")(lambda module: follow(module, "apply_tensor_parallelism"))
        when_imported("transformers.modeling_utils")(know_attention)


def know_attention(module: ModuleType) -> None:
    from commfuse_dp.integrations.hugging_face_tp.attention import register_attention

    register_attention()
