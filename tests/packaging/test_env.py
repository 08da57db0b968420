"""`commfuse env`: what works says so, what does not says why, and nothing that is missing makes it fail."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from commfuse_dp import autoload
from commfuse_dp.cli import env, env_integrations, env_transports
from commfuse_dp.cli.env_transports import Finding

ENV = [sys.executable, "-m", "commfuse_dp.cli.main", "env"]


def environment(**variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("COMMFUSE", "TORCH_DEVICE"))}
    return {**clean, "OMP_NUM_THREADS": "1", **variables}


def page_of(facts: dict) -> str:
    out = io.StringIO()
    env._show(facts, Console(file=out, width=128))
    return out.getvalue()


# ---- the whole command -------------------------------------------------------------------------------------------------
def test_on_this_machine(monkeypatch, capfd):
    """Everything but the frameworks, whose imports take long; the fakes below stand for two of them."""
    for name in [name for name in os.environ if name.startswith(("COMMFUSE", "TORCH_DEVICE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COMMFUSE_ORDER", "ring")
    monkeypatch.setattr(env_integrations, "_installed", lambda name: False)
    env.run_env(as_json=True, console=Console())
    facts = json.loads(capfd.readouterr().out)  # and nothing else
    for name in ("shm", "tcp", "p2p (gloo)"):
        assert facts["transports"][name]["works"], facts["transports"][name]
    assert facts["transports"]["symmetric"]["works"] == facts["kernels"]["triton"]["works"] == torch.cuda.is_available()
    with_torch, frameworks = ("fsdp2", "fsdp1", "ddp", "tensor_parallel"), ("accelerate", "transformers", "lightning")
    assert list(facts["integrations"]) == [*with_torch, "deepspeed", "ulysses", *frameworks]
    for name in with_torch:
        assert facts["integrations"][name]["works"], facts["integrations"][name]
    assert facts["integrations"]["ulysses"] == {"works": False, "detail": "deepspeed is not installed"}
    assert facts["integrations"]["lightning"] == {"works": False, "detail": "lightning is not installed"}
    assert facts["settings"] == {"variables": {"COMMFUSE_ORDER": "ring"}, "error": None, "changed": {"order": "ring"}}
    assert facts["versions"]["torch"].startswith(importlib.metadata.version("torch").split("+")[0])
    assert facts["machine"]["cores"] >= 1 and facts["machine"]["memory_gib"] > 0
    page = page_of(facts)
    assert all(title in page for title in ("versions", "machine", "transports", "set-up", "integrations"))
    assert "COMMFUSE_ORDER=ring" in page and max(map(len, page.splitlines())) <= 128


def test_in_ruins(tmp_path):
    """torch cannot be imported, one framework ends the process, another is not there: each row says so, and the page comes."""
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: not an ELF file')")
    (tmp_path / "deepspeed.py").write_text("import os; os._exit(5)")
    (tmp_path / "accelerate.py").write_text("raise AttributeError('no such thing')")
    variables = environment(PYTHONPATH=str(tmp_path), COMMFUSE_TRANSPORT="pigeon")
    done = subprocess.run(ENV, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = {line[5:20].strip(): line for line in done.stdout.splitlines()}
    for name in ("shm", "tcp", "p2p (gloo)", "p2p (nccl)", "fsdp2", "ddp", "tensor_parallel"):
        assert rows[name].startswith("no") and "libtorch_cpu.so" in rows[name], rows[name]
    assert "unknown (OSError" in rows["torch"] and rows["autoload"].startswith("no")
    assert rows["settings"].startswith("no") and "COMMFUSE_TRANSPORT='pigeon'" in rows["settings"]
    for name in ("deepspeed", "ulysses", "accelerate", "transformers"):  # they import torch first
        assert rows[name].startswith("no") and "libtorch_cpu.so" in rows[name], rows[name]


# ---- transports --------------------------------------------------------------------------------------------------------
def test_a_transport_that_fails_says_why(monkeypatch):
    def no_memory(*_: object) -> int:
        raise PermissionError(1, "memfd_create is forbidden here")

    monkeypatch.setattr(os, "memfd_create", no_memory)
    monkeypatch.setenv("COMMFUSE_TCP_ADDRESS", "192.0.2.7")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    found = env_transports.try_transports()
    assert not found["shm"].works and "memfd_create is forbidden" in found["shm"].detail
    assert not found["tcp"].works and "192.0.2.7" in found["tcp"].detail
    assert not found["mpi"].works and "mpi4py is not installed" in found["mpi"].detail
    assert found["p2p (gloo)"].works, found["p2p (gloo)"]


def test_bytes_that_arrive_wrong_are_no_success(monkeypatch):
    from commfuse_dp.transport.shm.transport import ShmTransport

    whole = ShmTransport.publish

    def spoilt(self: Any, keys: Any, epoch: int, **more: Any) -> None:
        self.segments[keys[0]][5:6].zero_()
        whole(self, keys, epoch, **more)

    monkeypatch.setattr(ShmTransport, "publish", spoilt)
    monkeypatch.setattr(env_transports, "_DEADLINE_S", 2.0)
    with pytest.raises(RuntimeError, match="not those that were sent"):
        env_transports._try_shm()


# ---- integrations ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        ("print('commfuse-env:[\"a\", true, \"fine\"]'); print('noise'); import os; os._exit(9)", "status 9: noise"),
        ('print(\'commfuse-env:["a", true, "fine"]\', flush=True); import time; time.sleep(60)', "no answer within"),
        ("import sys; sys.exit('commfuse-env is not what this line is')", "status 1: commfuse-env is not"),
    ],
)
def test_answers_of_a_process_that_ends_early(program, wanted):
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if "sleep" in program:
        assert select.select([process.stdout], [], [], 60)[0]  # the line is there
    limit = env_integrations.time.monotonic() + (0.5 if "sleep" in program else 60)
    found = env_integrations._answers(("a", "b"), process, limit)
    assert found["a"] == (Finding(True, "fine") if "fine" in program else found["b"])
    assert not found["b"].works and wanted in found["b"].detail
    assert process.poll() is not None


GOOD = {
    "torch.py": "",
    "deepspeed/__init__.py": "__version__ = '9.9'\n",
    "deepspeed/runtime/__init__.py": "",
    "deepspeed/runtime/config.py": "class DeepSpeedConfig:\n    def __init__(self): pass\n",
    "deepspeed/runtime/engine.py": "from . import config\nclass DeepSpeedEngine:\n    def __init__(self): pass\n",
    "accelerate/__init__.py": "__version__ = '9.9'\n",
    "accelerate/commands/__init__.py": "",
    "accelerate/commands/launch.py": "def launch_command(): pass\ndef launch_command_parser(): pass\n",
    "accelerate/utils/__init__.py": "",
    "accelerate/utils/fsdp_utils.py": "def fsdp2_prepare_model(): pass\n",
}
OTHER = {"deepspeed/runtime/engine.py": "", "accelerate/commands/launch.py": ""}  # another version: not what is hooked into


@pytest.mark.parametrize("name", ["deepspeed", "accelerate"])
@pytest.mark.parametrize("files", [GOOD, GOOD | OTHER], ids=["known", "unknown"])
def test_frameworks_known_and_unknown(tmp_path, name, files):
    """The real integrations and frameworks of a few lines: what cannot be hooked into is said, and breaks nothing."""
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    command = [sys.executable, "-m", "commfuse_dp.cli.env_integrations", name]
    process = subprocess.Popen(
        command,
        env=environment(PYTHONPATH=str(tmp_path)),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    finding = env_integrations._answers((name,), process, env_integrations.time.monotonic() + 60)[name]
    assert finding.works == (files is GOOD), finding
    assert (f"{name} 9.9, hooked into" if finding.works else f"could not hook into {name}") in finding.detail


# ---- autoload and settings ---------------------------------------------------------------------------------------------
def test_why_autoload_is_not_active(monkeypatch):
    monkeypatch.delenv("COMMFUSE", raising=False)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    finding = env._autoload()
    assert not finding.works and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in finding.detail and "commfuse_dp.run" in finding.detail
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD")
    monkeypatch.setenv("COMMFUSE", "off")
    assert env._autoload() == Finding(False, "COMMFUSE=off: switched off")
    monkeypatch.delenv("COMMFUSE")
    entry = importlib.metadata.EntryPoint("commfuse_dp", "commfuse_dp.autoload:activate", "torch.backends")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    monkeypatch.setattr(autoload, "active", lambda: True)
    assert env._autoload().works
    monkeypatch.setattr(autoload, "active", lambda: False)
    assert "has not run" in env._autoload().detail
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    assert "no entry point commfuse_dp" in env._autoload().detail


def test_settings_that_are_refused_are_shown(monkeypatch):
    for name in [name for name in os.environ if name.startswith("COMMFUSE")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COMMFUSE_ODER", "ring")
    settings = env._settings()
    assert settings["variables"] == {"COMMFUSE_ODER": "ring"} and settings["changed"] == {}
    assert "did you mean 'COMMFUSE_ORDER'" in settings["error"]


def test_facts_that_cannot_be_had(monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("not here")

    monkeypatch.setattr(os, "statvfs", fail)
    monkeypatch.setattr(Path, "read_text", fail)
    machine = env._machine()
    assert machine["dev_shm_gib"] == machine["processor"] == "unknown (OSError: not here)" and machine["cores"] >= 1
    facts = {
        "versions": {"torch": None},
        "machine": {**machine, "devices": "unknown (RuntimeError: driver)"},
        "transports": {"shm": {"works": False, "detail": "because [of] this"}},
        "kernels": {},
        "autoload": {"works": False, "detail": ""},
        "settings": {"variables": {}, "error": "wrong", "changed": {}},
        "integrations": {},
    }
    page = page_of(facts)
    assert "not installed" in page and "because [of] this" in page and "unknown (RuntimeError: driver)" in page
