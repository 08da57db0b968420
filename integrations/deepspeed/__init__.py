"""DeepSpeed ZeRO-1, 2 and 3, switched on by the block "commfuse" of its JSON configuration: see `block` and `apply`."""

from commfuse_dp.integrations.deepspeed.apply import apply_to_engine, engine_of, remove, report_of

__all__ = ["apply_to_engine", "engine_of", "remove", "report_of"]
