"""Shaped worlds: what they refuse, what the link really carries, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from commfuse_dp.errors import ConfigError
from commfuse_dp.launch import netns
from commfuse_dp.launch.netns import LinkError, parse_rate, shaped_world, sweep_stale
from tests.support.links import needs_link


def _existing() -> set[str]:
    folder = Path("/run/netns")
    return {entry.name for entry in folder.iterdir() if entry.name.startswith("commfuse-")} if folder.exists() else set()


def _owned_by(pid: int) -> set[str]:
    return {name for name in _existing() if name.startswith(f"commfuse-{pid}-")}


@pytest.mark.parametrize(
    ("text", "bits"),
    [("1gbit", 10**9), ("2.5gbit", 25 * 10**8), ("800mbit", 8 * 10**8), (" 4GBIT ", 4 * 10**9), ("none", None), (None, None)],
)
def test_rates(text: str | None, bits: int | None) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["fast", "1", "1gb", "-1gbit", "0gbit", "10kbit", ""])
def test_bad_rate_names_value_and_fix(text: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)link rate.*gbit"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"world_size": 0}, "1 to 250"),
        ({"world_size": 2, "mtu": 100}, "1500 to 65535"),
        ({"world_size": 2, "burst": 32 << 10}, "at least 262144"),
        pytest.param({"world_size": 2, "congestion": "swift"}, "'swift'.*allows", marks=needs_link),
    ],
)
def test_bad_values(arguments: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words), shaped_world(**arguments):  # type: ignore[arg-type]
        pass


def test_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(netns.shutil, "which", lambda tool: f"/sbin/{tool}")
    with pytest.raises(LinkError, match=r"needs root.*1000.*sudo"), shaped_world(2, "1gbit"):
        pass


def test_without_iproute2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netns.shutil, "which", lambda tool: None if tool in ("ip", "tc") else f"/bin/{tool}")
    with pytest.raises(LinkError, match=r"ip, tc.*iproute2"), shaped_world(2, "1gbit"):
        pass


def _most(rate: float, seconds: float) -> float:
    """Bytes that a link of `rate` bytes per second lets through in any such time. What an application receives in a window of
    time may be more: it finds what has waited in its socket while the processors were busy."""
    return rate * seconds + netns.DEFAULT_BURST


def _shaped_to(namespace: str) -> float:
    """Bytes per second that the kernel has been told for the interface of a namespace."""
    command = ["tc", "-j", "-n", namespace, "qdisc", "show", "dev", netns.INTERFACE]
    (found,) = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["kind"] == "tbf"
    return float(found["options"]["rate"])


@needs_link
def test_rate_is_kept_in_both_directions_and_counted() -> None:
    with shaped_world(2, "40mbit") as world:
        assert [_shaped_to(namespace) for namespace in world.namespaces] == [5e6, 5e6]
        start = time.monotonic()
        before = [world.bytes(rank) for rank in range(2)]
        rate = world.measure_rate(1.0)
        after = [world.bytes(rank) for rank in range(2)]
        elapsed = time.monotonic() - start
    assert rate > 0  # how much depends on what else keeps the processors busy
    for b, a in zip(before, after, strict=True):  # what was sent in the second that was measured, and more before
        assert 0.9 * rate < a.tx - b.tx < _most(5e6, elapsed)
        assert 0.9 * rate < a.rx - b.rx < _most(5e6, elapsed)


@needs_link
def test_congestion_control_is_that_of_all_namespaces() -> None:
    with shaped_world(2, congestion="reno") as world:
        setting = "/proc/sys/net/ipv4/tcp_congestion_control"
        found = [subprocess.check_output(["ip", "netns", "exec", name, "cat", setting], text=True) for name in world.namespaces]
        assert found == ["reno\n"] * 2
    assert world.congestion == "reno"  # records are made when the namespaces are gone


@pytest.mark.slow
@needs_link
def test_three_ranks_meet_at_a_bridge() -> None:
    with shaped_world(3, "200mbit") as world:
        assert len(world.namespaces) == 4
        assert [_shaped_to(world.namespace(rank)) for rank in range(3)] == [25e6] * 3
        assert world.measure_rate(1.0) > 0
        # A rank that two others send to still gets no more than `rate`: shaped on the way down too.
        program = textwrap.dedent("""
            import socket, sys, threading
            role, host = sys.argv[1:]
            if role == "send":
                sock = socket.create_connection((host, 29500), 10)
                try:
                    while True: sock.sendall(bytes(1 << 20))
                except OSError: pass
            else:
                server = socket.create_server((host, 29500)); print("ready", flush=True)
                socks = [server.accept()[0] for _ in range(2)]
                def drain(sock):
                    left = 32 << 20
                    while left > 0: left -= len(sock.recv(1 << 20))
                threads = [threading.Thread(target=drain, args=(sock,)) for sock in socks]
                for thread in threads: thread.start()
                for thread in threads: thread.join()
                print("done", flush=True)
        """)

        def start(rank: int, role: str) -> subprocess.Popen[str]:
            command = [*world.command_prefix(rank), sys.executable, "-c", program, role, world.address(0)]
            return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

        receiver = start(0, "receive")
        assert receiver.stdout is not None and receiver.stdout.readline() == "ready\n"
        before, begun = world.bytes(0).rx, time.monotonic()
        senders = [start(1, "send"), start(2, "send")]
        assert receiver.stdout.readline() == "done\n"
        received, elapsed = world.bytes(0).rx - before, time.monotonic() - begun
        for process in [receiver, *senders]:
            process.kill()
            process.communicate()
    assert 64 << 20 <= received < _most(25e6, elapsed)
    assert not _owned_by(os.getpid())


@needs_link
def test_ranks_look_like_hosts_of_their_own() -> None:
    marker = Path("/dev/shm") / f"commfuse-test-{os.getpid()}"
    marker.write_text("outside")
    program = (
        "import os, socket; print(socket.gethostname(), os.listdir('/dev/shm'), sorted(n for _, n in socket.if_nameindex()))"
    )
    try:
        with shaped_world(2) as world:
            said = [
                subprocess.run(
                    [*world.command_prefix(rank), sys.executable, "-c", program], capture_output=True, text=True, check=True
                )
                for rank in range(2)
            ]
    finally:
        marker.unlink()
    words = [done.stdout.split() for done in said]
    assert words[0][0] != words[1][0] != socket.gethostname()
    assert all(line[1] == "[]" for line in words)
    assert all(netns.INTERFACE in " ".join(line) for line in words)


@needs_link
def test_processes_inside_end_with_the_world() -> None:
    with pytest.raises(RuntimeError, match="on purpose"), shaped_world(2, "1gbit") as world:
        inside = subprocess.Popen([*world.command_prefix(0), "sh", "-c", "echo in; exec sleep 600"], stdout=subprocess.PIPE)
        assert inside.stdout is not None and inside.stdout.readline() == b"in\n"
        names = set(world.namespaces)
        assert names <= _existing()
        raise RuntimeError("on purpose")
    assert not names & _existing()
    inside.communicate(timeout=10)
    assert inside.returncode == -signal.SIGKILL


_OWNER = """
import sys, time
from commfuse_dp.launch.netns import shaped_world
with shaped_world(2, "1gbit"):
    print("up", flush=True)
    time.sleep(600)
"""


def _owner() -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    assert len(_owned_by(process.pid)) == 2
    return process


@needs_link
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_remove_everything(number: int) -> None:
    process = _owner()
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert not _owned_by(process.pid)


@needs_link
def test_killed_owner_is_swept_and_live_owner_is_not() -> None:
    dead, live = _owner(), _owner()
    try:
        dead.kill()
        dead.communicate()
        assert len(_owned_by(dead.pid)) == 2
        removed = sweep_stale()
        assert {name for name in removed if name.startswith(f"commfuse-{dead.pid}-")}
        assert not _owned_by(dead.pid)
        assert len(_owned_by(live.pid)) == 2
    finally:
        live.terminate()
        live.communicate(timeout=30)
    assert not _owned_by(live.pid)
