"""Shaped links between ranks of one host: network namespaces joined by veth pairs and token buckets.

    with shaped_world(2, rate="1gbit") as world:
        for rank in range(2):
            subprocess.Popen(world.command_prefix(rank) + [sys.executable, "train.py"], env={..., **world.environment(rank)})

Two ranks are joined by one veth pair; more meet at a bridge that has a namespace of its own. Every rank has `rate` up and
`rate` down (full duplex). A process started through `command_prefix` lives as on a host of its own: own network, own host
name, own /dev/shm, so that nothing can take a short cut past the link.

[Note: Shaping without burning the cores]
A token bucket that is smaller than one 64 KB segmentation-offload packet makes the kernel cut every packet in software.
Measured on one connection, 512 MB: 1.8 CPU seconds with a 32 KB bucket and MTU 1500, 0.5 with 256 KB. Larger frames cut
the processing per packet as well: both directions at 4 Gbit/s cost 0.91 CPU seconds per GB with MTU 1500, 0.80 with 9000,
0.43 with 65000, and the goodput rises from 0.92 to 0.998 of the rate. The ranks share these cores with the link, so
buckets below 256 KB are refused and the largest frames are the default. A real card does this work off the CPU.

[Note: Congestion control]
A shaped link is used as most hosts use theirs: with cubic, Linux' default, or with reno where a container permits no cubic,
whatever this host has. BBR measures a link's rate anew after every pause and paces by what it finds: a training step that
sends in bursts, to several peers, then gets a part of the link (four ranks, benchmarks/results/2026-11-24_congestion.md).

[Note: Clean-up]
Namespaces are removed on normal end, exception, Ctrl-C and SIGTERM. Their names carry pid and start time of the owner, so
that the next `shaped_world` removes what a killed owner (SIGKILL, power) has left, and only that.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from commfuse_dp.errors import CommFuseError, ConfigError
from commfuse_dp.launch.signals import signals_held, terminate_as_exit

DEFAULT_MTU = 65000
MIN_BURST, DEFAULT_BURST = 256 << 10, 512 << 10
MAX_WORLD = 250
INTERFACE = "cf0"  # name of the shaped interface inside every rank's namespace
SUBNET = "198.18.0"  # RFC 2544: set aside for benchmarks of network links, routed nowhere
QUEUE_LATENCY = "50ms"  # longest time that a packet may sit in a token bucket's queue before it is dropped
PATIENCE_S = 60.0  # for the first byte of a measurement

_NAMES = re.compile(r"^commfuse-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{8}-(?:r\d+|sw)$")
_CLONE_NEWNET = 0x40000000
_TCP = "/proc/sys/net/ipv4"
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class LinkError(CommFuseError):
    """A shaped link cannot be made here; the message says what is missing and what to do."""


class LinkBytes(NamedTuple):
    """Bytes that one rank's interface has sent and received since it was made (headers included)."""

    tx: int
    rx: int


def parse_rate(text: str | None) -> int | None:
    """Bits per second of '1gbit', '2.5gbit', '800mbit', '64kbit' or '1000000bit'; None for None and 'none' (unshaped).

    Raises ConfigError on anything else.
    """
    if text is None or text.strip().lower() == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?bit)(?:/s|ps)?", text.strip().lower())
    bits = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if bits < 10**5:
        raise ConfigError(
            f"link rate {text!r}: give a number with kbit, mbit or gbit, at least 100kbit (for example 1gbit, 2.5gbit), "
            "or none for no limit."
        )
    return bits


@dataclass(frozen=True)
class ShapedWorld:
    """Namespaces of `world_size` ranks under one owner; made by `shaped_world`. `rate` in bits per second, None: unshaped."""

    world_size: int
    rate: int | None
    mtu: int
    burst: int
    owner: str
    congestion: str = ""
    """TCP's congestion control in the namespaces, as Linux names it"""

    def namespace(self, rank: int) -> str:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank}: this world has ranks 0..{self.world_size - 1}")
        return f"{self.owner}-r{rank}"

    @property
    def switch(self) -> str:
        """Namespace of the bridge; exists only for more than two ranks."""
        return f"{self.owner}-sw"

    @property
    def namespaces(self) -> list[str]:
        ranks = [self.namespace(rank) for rank in range(self.world_size)]
        return ranks if self.world_size <= 2 else [*ranks, self.switch]

    def address(self, rank: int) -> str:
        self.namespace(rank)
        return f"{SUBNET}.{rank + 1}"

    def interface(self, rank: int) -> str:
        """Name of the shaped interface as `rank` sees it."""
        self.namespace(rank)
        return INTERFACE

    def command_prefix(self, rank: int) -> list[str]:
        """Put before a command: runs it (by exec: the pid stays) as `rank`, as if on a host of its own."""
        host = f"{self.owner}-r{rank}"
        enter = f'mount -t tmpfs -o mode=1777 commfuse /dev/shm && echo {host} > /proc/sys/kernel/hostname && exec "$@"'
        return ["ip", "netns", "exec", self.namespace(rank), "unshare", "--mount", "--uts", "sh", "-c", enter, "sh"]

    def environment(self, rank: int) -> dict[str, str]:
        """Variables that make torch.distributed (gloo, store) use the shaped interface, with rank 0 as the master."""
        return {
            "MASTER_ADDR": self.address(0),
            "GLOO_SOCKET_IFNAME": self.interface(rank),
            "NCCL_SOCKET_IFNAME": self.interface(rank),
            "TP_SOCKET_IFNAME": self.interface(rank),
        }

    def bytes(self, rank: int) -> LinkBytes:
        """Bytes off the interface of `rank`, as its kernel counts them."""
        stats = json.loads(_ip("-n", self.namespace(rank), "-s", "-j", "link", "show", "dev", INTERFACE))[0]["stats64"]
        return LinkBytes(tx=stats["tx"]["bytes"], rx=stats["rx"]["bytes"])

    def measure_rate(self, seconds: float = 2.0) -> float:
        """Goodput of the link in bytes per second, the slowest rank's: each rank sends to the next and receives at once.

        TCP in all directions together, as a training step does; the first half second (slow start, full bucket) is left out.
        Raises LinkError if nothing arrives.
        """
        return _measure_goodput(self, seconds)


@contextlib.contextmanager
def shaped_world(
    world_size: int,
    rate: str | None = None,
    *,
    mtu: int = DEFAULT_MTU,
    burst: int = DEFAULT_BURST,
    congestion: str | None = None,
) -> Iterator[ShapedWorld]:
    """Make the namespaces of `world_size` ranks (1..250), yield them, and remove them and every process left inside.

    `rate`: see `parse_rate`; `mtu`: bytes, 1500..65535; `burst`: size of the token bucket in bytes;
    `congestion`: TCP's congestion control (cubic, reno, bbr, ...), None: [Note: Congestion control].
    Raises LinkError without root or iproute2, ConfigError on bad values.
    """
    bits = parse_rate(rate)
    if not 1 <= world_size <= MAX_WORLD:
        raise ConfigError(f"world_size {world_size}: a shaped world holds 1 to {MAX_WORLD} ranks.")
    if not 1500 <= mtu <= 65535:
        raise ConfigError(
            f"mtu {mtu}: 1500 to 65535 bytes are allowed (a virtual link carries no more); the default is {DEFAULT_MTU}."
        )
    if burst < MIN_BURST:
        raise ConfigError(
            f"burst {burst}: at least {MIN_BURST} bytes, else the kernel cuts every offloaded packet in software and its CPU "
            "time is charged to the training step."
        )
    check_requirements()
    if congestion is not None:
        _check_congestion(congestion)
    sweep_stale()
    owner = f"commfuse-{os.getpid()}-{_start_time(os.getpid())}-{secrets.token_hex(4)}"
    world = ShapedWorld(world_size=world_size, rate=bits, mtu=mtu, burst=burst, owner=owner)
    with terminate_as_exit():
        try:
            _build(world, congestion)
            used = _ip("netns", "exec", world.namespace(0), "cat", f"{_TCP}/tcp_congestion_control").strip()
            yield replace(world, congestion=used)
        finally:
            with signals_held():
                _remove(world.namespaces)


def check_requirements() -> None:
    """Raises LinkError that names what is missing for a shaped link, and the fix."""
    missing = [tool for tool in ("ip", "tc", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        raise LinkError(
            f"a shaped link needs {', '.join(missing)}, not found in PATH. Install iproute2 and util-linux "
            "(for example: apt-get install iproute2 util-linux), or run without a link (--link none)."
        )
    if os.geteuid() != 0:
        raise LinkError(
            f"a shaped link needs root to make network namespaces; this process runs as user id {os.geteuid()}. "
            "Run the same command with sudo, or without a link (--link none)."
        )


def sweep_stale() -> list[str]:
    """Remove the namespaces whose owner is dead; returns their names."""
    listed = {entry["name"] for entry in json.loads(_ip("-j", "netns", "list") or "[]")}
    stale = []
    for name in sorted(listed):
        match = _NAMES.match(name)
        if match and _start_time(int(match["pid"])) != match["start"]:
            stale.append(name)
    _remove(stale)
    return stale


# ---- building and removing -------------------------------------------------------------------------------------------
def _build(world: ShapedWorld, congestion: str | None) -> None:
    for name in world.namespaces:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        names = ("cubic", "reno") if congestion is None else (congestion,)
        attempts = " || ".join(f"echo {each} > {_TCP}/tcp_congestion_control" for each in names)
        _ip("netns", "exec", name, "sh", "-c", attempts, check=congestion is not None)  # else it stays as it is
    shaped = [(world.namespace(rank), INTERFACE) for rank in range(world.world_size)]
    mtu = ["mtu", str(world.mtu)]
    if world.world_size == 1:  # no peer to talk to: an interface of the same name, so that callers need no special case
        _ip("-n", world.namespace(0), "link", "add", INTERFACE, *mtu, "type", "dummy")
    elif world.world_size == 2:
        a, b = world.namespaces
        _ip("link", "add", INTERFACE, "netns", a, *mtu, "type", "veth", "peer", "name", INTERFACE, "netns", b, *mtu)
    else:
        # No forwarding delay: a port takes part at once instead of after 15 s of listening.
        _ip("-n", world.switch, "link", "add", "switch", *mtu, "type", "bridge", "forward_delay", "0")
        _ip("-n", world.switch, "link", "set", "switch", "up")
        for rank in range(world.world_size):
            port, name = f"port{rank}", world.namespace(rank)
            _ip(
                "link", "add", INTERFACE, "netns", name, *mtu, "type", "veth", "peer", "name", port, "netns", world.switch, *mtu
            )
            _ip("-n", world.switch, "link", "set", port, "master", "switch", "up")
            shaped.append((world.switch, port))  # a port's egress is its rank's way down
    for rank in range(world.world_size):
        name = world.namespace(rank)
        _ip("-n", name, "address", "add", f"{world.address(rank)}/24", "dev", INTERFACE)
        _ip("-n", name, "link", "set", INTERFACE, "up")
    if world.rate is not None and world.world_size > 1:
        for name, interface in shaped:
            limits = ["rate", f"{world.rate}bit", "burst", f"{world.burst}b", "latency", QUEUE_LATENCY]
            _run("tc", "-n", name, "qdisc", "add", "dev", interface, "root", "tbf", *limits)


def _check_congestion(wanted: str) -> None:
    with contextlib.suppress(OSError):  # where that cannot be read, setting it tells
        allowed = Path(_TCP, "tcp_allowed_congestion_control").read_text().split()
        if wanted not in allowed:
            raise ConfigError(f"congestion {wanted!r}: this kernel allows {', '.join(allowed)} in network namespaces.")


def _remove(names: list[str]) -> None:
    for name in names:
        if not Path("/run/netns", name).exists():
            continue
        # A namespace lives as long as a process in it: whoever is still inside was started through this world.
        for pid in _ip("netns", "pids", name, check=False).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "delete", name, check=False)
    left = [name for name in names if Path("/run/netns", name).exists()]
    if left:
        raise LinkError(f"cannot remove network namespace {', '.join(left)}; remove it by hand: ip netns delete NAME.")


def _ip(*arguments: str, check: bool = True) -> str:
    return _run("ip", *arguments, check=check)


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if check and done.returncode != 0:
        reason = done.stderr.strip() or f"exit status {done.returncode}"
        raise LinkError(
            f"`{' '.join(command)}` failed: {reason}. A shaped link needs a kernel with network namespaces, veth, bridge and "
            "tbf, and the right to use them (in a container: --privileged, or CAP_NET_ADMIN with CAP_SYS_ADMIN)."
        )
    return done.stdout


def _start_time(pid: int) -> str | None:
    """Start time of a live process in clock ticks since boot (a pid alone may have been given to another process)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


# ---- measuring the link ----------------------------------------------------------------------------------------------
def _sockets_within(namespace: str, make: Any) -> Any:
    """Call make() on a thread that has joined `namespace`: sockets stay in the namespace they were made in."""
    libc = ctypes.CDLL(None, use_errno=True)

    def work() -> Any:
        with open(f"/run/netns/{namespace}") as handle:
            if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
                raise LinkError(f"cannot join network namespace {namespace}: {os.strerror(ctypes.get_errno())}.")
        return make()

    with ThreadPoolExecutor(max_workers=1) as pool:  # the thread ends here, and with it its membership
        return pool.submit(work).result()


def _measure_goodput(world: ShapedWorld, seconds: float, port: int = 29401) -> float:
    if world.world_size == 1:
        return float("inf")
    warm_up, block, size = 0.5, bytearray(1 << 20), world.world_size
    received = [0] * size
    stop = threading.Event()

    def pump(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not stop.is_set():
                sock.sendall(block)

    def drain(rank: int, sock: socket.socket) -> None:
        room = bytearray(1 << 20)
        with contextlib.suppress(OSError):
            while count := sock.recv_into(room):
                received[rank] += count

    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(
                _sockets_within(world.namespace(rank), lambda r=rank: socket.create_server((world.address(r), port)))
            )
            for rank in range(size)
        ]
        out: list[socket.socket] = []
        into: list[tuple[int, socket.socket]] = []
        threads: list[threading.Thread] = []
        stack.callback(_join, threads)
        for rank in range(size):
            peer = (rank + 1) % size
            out.append(
                _sockets_within(world.namespace(rank), lambda p=peer: socket.create_connection((world.address(p), port), 10))
            )
            stack.enter_context(out[-1])
            into.append((peer, stack.enter_context(listeners[peer].accept()[0])))
        for sock in [*out, *(sock for _, sock in into)]:
            sock.settimeout(None)
            stack.callback(_shut, sock)
        stack.callback(stop.set)
        threads += [threading.Thread(target=pump, args=(sock,), daemon=True) for sock in out]
        threads += [threading.Thread(target=drain, args=pair, daemon=True) for pair in into]
        for thread in threads:
            thread.start()
        _wait_for_bytes(received, [0] * size)
        time.sleep(warm_up)
        before, start = list(received), time.monotonic()
        time.sleep(seconds)
        _wait_for_bytes(received, before)  # on a busy machine a rank may not have run meanwhile: a longer time, then, and not 0
        after, end = list(received), time.monotonic()
    return min(b - a for a, b in zip(before, after, strict=True)) / (end - start)


def _wait_for_bytes(received: list[int], before: list[int]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while silent := [rank for rank, (a, b) in enumerate(zip(before, received, strict=True)) if a == b]:
        if time.monotonic() > limit:
            raise LinkError(f"the link carried nothing to rank {silent[0]} within {PATIENCE_S:.0f} s.")
        time.sleep(0.01)


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(5)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
