"""The products that are checked and timed."""

from __future__ import annotations

from typing import NamedTuple

from commfuse_dp.kernels.tiles import PASSES, Pass


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


class Kind(NamedTuple):
    """A product, and how its dense operands (tiles.OPERANDS) lie in memory."""

    name: str
    op: Pass
    transposed: tuple[bool, bool] = (False, False)
    row_bias: bool = False


PLAIN = tuple(Kind(op, op) for op in PASSES)
# Of linears whose slices are rows of the sequence: y = x W.T with x sharded, y = h V.T with partial sums of y sharded.
SEQUENCE = (
    Kind("column forward", "forward", (False, True), row_bias=True),  # y.T = W x_j.T
    Kind("column dgrad", "wgrad", (True, False)),  # P_j = (dy.T)_j.T W
    Kind("column wgrad", "dgrad", (True, False)),  # dW = sum of (dy.T)_j x_j
    Kind("row forward", "wgrad", (True, True)),  # P_j = (h.T)_j.T V.T
    Kind("row backward", "forward", (True, True)),  # dh.T = V.T dy_j.T
    Kind("row wgrad", "dgrad", (True, True)),  # dV.T = sum of (h.T)_j dy_j
)
# All six of a Llama-3-8B MLP's gate and up (or down) on one of eight ranks: W [3584, 4096], 8192 tokens in slices.
SEQUENCE_TIMED = Shape("mlp", 3584, 4096, 8192)

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
