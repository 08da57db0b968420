"""Changes to objects of others, all or none of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")

log = logging.getLogger("commfuse_dp")

_ABSENT: Any = object()


class Transaction:
    """A list of undos. Whoever changes an object that is not ours registers the undo first, or in the same call.

    An undo runs whether its change was made, was half made, or was not made at all, and must be right in each case. (No `with`
    block: an interrupt as that ends would roll nothing back.)"""

    def __init__(self) -> None:
        self._undos: list[Callable[[], object]] = []

    def on_undo(self, undo: Callable[[], object]) -> None:
        """Register an undo; the change follows."""
        self._undos.append(undo)

    def do(self, change: Callable[[], object], undo: Callable[[], object]) -> None:
        """Make a change. If it raises in the middle, `undo` is registered already."""
        self.on_undo(undo)
        change()

    def acquire(self, make: Callable[[], T], release: Callable[[T], object]) -> T:
        """What `make()` returns; the undo releases it."""
        made: list[T] = []
        self.on_undo(lambda: [release(item) for item in made])
        made.append(make())
        return made[0]

    def set(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """mapping[key] = value; the undo gives back what was there, or removes the key."""
        before = mapping.get(key, _ABSENT)

        def undo() -> None:
            if before is _ABSENT:
                mapping.pop(key, None)
            else:
                mapping[key] = before

        self.do(lambda: mapping.__setitem__(key, value), undo)

    def set_class(self, module: nn.Module, kind: type) -> None:
        """Give an object another class. One that somebody has changed again since keeps it."""
        before = type(module)

        def undo() -> None:
            if type(module) is kind:
                module.__class__ = before

        self.do(lambda: setattr(module, "__class__", kind), undo)

    def roll_back(self) -> Exception | None:
        """Undo everything, the latest change first. An undo that raises stops no other: returns the first such error, and
        logs each."""
        first: Exception | None = None
        while self._undos:
            undo = self._undos.pop()
            try:
                undo()
            except Exception as error:
                log.warning("CommFuse: a change could not be taken back: %s: %s", type(error).__name__, error)
                first = first if first is not None else error
        return first
