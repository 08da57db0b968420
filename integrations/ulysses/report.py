"""Which attention is served, and why another is not."""

from __future__ import annotations

import weakref
from typing import Any, Literal, NamedTuple

from commfuse_dp.integrations.attach.announce import announce

from commfuse_dp.autoload import warn

Path = Literal["ulysses", "stock"]


class AttentionRow(NamedTuple):
    name: str
    path: Path
    reason: str


class Report:
    """`rows`: one for each attention that has been called, as it was served the last time."""

    def __init__(self, rows: list[AttentionRow]) -> None:
        self.rows = rows

    def __str__(self) -> str:
        if not self.rows:
            return "CommFuse: no attention of DeepSpeed's Ulysses has been called yet"
        width = max(len(row.name) for row in self.rows)
        return "\n".join(
            [
                f"CommFuse: {sum(row.path == 'ulysses' for row in self.rows)} of {len(self.rows)} Ulysses attentions served",
                *(f"  {row.name:<{width}}  {row.path:<8} {row.reason}" for row in self.rows),
            ]
        )


_rows: weakref.WeakKeyDictionary[Any, AttentionRow] = weakref.WeakKeyDictionary()
_said: set[AttentionRow] = set()


def note(attention: Any, name: str, path: Path, reason: str, rank: int) -> None:
    """Rank 0 of the group says each new row once."""
    row = AttentionRow(name, path, reason)
    if _rows.get(attention) == row:
        return
    _rows[attention] = row
    if rank == 0 and row not in _said:
        _said.add(row)
        text = f"CommFuse: {name}: {'served' if path == 'ulysses' else 'stays with DeepSpeed'}: {reason}"
        announce(text) if path == "ulysses" else warn(text)


def report() -> Report:
    """What has become of each attention that was called so far."""
    return Report(list(_rows.values()))
