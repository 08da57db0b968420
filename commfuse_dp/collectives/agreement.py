"""Ranks compare what they are about to do, before any data moves: once for every new description, then never again.

    agree(transport, "ulysses_attention", {"dtype": q.dtype, "sizes": sizes, ...})

All ranks must describe their call alike; what may differ from rank to rank is left out. A description that all ranks have
agreed on is remembered with the transport, so that a step that repeats costs a look into a set.

[Note: New here, known there]
A rank that finds its description new asks all others; those that know theirs go on with their data. The two meet: the line that
is exchanged has an odd number of bytes, which no message of numbers has, so each finds a message that is not what it waits for
and raises MismatchError. Nobody waits for a deadline.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Mapping

import torch

from commfuse_dp.collectives.functions import all_gather
from commfuse_dp.errors import CommFuseError, MismatchError
from commfuse_dp.transport.base import Transport

_LINE = 1021  # bytes: odd
_agreed: weakref.WeakKeyDictionary[Transport, set[tuple[str, tuple[tuple[str, object], ...]]]] = weakref.WeakKeyDictionary()


def agree(transport: Transport | None, what: str, description: Mapping[str, object]) -> None:
    """Raise MismatchError, naming what differs on which ranks, unless all ranks of `transport` give the same description.

    what: name of the call. description: hashable values, by name, equal on all ranks. None stands for a world of one rank.
    """
    if transport is None:
        return
    key = (what, tuple(description.items()))
    known = _agreed.setdefault(transport, set())
    if key in known:
        return
    lines = [_decoded(row) for row in _everyones(transport, what, description)]
    mine = lines[transport.rank]
    for rank, line in enumerate(lines):
        if line != mine:
            raise MismatchError(_difference(what, transport.rank, mine, rank, line))
    known.add(key)


def _everyones(transport: Transport, what: str, description: Mapping[str, object]) -> torch.Tensor:
    """The ranks' descriptions as text: [ranks, bytes]."""
    line = torch.zeros(1, _LINE, dtype=torch.uint8)
    text = "\n".join([what, *(f"{name}={value}" for name, value in description.items())]).encode()
    text = (b"%08x\n" % zlib.crc32(text) + text)[:_LINE]  # the number tells what is cut off
    line[0, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    try:
        found = all_gather(line, sizes=(1,) * transport.world_size, transport=transport)
    except CommFuseError as error:
        if MismatchError.__name__ not in f"{type(error).__name__}: {error}":  # found here, or by a peer that says so
            raise
        raise MismatchError(
            f"rank {transport.rank}: {what} was called with an input that is new here ({_listed(description)}), while a peer "
            f"went on with one that all ranks had agreed on before. All ranks must make the same call. ({error})"
        ) from None
    assert found is not None
    return found


def _decoded(row: torch.Tensor) -> list[str]:
    return bytes(row.tolist()).rstrip(b"\0").decode(errors="replace").split("\n")


def _listed(description: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in description.items())


def _difference(what: str, here: int, mine: list[str], there: int, line: list[str]) -> str:
    if mine[1:2] != line[1:2]:
        return (
            f"rank {here} calls {what}, rank {there} calls {line[1] if len(line) > 1 else 'something else'}: all ranks must "
            "make the same calls in the same order"
        )
    pairs = [(a, b) for a, b in zip(mine[2:], line[2:], strict=False) if a != b]
    told = "; ".join(f"{a} here, {b} there" for a, b in pairs) or "(longer than what is compared by name)"
    return f"{what}: rank {here} and rank {there} do not fit together: {told}. All ranks must call it with the same."
