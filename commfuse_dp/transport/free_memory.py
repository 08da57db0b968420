"""How much memory is still free, on a host and on a GPU."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch


def available_memory() -> int | None:
    """Bytes that could still be allocated: the lesser of MemAvailable and what the control group leaves; None if unknown."""
    found: list[int] = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        group = next(line.split("::", 1)[1] for line in Path("/proc/self/cgroup").read_text().splitlines() if "::" in line)
        folder = Path("/sys/fs/cgroup") / group.strip("/")
        limit = (folder / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            found.append(max(int(limit) - used, 0))
    except (OSError, ValueError, StopIteration):
        pass  # other control group versions: the machine's figure alone
    return min(found, default=None)


def free_memory(device: torch.device, ranks: int) -> int | None:
    """Bytes for each of `ranks` ranks of this host; None if unknown. A GPU counts as one rank's."""
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError, AssertionError):  # it serves messages only
            return torch.cuda.mem_get_info(device)[0] if torch.cuda.is_available() else None
        return None
    here = available_memory()
    return here // ranks if here is not None else None
