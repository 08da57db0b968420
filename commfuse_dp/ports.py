"""Ports for a job's rendezvous: a free one is found here, and opened later, by another process."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

from commfuse_dp.errors import CommFuseError

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST, _LAST = 10_000, 65_535  # below are the well-known services
_TRIES = 100
_random = random.SystemRandom()  # not seeded: processes that start together must not draw the same ones


def free_port() -> int:
    """A port that nobody has at this moment, on any address of this host.

    It is none of those that the kernel gives to whoever asks for any port, or connects to somewhere: such a one may be gone
    before it is opened.
    """
    first, last = _ephemeral()
    outside = [*range(_FIRST, min(first, _LAST + 1)), *range(max(last + 1, _FIRST), _LAST + 1)]
    for port in _random.sample(outside, min(_TRIES, len(outside))):
        with contextlib.suppress(OSError):
            return _bound(port)
    return _bound(0)


def check_port(port: int) -> None:
    """Raises CommFuseError if somebody listens on the port."""
    try:
        _bound(port)
    except OSError as error:
        raise CommFuseError(
            f"port {port} cannot be used ({error.strerror}). Name another one with --port, or leave --port "
            "out: then a free one is found."
        ) from None


def _bound(port: int) -> int:
    with socket.socket() as probe:
        if port:  # else the kernel may give one that it has given to somebody already
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what a job before this one has left is no obstacle
        probe.bind(("", port))
        return int(probe.getsockname()[1])


def _ephemeral() -> tuple[int, int]:
    try:
        first, last = map(int, _EPHEMERAL.read_text().split())
    except (OSError, ValueError):  # not Linux
        return 32_768, _LAST
    return first, last
