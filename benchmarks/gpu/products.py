"""One product (forward, dgrad or wgrad) with its operands, its slices, their words and its backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu.shapes import Shape, arrival_order, rows_of
from commfuse_dp.kernels import by_slices, tiles
from commfuse_dp.kernels.table import SliceEntry, SliceTable
from commfuse_dp.kernels.tiles import Pass, Problem, TileConfig

FINGERPRINT = -(2**31) + 12345  # a word that was there before would have reached it cyclically


class Product:
    """Random operands of one product, its slices in order of arrival (wgrad: others' first, own last).

    pad: int32 words, one for each slice; None: slices without words. Forward and dgrad wait for every slice but the own one,
    wgrad writes the word of every slice but the own one. The value is 0 + epoch; with `exact`, forward and dgrad wait for
    FINGERPRINT. transposed: which of tiles.OPERANDS lie in memory so; row_bias: forward has one.
    """

    def __init__(
        self,
        op: Pass,
        shape: Shape,
        ranks: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        pad: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        own: int | None = None,
        seed: int = 0,
        transposed: tuple[bool, bool] = (False, False),
        row_bias: bool = False,
        exact: bool = False,
    ) -> None:
        self.op, self.shape, self.dtype, self.device = op, shape, dtype, device
        self.out_dtype = out_dtype or dtype
        self.generator = torch.Generator(device).manual_seed(seed)
        rows = rows_of(shape.out_features, ranks)
        self.own = ranks // 2 if own is None else own
        order = [rank for rank in arrival_order(ranks, self.own) if rows[rank]]
        if op == "wgrad":
            order.reverse()
        turned = {name for name, turn in zip(tiles.OPERANDS[op], transposed, strict=True) if turn}

        def lay(name: str, columns: int, make: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
            return make(columns, shape.tokens).t() if name in turned else make(shape.tokens, columns)

        def empty(rows: int, columns: int) -> torch.Tensor:
            return torch.empty(rows, columns, dtype=self.out_dtype, device=device)

        self.x = lay("x", shape.in_features, self.random)
        self.weight = self.random(shape.out_features, shape.in_features, scale=shape.in_features**-0.5)
        self.dy = lay("dy", shape.out_features, self.random)
        self.y = lay("y", shape.out_features, empty)
        self.dx = lay("dx", shape.in_features, empty)
        self.row_bias = self.random(1, shape.tokens)[0] if row_bias else None
        self.grads = [empty(n, shape.in_features) for n in rows]
        first = [sum(rows[:rank]) for rank in range(ranks)]
        self.sources = {rank: self.weight[first[rank] : first[rank] + rows[rank]] for rank in order}
        self.windows = {rank: self.sources[rank].clone() for rank in order}  # what the kernels read
        self.order = order
        self.awaited = [rank for rank in order if rank != self.own]
        self.pad = pad
        self.table = SliceTable(
            [
                SliceEntry(
                    self.grads[rank] if op == "wgrad" else self.windows[rank],
                    first[rank],
                    None,
                    pad if rank != self.own else None,
                    rank,
                    FINGERPRINT if exact else 0,
                    exact,
                )
                for rank in order
            ]
        )

    def random(self, rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return (
            torch.randn(rows, columns, generator=self.generator, device=self.device, dtype=torch.float32)
            .mul_(scale)
            .to(self.dtype)
        )

    @property
    def problem(self) -> Problem:
        first, second = (getattr(self, name) for name in tiles.OPERANDS[self.op])
        return tiles.problem_of(self.op, self.table, first, second)

    def arguments(self) -> tuple[Any, ...]:
        """Positional arguments of the kernel and of the product by slices."""
        if self.op == "forward":
            return self.x, self.table, self.y
        return (self.dy, self.table, self.dx) if self.op == "dgrad" else (self.dy, self.x, self.table)

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of both."""
        return {} if self.row_bias is None else {"row_bias": self.row_bias}

    def by_kernel(self, config: TileConfig | None = None) -> Callable[[int], None]:
        """Calls of the Triton kernel, with an epoch."""
        if self.op == "forward":
            from commfuse_dp.kernels.gemm_forward import gemm_forward as kernel
        elif self.op == "dgrad":
            from commfuse_dp.kernels.gemm_dgrad import gemm_dgrad as kernel
        else:
            from commfuse_dp.kernels.gemm_wgrad import gemm_wgrad as kernel
        arguments, how = self.arguments(), {"config": config, "problem": self.problem, **self.keywords()}
        return lambda epoch=0: kernel(*arguments, epoch=epoch, **how)

    def by_slices(self, words: by_slices.Words | None = None) -> Callable[[int], None]:
        """Calls of torch's products slice by slice, with an epoch."""
        words = words or by_slices.Words()
        arguments, how = self.arguments(), self.keywords()
        if self.op == "forward":
            return lambda epoch=0: by_slices.gemm_forward(*arguments, epoch=epoch, wait=words.wait, **how)
        if self.op == "dgrad":
            return lambda epoch=0: by_slices.gemm_dgrad(*arguments, epoch=epoch, wait=words.wait)
        return lambda epoch=0: by_slices.gemm_wgrad(*arguments, epoch=epoch, signal=words.signal)

    def whole(self) -> Callable[[], torch.Tensor]:
        """The product in one GEMM of torch, out of and into whole tensors; returns it."""
        if self.op == "forward":
            y, right, bias = torch.empty_like(self.y, dtype=self.dtype), self.weight.t(), self.row_bias
            if bias is None:
                return lambda: torch.mm(self.x, right, out=y)
            return lambda: torch.addmm(bias, self.weight, self.x.t(), out=y.t()).t()
        if self.op == "dgrad":
            dx = torch.empty_like(self.dx, dtype=self.dtype)
            return lambda: torch.mm(self.dy, self.weight, out=dx)
        dw, left = torch.empty_like(self.weight), self.dy.t()
        return lambda: torch.mm(left, self.x, out=dw)

    def oracle(self) -> torch.Tensor:
        """In float64."""
        x, weight, dy = self.x.double(), self.weight.double(), self.dy.double()
        bias = 0 if self.row_bias is None else self.row_bias.double()[:, None]
        return x @ weight.t() + bias if self.op == "forward" else dy @ weight if self.op == "dgrad" else dy.t() @ x

    def result(self) -> torch.Tensor:
        """What the last call of a backend wrote."""
        return self.y if self.op == "forward" else self.dx if self.op == "dgrad" else torch.cat(self.grads)

    def spoil(self) -> None:
        """Fill the outputs with NaN; exact words are as before the messages that they name."""
        for tensor in (self.y, self.dx, *self.grads):
            tensor.fill_(float("nan"))
        if self.pad is not None and self.table.has_exact:
            self.pad.zero_()


def worst_error(result: torch.Tensor, oracle: torch.Tensor) -> float:
    """Largest absolute difference; infinite where there is NaN."""
    difference = (result.double() - oracle).abs().max().item() if result.numel() else 0.0
    return difference if difference == difference else float("inf")


def candidates(product: Product, capability: tuple[int, int], most: int | None = None) -> Sequence[TileConfig]:
    return tiles.candidates(product.problem, capability)[:most]
