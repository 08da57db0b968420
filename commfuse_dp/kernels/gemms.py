"""The three products of a fused linear by whatever backend was chosen: what callers call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from commfuse_dp.device.base import Device
from commfuse_dp.kernels import by_slices, tiles
from commfuse_dp.kernels.by_slices import Words
from commfuse_dp.kernels.choice import Chooser
from commfuse_dp.kernels.table import SliceTable
from commfuse_dp.kernels.tiles import Problem


class Gemms:
    """chooser: who computes what; device: for the waits and signals of products by BLAS (tables without words need none)."""

    def __init__(self, chooser: Chooser, device: Device | None = None) -> None:
        self.chooser = chooser
        self._words = Words() if device is None else by_slices.words_of(device)

    def forward(
        self, x: torch.Tensor, table: SliceTable, y: torch.Tensor, *, row_bias: torch.Tensor | None = None, epoch: int = 0
    ) -> None:
        """y[:, rows of s] = x @ W_s.T (+ b_s, or + row_bias[:, None]) for every slice s, as each arrives."""
        if not table.entries or not x.shape[0]:
            return
        problem = tiles.problem_of("forward", table, x, y)
        decision = self.chooser.exact.get((problem, x.device)) or self.chooser.decide(problem, x.device)
        if decision.backend == "triton":
            from commfuse_dp.kernels.gemm_forward import gemm_forward

            kernel = partial(gemm_forward, x, table, y, row_bias=row_bias, epoch=epoch, config=decision.config, problem=problem)
            if self._run(kernel, problem, x.device):
                return
        by_slices.gemm_forward(x, table, y, row_bias=row_bias, epoch=epoch, wait=self._words.wait)

    def dgrad(self, dy: torch.Tensor, table: SliceTable, dx: torch.Tensor, *, epoch: int = 0) -> None:
        """dx = sum over slices s of dy[:, rows of s] @ W_s, as they arrive."""
        if not table.entries or not dx.numel():
            dx.zero_()
            return
        problem = tiles.problem_of("dgrad", table, dy, dx)
        decision = self.chooser.exact.get((problem, dy.device)) or self.chooser.decide(problem, dy.device)
        if decision.backend == "triton":
            from commfuse_dp.kernels.gemm_dgrad import gemm_dgrad

            kernel = partial(gemm_dgrad, dy, table, dx, epoch=epoch, config=decision.config, problem=problem)
            if self._run(kernel, problem, dy.device):
                return
        by_slices.gemm_dgrad(dy, table, dx, epoch=epoch, wait=self._words.wait)

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor, table: SliceTable, *, epoch: int = 0) -> None:
        """dW_s = dy[:, rows of s].T @ x for every slice s, each followed by its signal."""
        if not table.entries or not table.columns:
            return
        problem = tiles.problem_of("wgrad", table, dy, x)
        decision = self.chooser.exact.get((problem, dy.device)) or self.chooser.decide(problem, dy.device)
        if decision.backend == "triton":
            from commfuse_dp.kernels.gemm_wgrad import gemm_wgrad

            kernel = partial(gemm_wgrad, dy, x, table, epoch=epoch, config=decision.config, problem=problem)
            if self._run(kernel, problem, dy.device):
                return
        by_slices.gemm_wgrad(dy, x, table, epoch=epoch, signal=self._words.signal)

    def _run(self, kernel: Callable[[], None], problem: Problem, device: torch.device) -> bool:
        """Whether the kernel was launched. One that does not compile is reported to the chooser, which may raise."""
        try:
            kernel()
        except (ValueError, torch.OutOfMemoryError):  # the caller's operands, not the kernel
            raise
        except Exception as error:
            self.chooser.failed(problem, device, error)
            return False
        return True
