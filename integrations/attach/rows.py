"""The list of parameters in a report: what is the same in many layers stands in one line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a name that is nothing but a number


def lines_of(rows: Sequence[Any]) -> list[str]:
    """Name, path and reason of each `ParameterRow`. Those with the same path and reason, whose names differ only in
    numbers that are there in all combinations, share a line: `layers.0-31.mlp.up.weight`."""
    together: dict[tuple[str, str, str], list[list[int]]] = {}
    for row in rows:
        numbers = [int(found) for found in _NUMBER.findall(row.name)]
        together.setdefault((_NUMBER.sub("\0", row.name), row.path, row.reason), []).append(numbers)
    found = [(name, path, reason) for (pattern, path, reason), group in together.items() for name in _names(pattern, group)]
    width = max((len(name) for name, _, _ in found), default=4)
    return [f"  {name:<{width}}  {path:<9} {reason}" for name, path, reason in found]


def _names(pattern: str, group: list[list[int]]) -> Iterator[str]:
    """pattern: with a zero byte for each number."""
    first, *others = pattern.split("\0")
    places = [sorted(set(values)) for values in zip(*group, strict=True)]
    one = [[[number] for number in numbers] for numbers in group]
    for numbers in [places] if math.prod(map(len, places)) == len(group) else one:
        yield first + "".join(_ranges(place) + other for place, other in zip(numbers, others, strict=True))


def _ranges(numbers: list[int]) -> str:
    """0-3,5 for 0, 1, 2, 3, 5."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
