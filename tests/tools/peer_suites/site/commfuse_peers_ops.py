"""Compiles and loads DeepSpeed's Adams: before all tests, and in the process from which workers are forked, so none does."""

from deepspeed.accelerator import get_accelerator

for builder in ("FusedAdamBuilder", "CPUAdamBuilder"):
    get_accelerator().create_op_builder(builder).load()
