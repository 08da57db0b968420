"""Which modules can be served by slices, whoever holds their parameters."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable

import torch
from commfuse_dp.integrations.attach.forwards import Served, own_class
from commfuse_dp.integrations.attach.linears import LinearForm, linear_form, linear_obstacle
from torch import nn
from torch.distributed.fsdp import FSDPModule

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.errors import ConfigError

GATHERED_TYPES = (nn.LayerNorm, nn.RMSNorm, nn.Embedding)

# Modules whose own forward reads its children's weights without calling the children.
_READS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def full_name(name: str, inner: str) -> str:
    """Of what is called `inner` in the module `name`; the root's name is empty."""
    return f"{name}.{inner}" if name else inner


def original_type(module: nn.Module) -> type[nn.Module]:
    """The module's class without what `fully_shard` and CommFuse have put on top of it."""
    kind = own_class(module)
    while issubclass(kind, (FSDPModule, Served)):
        kind = kind._commfuse_class if issubclass(kind, Served) else kind.__mro__[2]
    return kind


def form_of(module: nn.Module) -> LinearForm | None:
    """Which linear a module computes, if it does: its layer can be fused."""
    return linear_form(module, original_type(module))


def check_exclude(model: nn.Module, config: CommFuseConfig) -> None:
    """Raises ConfigError for a pattern of `exclude` that no module's name matches: it would be without effect."""
    names = [name for name, _ in model.named_modules()]
    for pattern in config.exclude:
        if config.enabled and not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[1:4]
            raise ConfigError(
                f"exclude={pattern!r} matches no module of this {original_type(model).__name__}. Names of modules or shell "
                f"patterns of them are allowed, as model.named_modules() gives them; near ones are "
                f"{', '.join(map(repr, near)) or 'none'}."
            )


def require_fused(config: CommFuseConfig, lost: Iterable[str]) -> None:
    """Raises ConfigError if fuse='always' asks for linears that cannot be fused. lost: their names, with reasons."""
    if config.enabled and config.fuse == "always" and (names := "; ".join(lost)):
        raise ConfigError(f"fuse='always', but these linears cannot be fused: {names}. Use fuse='auto'.")


def excluded(name: str, config: CommFuseConfig) -> str | None:
    """By which pattern the configuration excludes a module, as a reason."""
    for pattern in config.exclude:
        if fnmatch.fnmatchcase(name, pattern):
            return f"excluded by {pattern!r}"
    return None


def how_computed(kind: type[nn.Module], form: LinearForm | None) -> str:
    """Reason in the report for a layer of class `kind` that computes a linear of this form; None: no linear."""
    if form is None:
        return f"{kind.__name__} cannot be computed by row slices"
    return "nn.Linear" if kind is nn.Linear else f"{kind.__name__} computes a linear"


def module_obstacle(
    name: str, module: nn.Module, parent: nn.Module | None, config: CommFuseConfig, *, forward_of_ours: bool = False
) -> str | None:
    """Why a module cannot be given a forward of ours (None: it can). forward_of_ours: the one in its dictionary is."""
    why = excluded(name, config)
    if why is not None:
        return why
    kind = original_type(module)
    if kind not in GATHERED_TYPES and form_of(module) is None:
        return linear_obstacle(module, kind) or f"{kind.__name__} is not a layer type that can be served by slices"
    if own_class(module).forward is not kind.forward or ("forward" in vars(module) and not forward_of_ours):
        return f"the forward of this {kind.__name__} was replaced"
    if hasattr(module, "parametrizations"):
        return "its parameters are parametrized"
    if isinstance(parent, _READS_CHILDREN):
        return f"{type(parent).__name__} reads this layer's weights without calling it"
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return "an embedding with max_norm or sparse gradients"
    own = {param_name for param_name, _ in module.named_parameters(recurse=False)}
    if "weight" not in own:
        return "it has no weight"
    if own - {"weight", "bias"}:
        return f"it has parameters that a {kind.__name__} does not know: {', '.join(sorted(own - {'weight', 'bias'}))}"
    return None


def tensor_obstacle(rows: torch.Tensor) -> str | None:
    """Why data of this kind cannot travel."""
    if type(rows) is not torch.Tensor:
        return f"its data is a {type(rows).__name__}"
    if rows.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        return f"dtype {rows.dtype}"
    return None
