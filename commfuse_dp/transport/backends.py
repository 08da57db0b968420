"""What torch.distributed's backends for tests cannot do: refused at once, not at the end of a wait.

| backend | its ranks | what is refused |
| --- | --- | --- |
| fake | one runs, and the others do not exist | everything, on more than one rank |
| threaded | threads of one process | transport 'p2p', which sends; replicas, see `check_replicas` |
"""

from __future__ import annotations

import torch.distributed as dist

from commfuse_dp.errors import ConfigError


def check_ranks_exist(group: dist.ProcessGroup | None) -> None:
    """Raises ConfigError if nobody would answer."""
    if _runs_on("fake", group):
        raise ConfigError(
            f"{dist.get_world_size(group)} ranks over torch.distributed's backend 'fake', of which one runs alone: CommFuse "
            "cannot exchange anything with the others. Leave it off (enabled=False, or COMMFUSE=0) where a model is only "
            "traced or estimated."
        )


def check_sends(group: dist.ProcessGroup | None) -> None:
    """Raises ConfigError if transport 'p2p' cannot have its sends and receives."""
    if _runs_on("threaded", group):
        raise ConfigError(
            "transport 'p2p' needs the sends and receives of torch.distributed, which backend 'threaded' (ranks that are "
            "threads of one process) has not; use 'auto', 'shm' or 'tcp'"
        )


def check_replicas(group: dist.ProcessGroup | None) -> None:
    """Raises ConfigError if all-reduces between replicas cannot go on beside other communication."""
    if _runs_on("threaded", group):
        raise ConfigError(
            "replicas (a mesh of two dimensions) over torch.distributed's backend 'threaded', whose all-reduce blocks the rank "
            "that begins it: ranks would wait for each other in a circle. Run the ranks as processes, or without replicas."
        )


def _runs_on(backend: str, group: dist.ProcessGroup | None) -> bool:
    return (
        dist.is_initialized()
        and dist.get_world_size(group) > 1
        and any(entry.partition(":")[2] == backend for entry in str(dist.get_backend_config(group)).split(","))
    )
