"""How the ranks of a TCP transport find each other: addresses, listening sockets, authenticated connections.

Every rank listens on a free port of the interface that reaches its peers and tells all others the address and a random token
(through the group's own exchange). Of each pair the higher rank connects; both sides prove that they know the other's token, so
a stray connection, or one of another job that got the same port, is turned away and waiting goes on.

Between connecting and accepting the ranks exchange how it went: nobody then waits for a connection that will not come, and a
rank that dies here is missed, and named, by that exchange.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from typing import NamedTuple

from commfuse_dp.errors import MismatchError, TransportError
from commfuse_dp.mpi_launch import address_of
from commfuse_dp.transport.base import ExchangeFn
from commfuse_dp.transport.checks import all_together, raise_failures
from commfuse_dp.transport.membership import called_in
from commfuse_dp.transport.shm.sockets import receive_exactly
from commfuse_dp.transport.tcp.links import CONTROL_ROLE, DATA_ROLE

ADDRESS_VARIABLE = "COMMFUSE_TCP_ADDRESS"
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
MASTER_VARIABLE = "MASTER_ADDR"

_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<8sII{_TOKEN_BYTES}s")  # magic, rank, role of the connection, token of the rank spoken to
_HELLO_MAGIC = b"CFTCP/1\0"
_RETRY_S = 0.05
_REFUSED_S = 1.0  # whoever listened there a moment ago, and refuses for so long, is gone
_ROLES = (CONTROL_ROLE, DATA_ROLE)
_NO_SET_UP = "the tcp transport could not be set up: "


class _Card(NamedTuple):
    """What a rank tells the others."""

    host: str
    port: int
    pid: int
    token: bytes
    place: str  # host and network namespace: loopback addresses are good only within one
    inbox_bytes: int
    number: int  # of the rank, for errors
    error: str | None


class Links(NamedTuple):
    sockets: dict[tuple[int, int], socket.socket]  # connected, by peer and role
    places: list[str]  # how to find each rank, for errors


def connect_all(rank: int, exchange: ExchangeFn, *, deadline_s: float, inbox_bytes: int, address: str | None = None) -> Links:
    """Collective. Connected sockets to all peers.

    Args:
        address: address or host name of this rank's interface; default: `choose_address()`.

    Raises:
        MismatchError, TransportError: on every rank, naming the address or the ranks that cannot be reached and the fix.
    """
    listener, card = _listen(address, inbox_bytes, called_in(exchange, rank))
    try:
        cards: list[_Card] = exchange(card)
        raise_failures(exchange, (card.error for card in cards), _NO_SET_UP)
        _check_loopback(cards)
        if len({c.inbox_bytes for c in cards}) > 1:
            given = ", ".join(f"{c.inbox_bytes} on rank {c.number}" for c in cards)
            raise MismatchError(f"inbox_bytes must be the same on all ranks; it is {given}")
        assert listener is not None
        sockets: dict[tuple[int, int], socket.socket] = {}
        limit = time.monotonic() + deadline_s
        steps = (lambda: _connect_all(rank, cards, sockets, limit), lambda: _accept(rank, cards, listener, sockets, limit))

        def close() -> None:
            for sock in sockets.values():
                sock.close()

        all_together(exchange, steps, close, start=_NO_SET_UP)
        return Links(sockets, [f"pid {card.pid} at {card.host}" for card in cards])
    finally:
        if listener is not None:
            listener.close()


def choose_address() -> str:
    """The address of this rank that its peers are likely to reach: environment first, then the route to MASTER_ADDR."""
    if os.environ.get(ADDRESS_VARIABLE):
        return os.environ[ADDRESS_VARIABLE]
    if os.environ.get(INTERFACE_VARIABLE):
        return interface_address(os.environ[INTERFACE_VARIABLE].split(",")[0])
    master = os.environ.get(MASTER_VARIABLE)
    return _route_to(master) if master else "127.0.0.1"


def interface_address(name: str) -> str:
    """IPv4 address of an interface, or else its first routable IPv6 address. Raises TransportError."""
    if (address := address_of(name)) is not None:
        return address
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as table:
        for line in table:
            digits, _, _, scope, _, interface = line.split()
            if interface == name and scope != "20":  # 20: link-local, of no use without its interface on the other side
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    known = ", ".join(interface for _, interface in socket.if_nameindex())
    raise TransportError(
        f"{INTERFACE_VARIABLE}={name!r} is no interface with an address here; there are: {known}. "
        f"Name one of these, or set {ADDRESS_VARIABLE} to the address itself."
    )


def _route_to(host: str) -> str:
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing: the kernel only looks up the route and the source address
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TransportError(
            f"there is no route to {MASTER_VARIABLE}={host!r} ({error}), so this rank's own address cannot be found: "
            f"set {ADDRESS_VARIABLE} to an address of this host that its peers reach."
        ) from None


def _listen(address: str | None, inbox_bytes: int, number: int) -> tuple[socket.socket | None, _Card]:
    """Never raises for a bad address: the other ranks are waiting for this rank's card."""
    card = _Card("", 0, os.getpid(), secrets.token_bytes(_TOKEN_BYTES), _place(), inbox_bytes, number, None)
    listener = None
    try:
        address = address or choose_address()
        family, kind, protocol, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.bind(target)
        listener.listen(1024)
    except TransportError as error:
        return None, card._replace(error=str(error))
    except OSError as error:
        if listener is not None:
            listener.close()
        text = (
            f"cannot listen on {address!r}: {error}. Give an address of one of this host's interfaces in "
            f"{ADDRESS_VARIABLE}, or the interface's name in {INTERFACE_VARIABLE}."
        )
        return None, card._replace(error=text)
    host, port = listener.getsockname()[:2]
    return listener, card._replace(host=str(host), port=int(port))


def _place() -> str:
    boot, namespace = socket.gethostname(), ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    with contextlib.suppress(OSError):
        namespace = str(os.stat("/proc/self/ns/net").st_ino)
    return f"{boot}/{namespace}"


def _check_loopback(cards: list[_Card]) -> None:
    if len({card.place for card in cards}) == 1:
        return
    local = [card.number for card in cards if card.host.startswith("127.") or card.host == "::1"]
    if local:
        raise TransportError(
            f"ranks {local} listen on a loopback address, but the ranks are on several hosts (or network namespaces), where "
            f"nobody reaches it. Set {ADDRESS_VARIABLE} or {INTERFACE_VARIABLE} on each of them "
            f"(often {MASTER_VARIABLE}'s name is mapped to 127.0.1.1 in /etc/hosts)."
        )


def _connect_all(rank: int, cards: list[_Card], sockets: dict[tuple[int, int], socket.socket], limit: float) -> None:
    """To all lower ranks, which are greeted; they answer when they accept."""
    for peer in range(rank):
        for role in _ROLES:
            sockets[peer, role] = _connect(rank, peer, role, cards, limit)


def _connect(rank: int, peer: int, role: int, cards: list[_Card], limit: float) -> socket.socket:
    card = cards[peer]
    last = "no time left"
    refused = min(limit, time.monotonic() + _REFUSED_S)
    while (left := limit - time.monotonic()) > 0:
        sock = None
        try:
            sock = socket.create_connection((card.host, card.port), timeout=left)
            sock.sendall(_HELLO.pack(_HELLO_MAGIC, rank, role, card.token))
            return sock
        except OSError as error:
            last = str(error)
            if isinstance(error, ConnectionRefusedError) and time.monotonic() > refused:
                limit = refused
        if sock is not None:
            sock.close()
        time.sleep(min(_RETRY_S, max(0.0, limit - time.monotonic())))
    raise _unreachable(card, last)


def _await_answers(rank: int, cards: list[_Card], sockets: dict[tuple[int, int], socket.socket], limit: float) -> None:
    """Of the lower ranks, to our greetings."""
    for (peer, role), sock in sockets.items():
        if peer > rank:
            continue
        sock.settimeout(max(0.001, limit - time.monotonic()))
        try:
            answer = receive_exactly(sock, _HELLO.size)
        except OSError as error:
            raise _unreachable(cards[peer], str(error)) from None
        if _valid(answer, cards[rank].token) != (peer, role):
            raise _unreachable(cards[peer], "something else answered there")
        sock.settimeout(None)


def _unreachable(card: _Card, last: str) -> TransportError:
    return TransportError(
        f"cannot reach rank {card.number} at {card.host} port {card.port} ({last}). Is there a route or a firewall between the "
        f"hosts? Set {ADDRESS_VARIABLE} on rank {card.number} to an address that all ranks reach."
    )


def _accept(
    rank: int, cards: list[_Card], listener: socket.socket, sockets: dict[tuple[int, int], socket.socket], limit: float
) -> None:
    """Accept and answer until all higher ranks are there, then read the answers of the lower ones.

    Greetings are read as they come, so that a silent stranger delays nobody."""
    missing = {(peer, role) for peer in range(rank + 1, len(cards)) for role in _ROLES}
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        greetings: dict[socket.socket, bytearray] = {}
        try:
            while missing:
                left = limit - time.monotonic()
                if left <= 0:
                    absent = sorted({cards[peer].number for peer, _ in missing})
                    raise TransportError(
                        f"ranks {absent} did not connect to {cards[rank].host} port {cards[rank].port} in time. Did they die? "
                        f"Is there a firewall? Set {ADDRESS_VARIABLE} on rank {cards[rank].number} to an address that all "
                        "ranks reach."
                    )
                for key, _ in selector.select(left):
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    if sock is listener:
                        with contextlib.suppress(OSError):
                            stranger, _ = listener.accept()
                            stranger.setblocking(False)
                            greetings[stranger] = bytearray()
                            selector.register(stranger, selectors.EVENT_READ)
                        continue
                    text = greetings[sock]
                    try:
                        piece = sock.recv(_HELLO.size - len(text))
                    except BlockingIOError:
                        continue
                    except OSError:
                        piece = b""
                    text += piece
                    if piece and len(text) < _HELLO.size:
                        continue
                    selector.unregister(sock)
                    del greetings[sock]
                    name = _valid(bytes(text), cards[rank].token)
                    if name in missing:
                        sock.setblocking(True)
                        sock.sendall(_HELLO.pack(_HELLO_MAGIC, rank, name[1], cards[name[0]].token))
                        sockets[name] = sock
                        missing.remove(name)
                    else:
                        sock.close()
        finally:
            for sock in greetings:
                sock.close()
    _await_answers(rank, cards, sockets, limit)


def _valid(text: bytes, token: bytes) -> tuple[int, int]:
    """Rank of who sent this greeting and role of the connection; (-1, -1) if it does not know our token."""
    if len(text) != _HELLO.size:
        return -1, -1
    magic, rank, role, given = _HELLO.unpack(text)
    return (int(rank), int(role)) if magic == _HELLO_MAGIC and hmac.compare_digest(given, token) else (-1, -1)
