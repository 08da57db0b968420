"""Launches of Triton kernels: arguments are bound once, and again wherever Triton might find other machine code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_dp.kernels import tiles
from commfuse_dp.kernels.tiles import Problem, TileConfig

launching = pytest.importorskip("commfuse_dp.kernels.launching", exc_type=ImportError)


class Kernel:
    """Notes how it is launched: bound, or as it was compiled."""

    arg_names = ("x", "stride", "epoch", "BLOCK", "EVEN")

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def bound(*arguments: Any, **constants: Any) -> Any:
            self.launches.append(("bound", grid, arguments, constants))
            return self

        def compiled(*arguments: Any) -> None:
            self.launches.append(("compiled", grid, arguments))

        return compiled if len(grid) == 3 else bound


def pointer(address: int) -> Any:
    return SimpleNamespace(device=torch.device("cuda", 0), data_ptr=lambda: address)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "_multiprocessors", lambda index: 132)
    return Kernel()


@pytest.mark.parametrize("tma", [False, True])
def test_arguments_are_bound_once(kernel: Kernel, tma: bool) -> None:
    config = TileConfig(128, 128, 64, warps=8, stages=4, tma=tma)
    plan = launching.Plan(config, {"EVEN": True, "BLOCK": 128}, 500, 0, {})
    options = {"EVEN": True, "BLOCK": 128, "num_warps": 8, "num_stages": 4}
    for epoch in (1, 2, 3):
        launching.launch(kernel, (pointer(256), 64, epoch), plan, None)
    assert [launch[:2] for launch in kernel.launches] == [("bound", (132,)), *[("compiled", (132, 1, 1))] * 2]
    assert kernel.launches[0][2][1:] == (64, 1) and kernel.launches[0][3] == options
    assert [launch[2][1:] for launch in kernel.launches[1:]] == [(64, 2, 128, True), (64, 3, 128, True)]


@pytest.mark.parametrize("other", [(pointer(264), 64, 1), (pointer(256), 1, 1), (None, 64, 1)])
def test_what_triton_specializes_is_bound_anew(kernel: Kernel, other: tuple[Any, ...]) -> None:
    plan = launching.Plan(TileConfig(64, 64, 64), {"EVEN": True, "BLOCK": 128}, 5, 0, {})
    first = pointer(0)
    for arguments in ((pointer(256), 64, 1), other, other, (pointer(512), 64, 9)):
        launching.launch(kernel, (first, *arguments), plan, None)
    assert [launch[0] for launch in kernel.launches] == ["bound", "bound", "compiled", "compiled"]
    launching.launch(kernel, (first, pointer(256), 64, 1), plan, 3)
    assert kernel.launches[-1][:2] == ("bound", (3,))


@pytest.mark.parametrize("op", tiles.PASSES)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_all_tiles_fit_into_shared_memory(op: tiles.Pass, out_dtype: torch.dtype) -> None:
    problem = Problem(op, 8192, 4096, (512,) * 8, torch.bfloat16, out_dtype)
    found = tiles.candidates(problem, (9, 0))
    assert len(found) >= 6 and max(tiles.shared_bytes(problem, config) for config in found) <= 227 << 10
    assert tiles.default(problem, (9, 0)).flat


def test_on_a_device_that_is_not_current(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    current = [1]

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *error: object) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    plan = launching.Plan(TileConfig(64, 64, 64, tma=True), {"EVEN": True, "BLOCK": 128}, 5, 0, {})
    for _ in range(2):
        launching.launch(kernel, (pointer(256), 64, 1), plan, None)
    assert [launch[0] for launch in kernel.launches] == ["bound", "compiled"] and current == [1]
