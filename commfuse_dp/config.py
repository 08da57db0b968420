"""CommFuseConfig: every setting, its meaning, unit and default."""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from commfuse_dp.errors import ConfigError

MIB = 1 << 20


class CommFuseConfig(BaseModel):
    """Settings of CommFuse; all ranks must use the same ones. Raises ConfigError on a wrong key or value."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(True, description="False: apply() leaves the model as it is.")
    fuse: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Fused linears: 'auto' where possible (the report names the rest and why), 'always' raises if a linear "
        "cannot be fused, 'never' keeps all compute unfused and only replaces the collectives.",
    )
    transport: Literal["auto", "shm", "tcp", "p2p"] = Field(
        "auto", description="How bytes move. 'auto': shm if all ranks share a host, else tcp on CPU, else p2p."
    )
    order: Literal["pairwise", "ring"] = Field(
        "pairwise",
        description="Which peer comes first: r+1, r+2, ... (pairwise) or r-1, r-2, ... (ring). The plain collectives forward "
        "through neighbours in ring order; fused layers fetch every slice straight from its owner in both.",
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
        description="Unsharded parameter bytes fetched ahead of compute (the window), per rank; what is to stay gathered after "
        "forward (reshard_after_forward=False, FSDP2's default for the root) is held beside it.",
    )
    inbox_bytes: int = Field(
        32 * MIB, ge=1, description="Room per peer for gradient slices sent to this rank and not yet summed (the credit)."
    )
    exclude: tuple[str, ...] = Field(
        (),
        description="Names of modules (shell patterns) that stay with the framework, for example because other code reads "
        "their weights directly.",
    )
    deadline_s: float = Field(300.0, gt=0, description="Longest single wait for a peer, in seconds, before a named error.")

    def __init__(self, **data: Any) -> None:
        allowed = list(type(self).model_fields)
        for key in data:
            if key not in allowed:
                near = difflib.get_close_matches(key, allowed, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ConfigError(f"unknown CommFuse setting {key!r}: {hint}Allowed: {', '.join(allowed)}.")
        try:
            super().__init__(**data)
        except ValidationError as error:
            lines = []
            for item in error.errors():
                key = ".".join(str(part) for part in item["loc"]) or "?"
                lines.append(f"{key}={item.get('input')!r}: {item['msg']}")
            raise ConfigError("bad CommFuse setting: " + "; ".join(lines)) from None
