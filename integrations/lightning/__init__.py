"""CommFuse for Lightning's Trainer and Fabric: one callback, or one wrapped function.

    Trainer(strategy="ddp" or ModelParallelStrategy(), callbacks=[CommFuseCallback()])
    Fabric(strategy="ddp" or ModelParallelStrategy(shard), callbacks=[CommFuseCallback()])     with fabric.setup(...)
    Fabric(strategy=ModelParallelStrategy(parallelized(shard)))                                with fabric.setup_module(...)

Importing this package imports Lightning, under the name (`lightning` or `pytorch_lightning`) that the program has imported.
"""

from commfuse_dp.integrations.lightning.callback import CommFuseCallback, parallelized

__all__ = ["CommFuseCallback", "parallelized"]
