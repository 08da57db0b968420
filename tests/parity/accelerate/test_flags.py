"""`accelerate launch --commfuse ...`: the options, and what is refused before any process starts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from commfuse_dp.integrations.accelerate import compat, flags

from commfuse_dp import CommFuseConfig
from tests.parity.accelerate.harness import environment


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """The launcher as it was, and no COMMFUSE* in the environment, whatever a test puts there."""
    global launch_module  # Accelerate is imported by the process that runs these tests, not by all that collect them
    import accelerate.commands.launch as launch_module

    names = ("launch_command", "launch_command_parser", "options_to_group")
    before = {name: getattr(launch_module, name) for name in names}
    launch_module.options_to_group = dict(before["options_to_group"])
    with environment():
        yield
    for name, value in before.items():
        setattr(launch_module, name, value)


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    flags.add_to(launch_module)
    return launch_module.launch_command_parser()


def started(words: list[str]) -> dict[str, str]:
    """COMMFUSE* of the environment in which the launcher would start the script."""
    seen: dict[str, str] = {}

    def start(args: argparse.Namespace) -> None:
        seen.update({key: value for key, value in os.environ.items() if key.startswith("COMMFUSE")})
        seen["script"] = " ".join([args.training_script, *args.training_script_args])

    launch_module.launch_command = start
    flags.add_to(launch_module)
    launch_module.launch_command(launch_module.launch_command_parser().parse_args(words))
    return seen


def test_help_lists_every_setting(parser, capsys):
    with mock.patch.object(sys, "argv", ["accelerate", "launch", "--help"]), pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    shown = capsys.readouterr().out
    assert flags.TITLE in shown
    for key in ("", "_config", *(f"_{key}" for key in CommFuseConfig.model_fields)):
        assert f"--commfuse{key} " in shown, key
    with mock.patch.object(sys, "argv", ["accelerate", "launch", "--commfuse", "--help"]), pytest.raises(SystemExit):
        launch_module.launch_command_parser().parse_args(["--commfuse", "--help"])
    assert "--commfuse_transport" in capsys.readouterr().out


def test_flags_become_variables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("settings.json").write_text('{"order": "ring"}')
    words = ["--commfuse", "--commfuse_config", "settings.json", "--commfuse-transport", "tcp", "--commfuse_inbox_bytes=4096"]
    seen = started([*words, "--num_processes", "2", "train.py", "--commfuse_transport", "of the script"])
    assert seen == {
        "COMMFUSE": "1",
        "COMMFUSE_CONFIG": str(tmp_path / "settings.json"),
        "COMMFUSE_TRANSPORT": "tcp",
        "COMMFUSE_INBOX_BYTES": "4096",
        "script": "train.py --commfuse_transport of the script",
    }


def test_every_setting_can_be_given():
    values = {"exclude": "head,*.norm", "slices_per_rank": "2", "fuse": "never", "order": "ring", "transport": "p2p"}
    words = ["--commfuse"]
    for key, field in CommFuseConfig.model_fields.items():
        words += [f"--commfuse_{key}", values.get(key, str(field.default))]
    started([*words, "train.py"])
    config = CommFuseConfig.from_environment()
    assert config.exclude == ("head", "*.norm") and config.slices_per_rank == 2 and config.fuse == "never"


def test_without_flags_nothing_changes():
    assert started(["--num_processes", "2", "train.py"]) == {"script": "train.py"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--commfuse_transport", "shm"], "--commfuse_transport was given without --commfuse: add --commfuse"),
        (["--commfuse", "--commfuse_transport", "shmm"], "--commfuse_transport: COMMFUSE_TRANSPORT='shmm'"),
        (["--commfuse", "--commfuse_inbox_bytes", "-3"], "--commfuse_inbox_bytes: COMMFUSE_INBOX_BYTES='-3'"),
        (
            ["--commfuse", "--commfuse_transprt", "shm"],
            "unknown option --commfuse_transprt: did you mean '--commfuse_transport'",
        ),
        (["--commfuse", "--commfuse_config", "nowhere.json"], "nowhere.json' cannot be read"),
        (["--commfuse", "--commfuse_config", "wrong.json"], "unknown CommFuse setting 'trnsport': did you mean 'transport'"),
        (["--commfuse", "--commfuse_order", ""], "--commfuse_order needs a value"),
    ],
    ids=["without", "value", "range", "key", "no-file", "key-in-file", "empty"],
)
def test_wrong_flags_are_refused_before_anything_starts(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    Path("wrong.json").write_text('{"trnsport": "shm"}')
    with pytest.raises(SystemExit) as end:
        started([*words, "train.py"])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_wrong_variable_of_the_environment_counts_too(monkeypatch, capsys):
    monkeypatch.setenv("COMMFUSE_ORDRE", "ring")
    with pytest.raises(SystemExit):
        started(["--commfuse", "train.py"])
    assert "COMMFUSE_ORDRE" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["0", " Off"])
def test_a_flag_against_the_environment_is_a_contradiction(monkeypatch, capsys, word):
    monkeypatch.setenv("COMMFUSE", word)
    with pytest.raises(SystemExit):
        started(["--commfuse", "train.py"])
    assert "COMMFUSE=" + word.strip() in capsys.readouterr().err
    assert started(["--num_processes", "2", "train.py"]) == {"script": "train.py", "COMMFUSE": word}


def test_one_process_on_cpu_is_said(capsys):
    started(["--commfuse", "--cpu", "--num_processes", "2", "train.py"])
    assert "--cpu starts ONE process, not 2" in capsys.readouterr().err
    started(["--commfuse", "--cpu", "--num_processes", "2", "--mpirun_hostfile", "hosts", "train.py"])
    assert not capsys.readouterr().err


def test_functions_are_replaced_once():
    flags.add_to(launch_module)
    first = launch_module.launch_command
    flags.add_to(launch_module)
    assert launch_module.launch_command is first
    assert not compat.replace(launch_module, "no_such_function", lambda original: original)
