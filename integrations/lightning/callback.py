"""The callback, and the wrapper for Fabric's `setup_module`, which calls no callback."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from commfuse_dp.integrations.attach.announce import announce
from commfuse_dp.integrations.wrapped import called_roots, kind_of, serve_all
from torch import nn

from commfuse_dp.config import CommFuseConfig
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
    | ModelParallelStrategy (`fully_shard` in configure_model or parallelize_fn) | fused, as `commfuse_dp.apply` |
    | DDPStrategy | gradients over CommFuse's collectives, as `register_ddp` |
    | FSDPStrategy | gradients over CommFuse's collectives, as `register_fsdp1` |
    """

    def __init__(self, config: CommFuseConfig | None = None) -> None:
        if config is not None and not isinstance(config, CommFuseConfig):
            raise ConfigError(f"config must be a CommFuseConfig, got {type(config).__name__}; use CommFuseConfig(**settings)")
        self.config = config
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
        def tell(reports: list[Any]) -> None:
            for report in reports if first_process else ():
                announce(str(report).partition("\n\n")[0])

        self.reports += serve_all(_of_a_kind(models, model), self.config, tell)


def parallelized(shard: Callable[..., nn.Module], config: CommFuseConfig | None = None) -> Callable[..., nn.Module]:
    """The function for Fabric's `ModelParallelStrategy` with CommFuse switched on behind it.

    shard(model, device_mesh) applies `fully_shard` and returns the model. config: as for `commfuse_dp.apply`.
    """

    @functools.wraps(shard)
    def shard_and_serve(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        sharded = shard(model, *args, **kwargs)
        serve_all(_of_a_kind([sharded], sharded), config)
        return sharded

    return shard_and_serve


def _of_a_kind(models: list[nn.Module], whole: nn.Module) -> list[nn.Module]:
    """Those that can be served. Raises ConfigError if there is none."""
    found = [model for model in models if kind_of(model) is not None]
    if not found:
        raise ConfigError(
            f"CommFuse for Lightning found nothing to serve in this {type(whole).__name__}. It serves ModelParallelStrategy "
            "(call fully_shard in configure_model, or in the function given to Fabric's), DDPStrategy and FSDPStrategy. For "
            "DeepSpeedStrategy put the commfuse block into its JSON; with one process leave the callback away."
        )
    return found
