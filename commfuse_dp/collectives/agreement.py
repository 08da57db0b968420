"""Ranks compare what they are about to do, before any data moves.

    agree(transport, "ulysses_attention", {"dtype": q.dtype, "sizes": sizes, ...})
    sizes = agree(transport, "column_parallel", {"dtype": x.dtype, ...}, own=x.shape[1], sizes=None)

All ranks must describe their call alike; what may differ from rank to rank is left out, but for one number, `own`, which is
exchanged. What all ranks have agreed on is remembered with the transport, so that a step that repeats costs a look into a set;
a number that the caller does not know of the others is exchanged at every call.

[Note: New here, known there]
A rank that finds its call new asks all others; those that know theirs go on with their data. The two meet: what is exchanged
has an odd number of bytes, which no message of numbers has, so each finds a message that is not what it waits for and raises
MismatchError. Nobody waits for a deadline.
"""

from __future__ import annotations

import hashlib
import struct
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from commfuse_dp.collectives.functions import gather_lines
from commfuse_dp.collectives.sessions import failed
from commfuse_dp.collectives.steps import when_recovered
from commfuse_dp.errors import CommFuseError, MismatchError
from commfuse_dp.transport.base import Transport

BRIEF = struct.Struct("<q16sx")  # own number, digest of the description: 25 bytes
_LINE = 1021  # bytes of a description in full, exchanged if digests differ
REMEMBERED = 4096  # calls that ranks have agreed on


class _Agreed:
    """Of one transport."""

    __slots__ = ("calls", "known")

    def __init__(self) -> None:
        self.known: set[object] = set()
        self.calls: dict[Hashable, Any] = {}  # see `calls_of`


_agreed: weakref.WeakKeyDictionary[Transport, _Agreed] = weakref.WeakKeyDictionary()
when_recovered.append(lambda transport: _agreed.pop(transport, None))


def calls_of(transport: Transport) -> dict[Hashable, Any]:
    """What a caller has worked out for calls that ranks have agreed on, to be found again by all that it depends on here:
    forgotten together with that. Whatever lies here must not refer to the transport or to its group."""
    found = _agreed.get(transport)  # every call asks: not `_agreed_by`, which would be a frame more
    return found.calls if found is not None else _agreed_by(transport).calls


def _agreed_by(transport: Transport) -> _Agreed:
    found = _agreed.get(transport)
    if found is None:
        found = _agreed[transport] = _Agreed()
    return found


def agree(
    transport: Transport | None,
    what: str,
    description: Mapping[str, object],
    *,
    own: int | None = None,
    sizes: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """`own` of every rank. Raises MismatchError on all ranks, naming what differs, unless all give the same description.

    transport: None stands for a world of one rank.
    what: name of the call. description: hashable values, by name, equal on all ranks.
    own: a number of this rank's; None: there is none. sizes: what the caller takes everyone's to be; None: it does not know.
    """
    if transport is None:
        return () if own is None else (own,)
    key = what, tuple(description.items()), sizes
    agreed = _agreed_by(transport)
    known = agreed.known
    if (own is None or sizes is not None) and key in known:
        return sizes if sizes is not None else ()
    text = "\n".join([what, *(f"{name}={value}" for name, value in description.items())]).encode()
    brief = BRIEF.pack(0 if own is None else own, hashlib.blake2b(text, digest_size=16).digest())
    said = [BRIEF.unpack(one) for one in _exchange(transport, what, description, brief, BRIEF.size)]
    found = () if own is None else tuple(number for number, _ in said)
    problem = None
    if any(digest != said[0][1] for _, digest in said):
        lines = _exchange(transport, what, description, text, _LINE)
        texts = [line.rstrip(b"\0").decode(errors="replace") for line in lines]
        problem = _difference(what, transport, [text.split("\n") for text in texts], found)
    elif sizes is not None and found != sizes:
        problem = f"{what}: sizes={list(sizes)} were given, but the ranks have {list(found)}. No data has moved."
    if problem is not None:
        mismatch = MismatchError(problem)
        failed(transport, what, mismatch)
        raise mismatch
    if len(known) >= REMEMBERED:  # on all ranks at the same call
        known.clear()
        agreed.calls.clear()
    known.add(key)
    return found


def _exchange(transport: Transport, what: str, description: Mapping[str, object], own: bytes, width: int) -> list[bytes]:
    """What every rank gives, cut or filled up to `width` bytes, which are as many on all ranks."""
    line = torch.frombuffer(bytearray(own[:width].ljust(width, b"\0")), dtype=torch.uint8)
    try:
        found = gather_lines(transport, line, what)
    except CommFuseError as error:
        if MismatchError.__name__ not in f"{type(error).__name__}: {error}":  # found here, or by a peer that says so
            raise
        raise MismatchError(
            f"rank {transport.membership.called(transport.rank)}: {what} was called with an input that is new here "
            f"({_listed(description)}), while a peer went on with one that all ranks had agreed on before. All ranks must make "
            f"the same call. ({error})"
        ) from None
    return [bytes(row) for row in found.tolist()]


def _listed(description: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in description.items())


def _difference(what: str, transport: Transport, lines: list[list[str]], sizes: tuple[int, ...]) -> str:
    mine = lines[transport.rank]
    other, line = next((rank, line) for rank, line in enumerate(lines) if line != mine)
    here, there = map(transport.membership.called, (transport.rank, other))
    if mine[0] != line[0]:
        return (
            f"rank {here} calls {what}, rank {there} calls {line[0] or 'something else'}: all ranks must make the same calls "
            "in the same order"
        )
    pairs = [(a, b) for a, b in zip(mine[1:], line[1:], strict=False) if a != b]
    told = "; ".join(f"{a} here, {b} there" for a, b in pairs) or "(longer than what is compared by name)"
    may = f"Only the sizes ({', '.join(map(str, sizes))}) may differ." if sizes else "All ranks must call it with the same."
    return f"{what}: rank {here} and rank {there} do not fit together: {told}. {may} No data has moved."
