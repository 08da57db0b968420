"""The callback, and the wrapper for Fabric's `setup_module`, which calls no callback."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from commfuse_dp.integrations.attach.announce import announce_report
from commfuse_dp.integrations.wrapped import called_roots, kind_of
from torch import nn

import commfuse_dp
from commfuse_dp.config import CommFuseConfig, resolved
from commfuse_dp.errors import ConfigError

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning.callbacks import Callback
else:
    from lightning.pytorch.callbacks import Callback


class CommFuseCallback(Callback):
    """Switches CommFuse on for what the strategy of a Trainer or a Fabric makes of the model.

    Args:
        config: settings; None: those of the environment (COMMFUSE_*).

    reports: one for each model, or part of it, that is served. Raises ConfigError when the fit (Trainer) or `setup` (Fabric)
    begins, if nothing can be served, MismatchError, TransportError.

    | strategy | path |
    | --- | --- |
    | ModelParallelStrategy (`fully_shard`, `parallelize_module` in configure_model or parallelize_fn) | `commfuse_dp.apply` |
    | DDPStrategy | gradients over CommFuse's collectives, as `register_ddp` |
    | FSDPStrategy | gradients over CommFuse's collectives, as `register_fsdp1` |
    """

    def __init__(self, config: CommFuseConfig | None = None) -> None:
        self.config = config if config is None else resolved(config)
        self.reports: list[Any] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Trainer: the strategy has wrapped the model, nothing has run yet."""
        model = trainer.strategy.model
        self._serve(list(called_roots(model)) if model is pl_module else [model], trainer.is_global_zero, model)

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Fabric, at the end of `setup`."""
        model = module._forward_module
        self._serve([model], fabric.is_global_zero, model)

    def _serve(self, models: list[nn.Module], first_process: bool, model: nn.Module) -> None:
        reports = serve_all(models, model, self.config)
        self.reports += reports
        if first_process:
            for report in reports:
                announce_report(report)


def parallelized(shard: Callable[..., nn.Module], config: CommFuseConfig | None = None) -> Callable[..., nn.Module]:
    """The function for Fabric's `ModelParallelStrategy` with CommFuse switched on behind it.

    shard(model, device_mesh) applies `parallelize_module`, `fully_shard`, or both, and returns the model. config: as for
    `commfuse_dp.apply`.
    """

    @functools.wraps(shard)
    def shard_and_serve(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        sharded = shard(model, *args, **kwargs)
        serve_all([sharded], sharded, config)
        return sharded

    return shard_and_serve


def serve_all(models: list[nn.Module], whole: nn.Module, config: CommFuseConfig | None) -> list[Any]:
    """Serve each model that is not served yet, or none of them; returns the reports. Collective. Raises ConfigError if nothing
    can be served, and what serving raises."""
    kinds = [(model, kind) for model in models if (kind := kind_of(model)) is not None]
    if not kinds:
        raise ConfigError(
            f"CommFuse for Lightning found nothing to serve in this {type(whole).__name__}. It serves ModelParallelStrategy "
            "(call fully_shard or parallelize_module in configure_model, or in the function given to Fabric's), DDPStrategy "
            "and FSDPStrategy. For DeepSpeedStrategy put the commfuse block into its JSON; with one process leave the callback "
            "away."
        )
    reports: list[Any] = []
    served: list[nn.Module] = []
    try:
        for model, kind in kinds:
            if not kind.served(model):
                reports.append(kind.serve(model, config))
                served.append(model)
    except BaseException:  # on all ranks: each is served on all of them, or on none
        for model in reversed(served):
            commfuse_dp.remove(model)  # of several all are sharded, see `called_roots`
        raise
    return reports
