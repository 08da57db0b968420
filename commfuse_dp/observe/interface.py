"""Bytes read off a network interface: what really crossed the wire, headers and acknowledgements included (Linux)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from commfuse_dp.errors import TransportError

SYS_NET = Path("/sys/class/net")


class InterfaceBytes(NamedTuple):
    """Totals since the interface came up."""

    received: int
    sent: int

    def since(self, earlier: InterfaceBytes) -> InterfaceBytes:
        return InterfaceBytes(self.received - earlier.received, self.sent - earlier.sent)


def read_interface(name: str, root: Path = SYS_NET) -> InterfaceBytes:
    """Counters of interface `name`, in this network namespace. Raises TransportError if there is no such interface."""
    folder = root / name / "statistics"
    try:
        return InterfaceBytes(int((folder / "rx_bytes").read_text()), int((folder / "tx_bytes").read_text()))
    except OSError as error:
        known = ", ".join(sorted(p.name for p in root.iterdir())) if root.is_dir() else "none (not Linux?)"
        raise TransportError(
            f"cannot read the byte counters of interface {name!r} ({error}). Interfaces here: {known}."
        ) from None
