"""The products that are checked and timed."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """A linear [out_features, in_features] on `tokens` tokens."""

    name: str
    tokens: int
    in_features: int
    out_features: int

    @property
    def operations(self) -> int:
        """Of each of the three products."""
        return 2 * self.tokens * self.in_features * self.out_features


LLAMA = (
    Shape("qkv", 8192, 4096, 6144),
    Shape("out", 8192, 4096, 4096),
    Shape("gate_up", 8192, 4096, 28672),
    Shape("down", 8192, 14336, 4096),
)
OTHERS = (Shape("skinny", 64, 4096, 4096), Shape("odd", 1999, 1531, 3001))  # few tokens; nothing divides by anything
TIMED = (*LLAMA, *OTHERS)

CHECKED = (
    Shape("square", 512, 512, 768),
    Shape("odd", 301, 333, 517),
    Shape("skinny", 7, 1024, 640),
    Shape("layer", 2048, 4096, 6144),
)
SMALL = (Shape("square", 128, 128, 256), Shape("odd", 61, 73, 91))


def rows_of(out_features: int, ranks: int) -> list[int]:
    """Rows of every rank's shard, as FSDP cuts dimension 0: equal but for the last ones, which may be shorter or empty."""
    chunk = -(-out_features // ranks)
    return [max(0, min(chunk, out_features - rank * chunk)) for rank in range(ranks)]


def arrival_order(ranks: int, rank: int) -> list[int]:
    """Own slice first, then the ranks that follow."""
    return [(rank + step) % ranks for step in range(ranks)]
