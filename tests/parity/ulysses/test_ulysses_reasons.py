"""Which attention of DeepSpeed's Ulysses is served and which is not, and what is said: decisions alone, without DeepSpeed."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from commfuse_dp.integrations.ulysses import LocalAttention, autohook, report, serve, settings
from torch import nn

from commfuse_dp import autoload
from commfuse_dp.config import CommFuseConfig

X = torch.zeros(2, 6, 4, 8)


@pytest.fixture(autouse=True)
def group_of_two(monkeypatch):
    """Attention is served by a stand-in that says so."""
    monkeypatch.setattr(serve, "_size", lambda group: 2)
    monkeypatch.setattr(serve, "_rank", lambda group: 0)
    monkeypatch.setattr(serve, "_attend", lambda *args: ("served", args))
    settings.configure(CommFuseConfig())
    yield
    settings.configure(None)


class Attention(SimpleNamespace):
    __hash__ = object.__hash__


class Unknown(nn.Module):
    """Local attention, somehow."""


def hooked() -> LocalAttention:
    local = LocalAttention(causal=True)
    local.register_forward_hook(lambda *_: None)
    return local


def stock(*args: Any, **kwargs: Any) -> str:
    return "stock"


def distributed(**changed: Any) -> Attention:
    usual = {"local_attn": LocalAttention(causal=True, scale=0.5), "spg": None, "scatter_idx": 2, "gather_idx": 1}
    return Attention(**{**usual, "sp_overlap_comm": False, "num_kv_heads": None, **changed})


def said_of(attention: Any) -> str:
    """The reason why it stays stock."""
    from commfuse_dp.integrations.ulysses.report import _rows

    row = _rows[attention]
    assert row in report().rows and row.path == "stock" and f"{row.path:<8} {row.reason}" in str(report())
    return row.reason


def test_distributed_attention_is_served():
    attention = distributed()
    served, args = serve._distributed(stock)(attention, X, X, X, 0)
    assert served == "served" and args[-3:] == (True, 0.5, "bshd")
    attention = distributed(gather_idx=0, local_attn=LocalAttention(causal=False, batch_first=False))
    served, args = serve._distributed(stock)(attention, X, X, X, 1)
    assert served == "served" and args[-3:] == (False, None, "sbhd")


def test_what_is_compiled_stays_with_deepspeed(monkeypatch, transformers):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert serve._distributed(stock)(distributed(), X, X, X, 0) == "stock"
    assert call(hugging_face()) == "stock"


def test_hooks_of_deepspeed_fetch_nothing_here():
    attention, calls = distributed(), []

    def fetch(*_: Any) -> None:
        calls.append(1)

    fetch.__module__ = "deepspeed.runtime.zero.parameter_offload"
    attention.local_attn.register_forward_pre_hook(fetch)
    assert serve._distributed(stock)(attention, X, X, X, 0)[0] == "served" and not calls


@pytest.mark.parametrize(
    ("changed", "inputs", "told"),
    [
        ({"local_attn": Unknown()}, (X, X, X, 0), "what Unknown computes is not known"),
        ({"local_attn": hooked()}, (X, X, X, 0), "has hooks"),
        ({"local_attn": LocalAttention(causal=True, batch_first=False)}, (X, X, X, 0), "batch_first=False"),
        ({}, (X, X, X, 1), "batch_dim_idx=1"),
        ({"gather_idx": 0}, (X, X, X, 0), "gather_idx=0"),
        ({"sp_overlap_comm": True}, (X, X, X, 0), "sp_stream"),
        ({}, (X, X, X, 0, (X, X)), "rotary embeddings"),
        ({}, (X, X, X, 0, None, X), "further arguments for the local attention: ['Tensor']"),
        ({}, (X.long(), X.long(), X.long(), 0), "dtypes"),
        ({}, (X, X.half(), X, 0), "dtypes"),
        ({}, (X[:, :, :3], X[:, :, :3], X[:, :, :3], 0), "3 query heads and 3 key heads on 2 ranks"),
        ({}, (X, X[:, :, :3], X[:, :, :3], 0), "4 query heads and 3 key heads"),
        ({}, (X, X[:1], X[:1], 0), "shapes"),
        ({}, (X[0], X[0], X[0], 0), "4 dimensions"),
        ({}, (X.to("meta"), X.to("meta"), X.to("meta"), 0), "is not known on meta"),
    ],
)
def test_distributed_attention_that_stays_with_deepspeed(changed, inputs, told):
    attention = distributed(**changed)
    assert serve._distributed(stock)(attention, *inputs) == "stock"
    assert told in said_of(attention)


def test_attributes_of_another_version():
    attention = distributed()
    del attention.num_kv_heads
    assert serve._distributed(stock)(attention, X, X, X, 0) == "stock"
    assert "has no 'num_kv_heads'" in said_of(attention)


def test_settings_that_leave_attention_alone(monkeypatch):
    attention = distributed()
    settings.configure(CommFuseConfig(fuse="never"))
    assert serve._distributed(stock)(attention, X, X, X, 0) == "stock"
    assert "fuse='never'" in said_of(attention)
    gc.collect()  # of what tests before this one have left
    before = len(report().rows)
    for config, variable in ((CommFuseConfig(enabled=False), "1"), (None, "0"), (None, "")):
        settings.configure(config)
        monkeypatch.setenv("COMMFUSE", variable)
        assert serve._distributed(stock)(distributed(), X, X, X, 0) == "stock"
    assert len(report().rows) == before  # nobody asked: nothing is said
    monkeypatch.setenv("COMMFUSE", "1")
    assert serve._distributed(stock)(attention, X, X, X, 0)[0] == "served"


# ---- UlyssesSPAttentionHF --------------------------------------------------------------------------------------------
Q = X.transpose(1, 2)


def sdpa(*args: Any, **kwargs: Any) -> None:
    """In the place of transformers'."""


def hugging_face(**changed: Any) -> Attention:
    shape = {"batch_size": 2, "attn_head_count": 4, "global_kv_head_count": 4, "attn_head_size": 8, "local_seq_length": None}
    usual = {"attn": sdpa, "process_group": None, "world_size": 2, "seq_length_is_variable": True, "disable_in_eval": False}
    return Attention(**{**usual, **shape, "skip_all_but_last_attention_debug_mode": False, **changed})


@pytest.fixture
def transformers(monkeypatch):
    home = "transformers.integrations.sdpa_attention"
    monkeypatch.setitem(sys.modules, home, SimpleNamespace(sdpa_attention_forward=sdpa))


def call(attention: Attention, inputs: Any = (Q, Q, Q), mask: Any = None, module: Any = None, **kwargs: Any) -> Any:
    with mock.patch.object(serve, "_attend", lambda *args: torch.tensor(args[-3:-1]).expand(2, 6, 4, 2)):
        module = module if module is not None else SimpleNamespace(training=True, is_causal=True)
        return serve._hugging_face(stock)(attention, module, *inputs, mask, **{"position_ids": X, "scaling": 0.5, **kwargs})


def test_hugging_face_is_served(transformers):
    o, weights = call(hugging_face(), dropout=0.0, sliding_window=12, use_cache=True)
    assert weights is None and o.shape == (2, 6, 8) and o[0, 0, :2].tolist() == [1.0, 0.5]
    o, _ = call(hugging_face(), is_causal=False)
    assert o[0, 0, 0] == 0
    o, _ = call(hugging_face(), module=SimpleNamespace(training=False, is_causal=False))
    assert o[0, 0, 0] == 0
    o, _ = call(hugging_face(seq_length_is_variable=False, local_seq_length=6))
    assert o.shape == (2, 6, 8)


@pytest.mark.parametrize(
    ("changed", "how", "told"),
    [
        ({"attn": print}, {}, "core attention is not transformers'"),
        ({"disable_in_eval": True}, {"module": SimpleNamespace(training=False)}, "disable_in_eval"),
        ({"skip_all_but_last_attention_debug_mode": True}, {}, "debug_mode"),
        ({}, {"mask": X}, "attention mask"),
        ({}, {"dropout": 0.1}, "dropout=0.1"),
        ({}, {"sliding_window": 11}, "sliding_window=11 is shorter"),
        ({}, {"softcap": 30.0}, "arguments whose meaning is not known here: ['softcap']"),
        ({}, {"position_bias": X}, "position_bias"),
        ({"seq_length_is_variable": False, "local_seq_length": 5}, {}, "that DeepSpeed refuses"),
        ({"batch_size": 3}, {}, "that DeepSpeed refuses"),
        ({"world_size": 3, "attn_head_count": 4}, {}, "4 query heads and 4 key heads on 3 ranks"),
    ],
)
def test_hugging_face_that_stays_with_deepspeed(transformers, changed, how, told):
    attention = hugging_face(**changed)
    assert call(attention, **how) == "stock"
    assert told in said_of(attention)


def test_position_ids_are_deepspeeds_to_ask_for(transformers):
    attention = hugging_face()
    assert serve._hugging_face(stock)(attention, SimpleNamespace(training=True), Q, Q, Q, None) == "stock"
    assert "position_ids" in said_of(attention)


def test_a_forward_of_another_version_is_left_alone(caplog):
    class DistributedAttention:
        def forward(self, q: Any, k: Any) -> None:
            """As no version has it."""

    module = SimpleNamespace(__name__="deepspeed.sequence.layer", DistributedAttention=DistributedAttention)
    before = DistributedAttention.forward
    serve.install(module)  # type: ignore[arg-type]
    assert DistributedAttention.forward is before
    assert "leaves Ulysses to DeepSpeed: the forward of DistributedAttention takes ('self', 'q', 'k')" in caplog.text
    serve.install(SimpleNamespace(__name__="deepspeed.sequence.layer"))  # type: ignore[arg-type]
    assert "deepspeed.sequence.layer has no DistributedAttention" in caplog.text


@pytest.mark.parametrize("asked", [True, False])
def test_the_environment_switches_it_on_when_the_module_is_imported(monkeypatch, asked):
    module = SimpleNamespace(__name__="deepspeed.sequence.layer")
    installed = []
    monkeypatch.setattr(serve, "install", installed.append)
    settings.configure(None)
    monkeypatch.setenv("COMMFUSE", "1" if asked else "0")
    hooks: dict[str, Any] = {}
    monkeypatch.setattr(autoload, "when_imported", lambda name: lambda hook: hooks.setdefault(name, hook))
    autohook.register()
    assert set(hooks) == {"deepspeed.sequence.layer", "deepspeed.runtime.sequence_parallel.ulysses_sp"}
    hooks[module.__name__](module)
    assert installed == ([module] if asked else [])


def test_a_block_switches_it_on_where_the_module_has_been_imported(monkeypatch):
    module = SimpleNamespace(__name__="deepspeed.sequence.layer")
    installed = []
    monkeypatch.setattr(serve, "install", installed.append)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # type: ignore[arg-type]
    autohook.configure(CommFuseConfig(enabled=False))
    assert installed == []
    autohook.configure(CommFuseConfig())
    assert installed[0] is module


def test_a_forward_is_replaced_once(monkeypatch):
    class DistributedAttention:
        def forward(
            self, query: Any, key: Any, value: Any, batch_dim_idx: int, rotary_pos_emb: Any = None, *args: Any, **kwargs: Any
        ) -> str:
            return "stock"

    module = SimpleNamespace(__name__="deepspeed.sequence.layer", DistributedAttention=DistributedAttention)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # type: ignore[arg-type]
    before = DistributedAttention.forward
    for _ in range(2):
        serve.install(module)  # type: ignore[arg-type]
    assert DistributedAttention.forward.__wrapped__ is before
