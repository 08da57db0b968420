"""CommFuseConfig: every setting, its meaning, unit and default; settings from the environment."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from commfuse_dp.autoload import OFF, ON
from commfuse_dp.errors import ConfigError

MIB = 1 << 20
_MOST_BYTES = 1 << 50  # sums of a few fit the numbers of C

# Variables of the environment that are not COMMFUSE_<KEY> of a setting.
OTHER_VARIABLES = {
    "COMMFUSE": "1: use CommFuse wherever the script's framework allows; 0: never, whatever else asks for it",
    "COMMFUSE_CONFIG": "a JSON or YAML file of settings",
    "COMMFUSE_TCP_ADDRESS": "the address of this host that transport tcp binds to",
    "COMMFUSE_DEMO": "how `commfuse demo` passes its settings to its ranks",
}


class CommFuseConfig(BaseModel):
    """Settings of CommFuse; all ranks must use the same ones. Raises ConfigError on a wrong key or value."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(True, description="False: apply() leaves the model as it is.")
    fuse: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Fused linears: 'auto' where possible (the report names the rest and why), 'always' raises if a linear "
        "cannot be fused, 'never' keeps all compute unfused and only replaces the collectives.",
    )
    transport: Literal["auto", "shm", "tcp", "symmetric", "p2p", "mpi"] = Field(
        "auto",
        description="How bytes move. 'auto': on CPU shm if all ranks share a host, else tcp; on GPUs symmetric (copy engines, "
        "for FSDP2 and DeepSpeed) if all ranks share a host and reach each other's memory, else p2p (NCCL); 'mpi' only when "
        "asked for (python -m commfuse_dp.run under mpiexec asks for it).",
    )
    order: Literal["auto", "pairwise", "ring", "hierarchical"] = Field(
        "auto",
        description="Which peer comes first: r+1, r+2, ... (pairwise) or r-1, r-2, ... (ring). The plain collectives forward "
        "through neighbours in ring order; fused layers fetch every slice straight from its owner in both. 'hierarchical' "
        "(FSDP2 and ZeRO-3, several hosts with equally many ranks, two or more): shards cross to a host once per step, and so "
        "does the sum of a host's gradients; costs (hosts - 1) / ranks of the model in memory per rank. 'auto': hierarchical "
        "where it can be had, that memory is at most a tenth of what is available, and transport is 'auto'; else pairwise.",
    )
    slices_per_rank: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="m of the paper: slices into which each rank's shard is cut. None: 1, and more only for layers whose "
        "slices would otherwise be larger than half of prefetch_bytes or inbox_bytes.",
    )
    prefetch_bytes: int = Field(
        32 * MIB,
        ge=1,
        le=_MOST_BYTES,
        description="Memory per rank for unsharded parameters fetched ahead of compute (the window). Layers that are larger "
        "come in slices; what is to stay gathered after forward (reshard_after_forward=False, FSDP2's default for the root) "
        "is held beside it.",
    )
    inbox_bytes: int = Field(
        32 * MIB,
        ge=1,
        le=_MOST_BYTES,
        description="Memory per rank for gradient slices on their way, all peers together: sent to this rank and not yet "
        "summed (the credit), and what is computed for others where it has to wait. Raised, with a warning, where a peer's "
        "part holds no slice of the largest layer; on GPUs, not twice what that layer owes to one rank. Not all of it is taken "
        "for a small model on CPUs: no more than 4 MiB and 16 bytes for each of its parameters.",
    )
    exclude: tuple[str, ...] = Field(
        (),
        description="Names of modules (shell patterns) that stay with the framework, for example because other code reads "
        "their weights directly.",
    )
    defer_gather: bool = Field(
        False,
        description="DeepSpeed ZeRO-1 and 2: the all-gather after the optimizer's step runs under the next forward. Modules "
        "wait for what they read; but a tensor taken out of the model before the step is out of date until then.",
    )
    save_activations: Literal["shard", "gathered"] = Field(
        "shard",
        description="Tensor parallelism: what a column-parallel group keeps of its input for backward: this rank's 'shard', "
        "which is gathered again, or the 'gathered' whole, which takes as many times the memory as there are ranks.",
    )
    kernels: Literal["auto", "triton", "blas"] = Field(
        "auto",
        description="On GPUs, what computes fused linears and layers of tensor parallelism: 'triton' kernels for all slices at "
        "once, 'blas' slice by slice (cuBLAS), 'auto' the faster one, measured once per shape.",
    )
    replay: bool = Field(
        True,
        description="A layer's backward is bound to memory when it comes for the first time, and replayed as long as nothing "
        "that it depends on has changed. False: bind it anew in every step. The results are the same, bit for bit.",
    )
    deadline_s: float = Field(
        300.0,
        ge=0.01,
        le=1e6,  # eleven days: poll() counts milliseconds in 32 bits
        description="Longest single wait for a peer, in seconds, before a named error.",
    )

    def __init__(self, **data: Any) -> None:
        allowed = list(type(self).model_fields)
        for key in data:
            if key not in allowed:
                raise ConfigError(f"unknown CommFuse setting {key!r}: {nearest(key, allowed)}Allowed: {', '.join(allowed)}.")
        try:
            super().__init__(**data)
        except ValidationError as error:
            lines = []
            for item in error.errors():
                key = ".".join(str(part) for part in item["loc"]) or "?"
                wanted = 'a list of names is wanted: ["lm_head"]' if item["type"] == "tuple_type" else item["msg"]
                lines.append(f"{key}={item.get('input')!r}: {wanted}")
            raise ConfigError("bad CommFuse setting: " + "; ".join(lines)) from None

    @classmethod
    def from_environment(cls, **overrides: Any) -> CommFuseConfig:
        """Defaults < the file named by COMMFUSE_CONFIG < COMMFUSE_<KEY> variables < overrides < COMMFUSE=0 (enabled=False).

        The file is a JSON object, or a YAML mapping if pyyaml is installed. An empty variable counts as unset; lists are
        separated by commas, or JSON; `none` unsets a setting that may be None. Raises ConfigError, which names the variable, or
        the file and the key, for whatever is unknown or has a wrong value.
        """
        settings: dict[str, Any] = {}
        name = os.environ.get("COMMFUSE_CONFIG", "").strip()
        if name:
            settings = _from_file(Path(name))
            for key, value in settings.items():
                _check(cls, key, value, f"{name} (COMMFUSE_CONFIG)")
        for variable, key in _variables(cls.model_fields).items():
            value = _parse(cls, key, os.environ[variable])
            _check(cls, key, value, f"{variable}={os.environ[variable]!r}")
            settings[key] = value
        off = {"enabled": False} if _switch() is False else {}
        return cls(**{**settings, **overrides, **off})


def resolved(config: CommFuseConfig | None) -> CommFuseConfig:
    """The configuration given, else that of the environment. Raises ConfigError for anything else."""
    if config is None:
        return CommFuseConfig.from_environment()
    if not isinstance(config, CommFuseConfig):
        raise ConfigError(f"config must be a CommFuseConfig, got {type(config).__name__}; use CommFuseConfig(**settings)")
    return config


def asked_for() -> bool:
    """Whether the environment asks for CommFuse: COMMFUSE is 1, true, yes or on. Raises ConfigError for any other word."""
    return _switch() is True


def variable_of(key: str) -> str:
    """The variable of the environment that carries a setting."""
    return f"COMMFUSE_{key.upper()}"


def _switch() -> bool | None:
    """COMMFUSE as a truth value; None if unset."""
    text = os.environ.get("COMMFUSE", "").strip()
    if text and text.lower() not in (*ON, *OFF):
        raise ConfigError(f"COMMFUSE={text!r}: {', '.join(ON)} (use CommFuse) or {', '.join(OFF)} (do not) are allowed")
    return text.lower() in ON if text else None


def _variables(keys: Iterable[str]) -> dict[str, str]:
    """Variable -> key, of those that are set. Raises ConfigError for a COMMFUSE_<X> that means nothing."""
    known = {variable_of(key): key for key in keys}
    found = {}
    for variable, text in os.environ.items():
        if variable in known and text.strip():
            found[variable] = known[variable]
        elif variable.startswith("COMMFUSE_") and variable not in known and variable not in OTHER_VARIABLES:
            allowed = [*known, *OTHER_VARIABLES]
            raise ConfigError(
                f"unknown variable {variable}={text!r} in the environment: {nearest(variable, allowed)}"
                f"Allowed: {', '.join(allowed)}. Unset it, or correct its name."
            )
    return found


def _parse(cls: type[BaseModel], key: str, text: str) -> Any:
    """A variable's text as pydantic wants it: numbers and truth values it reads by itself."""
    annotation = cls.model_fields[key].annotation
    text = text.strip()
    if type(None) in get_args(annotation) and text.lower() in ("none", "null"):
        return None
    if get_origin(annotation) is tuple:
        if text[:1] in "[{\"'":  # as in a file of settings; no name begins like that
            return _from_json(key, text)
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text


def _from_json(key: str, text: str) -> tuple[str, ...]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(part, str) for part in found):
        raise ConfigError(
            f"{variable_of(key)}={text!r} is not a JSON list of strings. Allowed are names separated by commas, as in "
            f'{variable_of(key)}=head,layers.0.*, or a JSON list, as in {variable_of(key)}=\'["head", "layers.0.*"]\'.'
        )
    return tuple(found)


def _check(cls: type[BaseModel], key: str, value: Any, source: str) -> None:
    try:
        cls(**{key: value})
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _from_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"COMMFUSE_CONFIG={str(path)!r} cannot be read: {error}. Name a JSON or YAML file.") from None
    if path.suffix.lower() in (".yaml", ".yml"):
        content = _load_yaml(path, text)
    else:
        try:
            content = json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f"COMMFUSE_CONFIG={str(path)!r} is not JSON: {error}. (A YAML file must be called .yaml or .yml.)"
            ) from None
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"COMMFUSE_CONFIG={str(path)!r} holds a {type(content).__name__}; an object of settings is wanted, as in "
            '{"transport": "shm", "prefetch_bytes": 33554432}'
        )
    return {str(key): value for key, value in content.items()}


def _load_yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"COMMFUSE_CONFIG={str(path)!r} is YAML, which needs pyyaml: pip install pyyaml, or write the settings as JSON"
        ) from None
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"COMMFUSE_CONFIG={str(path)!r} is not YAML: {error}") from None
    return {} if content is None else content  # an empty file


def nearest(name: str, allowed: Iterable[str]) -> str:
    """What an error says about a name that is nearly right; empty if none is near."""
    near = difflib.get_close_matches(name, list(allowed), n=1)
    return f"did you mean {near[0]!r}? " if near else ""
