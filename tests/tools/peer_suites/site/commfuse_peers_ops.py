"""Compiles and loads DeepSpeed's Adams: before all tests, and in the process from which workers are forked, so none does."""

import traceback

from deepspeed.accelerator import get_accelerator

for builder in ("FusedAdamBuilder", "CPUAdamBuilder"):
    try:
        get_accelerator().create_op_builder(builder).load()
    except Exception as error:  # anything but an ImportError would end the process that forks, and nobody would see why
        traceback.print_exc()
        raise ImportError(f"{builder} cannot be loaded") from error
