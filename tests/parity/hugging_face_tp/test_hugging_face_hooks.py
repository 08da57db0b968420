"""Full backward hooks on modules of a model that transformers shards: its forward is transformers' own, and says so once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from tests.parity.hugging_face_tp.models import alike, batch, gradients, load, saved
from tests.support.serving import applied

PLACES = ("model.layers.0.self_attn", "model.layers.1.mlp.up_proj", "model.layers.0", "model.norm", "lm_head")


def _watch(model: nn.Module, name: str, found: list[torch.Tensor]) -> Any:
    def hook(module: nn.Module, ins: Any, outs: Any) -> None:
        found.extend(grad.detach().clone() for grad in (*ins, *outs) if grad is not None)

    return model.get_submodule(name).register_full_backward_hook(hook)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _hooked(rank: int, n: int) -> None:
    with saved("llama") as path:
        stock, model = load(path, n), load(path, n)
    tokens, lines = batch(0, length=9), Lines()
    logging.getLogger("commfuse_dp").addHandler(lines)
    try:
        with applied(model) as report:
            start = report.probe.counters.snapshot()
            for place in PLACES:
                theirs: list[torch.Tensor] = []
                mine: list[torch.Tensor] = []
                handles = [_watch(stock, place, theirs), _watch(model, place, mine)]
                wanted = gradients(stock, tokens)
                alike(gradients(model, tokens), wanted)
                assert theirs and len(mine) == len(theirs), place
                for a, b in zip(mine, theirs, strict=True):
                    assert torch.allclose(a, b, rtol=1e-10, atol=1e-12), place
                for handle in handles:
                    handle.remove()
            assert report.probe.counters.snapshot() == start  # nothing went over CommFuse
            (line,) = [line for line in lines.lines if "transformers' own forward" in line]
            assert "backward hooks" in line and "remove these hooks" in line
            alike(gradients(model, tokens), wanted)
            assert report.probe.counters.snapshot() != start
    finally:
        logging.getLogger("commfuse_dp").removeHandler(lines)


@pytest.mark.slow
def test_full_backward_hooks(workers: Any) -> None:
    workers(2).run(_hooked, timeout=60)
