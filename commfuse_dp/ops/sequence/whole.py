"""Products with all slices of a sequence in one kernel each: the way of a GPU through layers of tensor parallelism.

    by slices   wait | GEMM | wait | GEMM ...                 the stream waits between GEMMs
    whole       one table | kernel: tile | tile, slice has come? | tile ...; or: tile | slice is made: its words | tile ...

The kernels are those of data parallelism (kernels/), which see the slices of tokens where these see rows of a weight; so what
is x or y there lies in memory transposed here. S are rows of the whole tensor, [outer * width, K].

| product | kernel | operand | slices |
| --- | --- | --- | --- |
| column: y[S, :] = x_S @ W.T | forward | W, y.T | x_S, as they come |
| column: P_S = dy[S, :] @ W | wgrad | dy.T, W | P_S, signalled |
| column: dW = sum of dy[S, :].T @ x_S | dgrad | dy.T, dW | x_S |
| row: P_S = x[S, :] @ W.T | wgrad | x.T, W.T | P_S, signalled |
| row: dx[S, :] = dy_S @ W | forward | W.T, dx.T | dy_S, as they come |
| row: dW = sum of dy_S.T @ x[S, :] | dgrad | x.T, dW.T | dy_S |

They are used where the choice of backends (kernels/choice.py) finds them faster than BLAS by slices. That is asked once for
products of one shape, for it takes a table; from then on those that BLAS computes go by slices at once.

[Note: Kernels that wait need the whole device]
A kernel that waits keeps the multiprocessors that it has. What it waits for, activations, depends on how far its peers are,
and these may wait, in their own streams, for ranks of another group (data parallelism), whose collectives need multiprocessors
of this device: a circle. So kernels wait for slices only where the ranks of a layer are all ranks there are: then
all that anybody waits for was enqueued in one order on all of them; and where no two of them share a GPU, as for pulls
([Note: Kernels that wait] in transport `symmetric`). Else the stream waits, slice by slice, which takes no
multiprocessor. (Weights of data parallelism, engine/whole.py, do not depend on that: all of them are published as a step
begins.) Kernels that signal wait for nobody.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from commfuse_dp.collectives.bound import Owner
from commfuse_dp.collectives.execution import Coming, Leaving
from commfuse_dp.device.base import Word, WordLike
from commfuse_dp.kernels import choice, tiles
from commfuse_dp.kernels.choice import Asked, Chooser, Row
from commfuse_dp.kernels.gemms import Gemms
from commfuse_dp.kernels.table import SliceEntry, SliceTable
from commfuse_dp.kernels.tiles import Pass
from commfuse_dp.ops.sequence.rows import Blocks, Tokens
from commfuse_dp.transport.base import Transport
from commfuse_dp.transport.streams.words import WordTransport

_log = logging.getLogger("commfuse_dp")
_MOST = 1024  # products and tables that are remembered


class Product(NamedTuple):
    """A product with slices that come. op: "forward" or "dgrad"; left: x or dy there, out: y or dx."""

    op: Pass
    left: torch.Tensor
    out: torch.Tensor
    row_bias: torch.Tensor | None = None


class _Line(NamedTuple):
    """A line of a table: rows [start, stop) of a slice are rows of the whole tensor from `first` on."""

    number: int  # of the slice
    start: int
    stop: int
    first: int


class WholeSequence:
    """Of one transport.

    Attributes:
        waits: kernels may wait for slices: see [Note: Kernels that wait need the whole device]."""

    def __init__(self, transport: WordTransport, asked: Asked) -> None:
        device = transport.device
        assert device is not None
        self._transport, self._device = weakref.proxy(transport), device
        self._chooser = Chooser(asked)
        self._gemms = Gemms(self._chooser, device)
        numbers = transport.membership.numbers
        alone = numbers is None or not dist.is_initialized() or len(numbers) == dist.get_world_size()
        self.waits = transport.kernels_may_wait and alone
        self._by_slices: set[Hashable] = set()  # products that BLAS computes
        self._tables: dict[Hashable, tuple[SliceTable, list[_Line]]] = {}

    def explain(self) -> list[Row]:
        """Every choice made so far, for the report."""
        return self._chooser.explain()

    def consume(
        self,
        tokens: Tokens,
        coming: Sequence[Coming],
        wait: Callable[[WordLike], None],
        products: Sequence[Product],
        by_slices: Callable[[Owner, torch.Tensor], object],
    ) -> bool:
        """All products with slices that come, each in one kernel: True. Or by `wait` and `by_slices` for each slice: False.

        Raises ConfigError or KernelError where 'triton' was asked for and the kernels cannot run."""
        rows = coming[0].rows
        shapes = [(op, _shape(left), _shape(out)) for op, left, out, _ in products]
        name = (tokens, _places(coming), rows.shape[1], rows.dtype, *shapes)
        if name not in self._by_slices and rows.shape[1]:
            table = self._read_table(tokens, coming)
            if all(self._by_kernel(product.op, table, product.left, product.out) for product in products):
                for op, left, out, row_bias in products:
                    if op == "forward":
                        self._gemms.forward(left, table, out, row_bias=row_bias)
                    else:
                        self._gemms.dgrad(left, table, out)
                table.forget()
                return True
            self._remember(name)
        for owner, part, word in coming:
            if word is not None:
                wait(word)
            by_slices(owner, part)
        return False

    def produce(
        self,
        tokens: Tokens,
        leaving: Sequence[Leaving],
        value: int,
        left: torch.Tensor,
        right: torch.Tensor,
        by_slices: Callable[[Owner, torch.Tensor], object],
    ) -> list[list[WordLike]]:
        """P_S = left[:, S].T @ right for all slices, in one kernel; or `by_slices` for each. Returns the words of each, as
        `ProduceAll`. left: [K, rows of the whole tensor], right: [K, columns]. Raises as `consume`."""
        if not leaving:
            return []
        name = (tokens, _places(leaving), leaving[0].out.dtype, _shape(left), _shape(right))
        if name not in self._by_slices and right.shape[1]:
            table, lines, pad = self._write_table(tokens, leaving)
            if self._by_kernel("wgrad", table, left, right):
                self._gemms.wgrad(left, right, table, epoch=value)
                table.forget()
                words: list[list[WordLike]] = [[] for _ in leaving]
                for place, line in enumerate(lines):
                    words[line.number].append((pad, place, value))
                return words
            self._remember(name)
        pad, words = self._transport.own_words(len(leaving)), []
        for place, (owner, out, sent) in enumerate(leaving):
            by_slices(owner, out)
            if sent:
                self._device.write_value(self._device.current_stream(), pad, place, value)
            words.append([(pad, place, value)])
        return words

    def _by_kernel(self, op: Pass, table: SliceTable, first: torch.Tensor, second: torch.Tensor) -> bool:
        problem, chooser = tiles.problem_of(op, table, first, second), self._chooser
        return (chooser.exact.get((problem, first.device)) or chooser.decide(problem, first.device)).backend == "triton"

    def _remember(self, name: Hashable) -> None:
        if len(self._by_slices) >= _MOST:
            self._by_slices.clear()
        self._by_slices.add(name)

    # ---- tables ------------------------------------------------------------------------------------------------------
    def _read_table(self, tokens: Tokens, coming: Sequence[Coming]) -> SliceTable:
        """Words are new with every message: see ring.py of transport `symmetric`."""
        rows = coming[0].rows
        name = self._device.current_stream(), tokens, _places(coming), rows.shape[1], rows.dtype
        words = [Word(*item.word) if item.word is not None else None for item in coming]
        known = self._tables.get(name)
        if known is None:
            lines = _lines(tokens, [item.owner for item in coming])
            entries = []
            for number, start, stop, first in lines:
                pad, place, value = words[number] or (None, 0, 0)
                data = coming[number].rows[start:stop]
                entries.append(SliceEntry(data, first, None, pad, place, value, exact=pad is not None))
            return self._keep(name, SliceTable(entries), lines)[0]
        table, lines = known
        table.repoint(
            [coming[number].rows[start:stop] for number, start, stop, _ in lines], None, [words[line[0]] for line in lines]
        )
        return table

    def _write_table(self, tokens: Tokens, leaving: Sequence[Leaving]) -> tuple[SliceTable, list[_Line], torch.Tensor]:
        """Every line has a word of its own, those of slices that are sent."""
        out = leaving[0].out
        sent = tuple([item.sent for item in leaving])
        name = self._device.current_stream(), tokens, _places(leaving), sent, out.shape[1], out.dtype
        known = self._tables.get(name)
        if known is None:
            lines = _lines(tokens, [item.owner for item in leaving])
            pad = self._transport.own_words(len(lines))
            entries = []
            for place, (number, start, stop, first) in enumerate(lines):
                item = leaving[number]
                entries.append(SliceEntry(item.out[start:stop], first, None, pad if item.sent else None, place))
            known = self._keep(name, SliceTable(entries), lines)
        else:
            known[0].repoint([leaving[number].out[start:stop] for number, start, stop, _ in known[1]])
        table, lines = known
        return table, lines, self._transport.own_words(len(lines))

    def _keep(self, name: Hashable, table: SliceTable, lines: list[_Line]) -> tuple[SliceTable, list[_Line]]:
        if len(self._tables) >= _MOST:
            self._tables.clear()
        self._tables[name] = table, lines
        return table, lines


def _shape(matrix: torch.Tensor) -> tuple[int, ...]:
    return *matrix.shape, *matrix.stride()


def _places(slices: Sequence[Coming | Leaving]) -> tuple[tuple[int, int], ...]:
    return tuple([(item.owner.start, item.owner.stop) for item in slices])


def _lines(tokens: Tokens, owners: Sequence[Owner]) -> list[_Line]:
    """Batch entry by batch entry."""
    lines = []
    for number, owner in enumerate(owners):
        blocks: Blocks = tokens.blocks[owner.start, owner.stop]
        for region in blocks.regions:
            start, length = region.rows.start if region.rows is not None else 0, region.positions.stop - region.positions.start
            for entry in range(region.entries.start, region.entries.stop):
                lines.append(_Line(number, start, start + length, entry * tokens.width + region.positions.start))
                start += length
    return lines


def join(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


_known: weakref.WeakKeyDictionary[Transport, WholeSequence | None] = weakref.WeakKeyDictionary()


def use_kernels(transport: Transport, asked: Asked) -> Callable[[], Sequence[Row]]:
    """Choose who computes the products of layers over this transport, as `CommFuseConfig.kernels` says; else it is 'auto'.
    Returns what tells the choices made so far."""
    found, reason = None, "its messages are not told by words"
    if transport.device is not None and asked != "blas":
        if isinstance(transport, WordTransport):
            reason = choice.unavailable(transport.device.torch_device, ()) or ""
            found = WholeSequence(transport, asked) if not reason or asked == "triton" else None
        if found is None:
            level = logging.WARNING if asked == "triton" else logging.INFO
            _log.log(level, "layers over transport %s: GEMMs by BLAS, slice by slice: %s", transport.name, reason)
    _known[transport] = found
    return tuple if found is None else found.explain


def kernels_for(transport: Transport | None, sharded: object) -> WholeSequence | None:
    """None: products of layers over this transport go by slices; so do all whose weights are sharded themselves, which come
    slice by slice."""
    if transport is None or transport.device is None or sharded is not None:
        return None
    if transport not in _known:
        use_kernels(transport, "auto")
    return _known[transport]


__all__ = ["Product", "WholeSequence", "join", "kernels_for", "use_kernels"]
