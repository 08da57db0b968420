"""PyTorch's tensor parallelism with sequence parallelism (`parallelize_module`), alone or below `fully_shard`: see `apply`."""

from commfuse_dp.integrations.tensor_parallel.apply import applied, apply, remove
from commfuse_dp.integrations.tensor_parallel.select import parallelized

__all__ = ["applied", "apply", "parallelized", "remove"]
