"""CommFuseConfig.from_environment: who wins, what is refused and by what name."""

from __future__ import annotations

import json
import os
import sys

import pytest

from commfuse_dp import CommFuseConfig, ConfigError
from commfuse_dp.config import OTHER_VARIABLES, asked_for, variable_of


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith("COMMFUSE"):
            monkeypatch.delenv(name)


def from_file(monkeypatch, path, text: str) -> CommFuseConfig:
    path.write_text(text)
    monkeypatch.setenv("COMMFUSE_CONFIG", str(path))
    return CommFuseConfig.from_environment()


def test_nothing_set_is_the_default(monkeypatch):
    assert CommFuseConfig.from_environment() == CommFuseConfig()
    for key in CommFuseConfig.model_fields:
        monkeypatch.setenv(variable_of(key), " ")  # empty: not set
    assert CommFuseConfig.from_environment() == CommFuseConfig()


def test_the_later_source_wins(monkeypatch, tmp_path):
    settings = {"transport": "tcp", "order": "ring", "fuse": "never", "exclude": ["a*"]}
    config = from_file(monkeypatch, tmp_path / "c.json", json.dumps(settings))
    assert config == CommFuseConfig(transport="tcp", order="ring", fuse="never", exclude=("a*",))
    monkeypatch.setenv("COMMFUSE_ORDER", "pairwise")
    monkeypatch.setenv("COMMFUSE_FUSE", "auto")
    config = CommFuseConfig.from_environment(fuse="always")
    assert (config.transport, config.order, config.fuse) == ("tcp", "pairwise", "always")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("enabled", "off", False),
        ("transport", "shm", "shm"),
        ("slices_per_rank", "8", 8),
        ("slices_per_rank", "None", None),
        ("prefetch_bytes", "1048576", 1048576),
        ("deadline_s", "2.5", 2.5),
        ("exclude", "lm_head, *.router ,", ("lm_head", "*.router")),
    ],
)
def test_text_of_a_variable(monkeypatch, key, text, value):
    monkeypatch.setenv(variable_of(key), text)
    assert getattr(CommFuseConfig.from_environment(), key) == value


def test_every_key_has_a_variable_and_none_is_taken():
    assert not {variable_of(key) for key in CommFuseConfig.model_fields} & OTHER_VARIABLES.keys()


@pytest.mark.parametrize(
    ("variable", "text", "wanted"),
    [
        ("COMMFUSE_TRANSPORT", "pigeon", ["COMMFUSE_TRANSPORT='pigeon'", "'shm'", "'tcp'"]),
        ("COMMFUSE_SLICES_PER_RANK", "0", ["COMMFUSE_SLICES_PER_RANK='0'", "greater than or equal to 1"]),
        ("COMMFUSE_PREFETCH_BYTES", "much", ["COMMFUSE_PREFETCH_BYTES='much'"]),
        ("COMMFUSE_ENABLED", "perhaps", ["COMMFUSE_ENABLED='perhaps'"]),
        (
            "COMMFUSE_TRANSPRT",
            "shm",
            ["unknown variable COMMFUSE_TRANSPRT='shm'", "did you mean 'COMMFUSE_TRANSPORT'", "Unset"],
        ),
        ("COMMFUSE_CONFG", "x", ["did you mean 'COMMFUSE_CONFIG'"]),
        ("COMMFUSE", "maybe", ["COMMFUSE='maybe'", "1, true", "0, false"]),
        ("COMMFUSE_CONFIG", "/nowhere/c.json", ["COMMFUSE_CONFIG='/nowhere/c.json'", "No such file"]),
        ("COMMFUSE_CONFIG", "/", ["COMMFUSE_CONFIG='/'", "directory"]),
    ],
)
def test_refused_by_the_name_of_the_variable(monkeypatch, variable, text, wanted):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError) as error:
        CommFuseConfig.from_environment()
    assert all(part in str(error.value) for part in wanted), str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("c.json", '{"transprt": "shm"}', ["c.json (COMMFUSE_CONFIG)", "'transprt'", "did you mean 'transport'"]),
        ("c.json", '{"deadline_s": -1}', ["c.json (COMMFUSE_CONFIG)", "deadline_s=-1", "greater than or equal to 0.01"]),
        ("c.json", "{", ["c.json", "is not JSON"]),
        ("c.json", "[1]", ["c.json", "holds a list"]),
        ("c.yaml", "transport: [", ["c.yaml", "is not YAML"]),
        ("c.yaml", "transport", ["c.yaml", "holds a str"]),
        ("c.yml", "order: rng", ["c.yml (COMMFUSE_CONFIG)", "order='rng'", "'ring'"]),
    ],
)
def test_refused_by_the_name_of_the_file(monkeypatch, tmp_path, name, text, wanted):
    if not name.endswith("json"):
        pytest.importorskip("yaml")
    with pytest.raises(ConfigError) as error:
        from_file(monkeypatch, tmp_path / name, text)
    assert all(part in str(error.value) for part in wanted), str(error.value)


def test_yaml_with_and_without_pyyaml(monkeypatch, tmp_path):
    pytest.importorskip("yaml")
    assert from_file(monkeypatch, tmp_path / "c.yaml", "") == CommFuseConfig()
    text = "transport: tcp\nexclude:\n  - lm_head\n"
    assert from_file(monkeypatch, tmp_path / "c.yaml", text) == CommFuseConfig(transport="tcp", exclude=("lm_head",))
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match="pip install pyyaml"):
        CommFuseConfig.from_environment()


@pytest.mark.parametrize(
    ("text", "asked", "enabled"), [("1", True, True), ("On", True, True), ("", False, True), ("no", False, False)]
)
def test_the_switch(monkeypatch, text, asked, enabled):
    monkeypatch.setenv("COMMFUSE", text)
    assert asked_for() is asked and CommFuseConfig.from_environment().enabled is enabled
    monkeypatch.setenv("COMMFUSE_ENABLED", "true")  # the switch wins
    assert CommFuseConfig.from_environment(enabled=True).enabled is enabled


def test_the_switch_refuses_other_words(monkeypatch):
    monkeypatch.setenv("COMMFUSE", "2")
    with pytest.raises(ConfigError, match="COMMFUSE='2'"):
        asked_for()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("head, layers.0.*", ("head", "layers.0.*")),
        ('["head", "layers.0.*"]', ("head", "layers.0.*")),
        (' [ "head" ] ', ("head",)),
        ("[]", ()),
    ],
)
def test_a_list_by_commas_or_in_json(monkeypatch, text, names):
    monkeypatch.setenv("COMMFUSE_EXCLUDE", text)
    assert CommFuseConfig.from_environment().exclude == names


@pytest.mark.parametrize("text", ['["head"', "['head']", "[head]", '{"head": 1}', "[1]", '"head"', "['head', 'norm']"])
def test_a_list_that_is_nearly_json_is_refused(monkeypatch, text):
    monkeypatch.setenv("COMMFUSE_EXCLUDE", text)
    with pytest.raises(ConfigError) as error:
        CommFuseConfig.from_environment()
    assert all(part in str(error.value) for part in ("COMMFUSE_EXCLUDE", text, "separated by commas", "JSON list"))
