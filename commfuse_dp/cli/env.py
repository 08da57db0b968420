"""`commfuse env`: one page about this installation and this machine, for bug reports. Nothing that is missing makes it fail."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import commfuse_dp
from commfuse_dp import autoload, mpi_launch
from commfuse_dp.cli.env_integrations import ask_integrations
from commfuse_dp.cli.env_transports import Finding, ask_kernels, try_transports
from commfuse_dp.config import CommFuseConfig
from commfuse_dp.errors import ConfigError

_PACKAGES = (
    "torch",
    "deepspeed",
    "accelerate",
    "transformers",
    "mpi4py",
    "wrapt",
    "pydantic",
    "pyyaml",
    "triton",
    "cuda-core",
    "cuda-bindings",
    "matplotlib",
)
_TORCH_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_GIB = 1 << 30


def collect() -> dict[str, Any]:
    """Everything that the page shows, ready for JSON. Never raises for want of a package, a device or a file."""
    return {
        "versions": _versions(),
        "machine": _machine(),
        "transports": {name: finding._asdict() for name, finding in try_transports().items()},
        "kernels": {name: finding._asdict() for name, finding in ask_kernels().items()},
        "autoload": _autoload()._asdict(),
        "settings": _settings(),
        "integrations": {name: finding._asdict() for name, finding in ask_integrations().items()},
    }


def run_env(*, as_json: bool, console: Console) -> None:
    with Console(stderr=True).status("trying transports, asking the installed frameworks ..."):
        facts = collect()
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _show(facts, console)


def _attempt(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception as error:
        return f"unknown ({type(error).__name__}: {error})"


# ---- versions and machine ----------------------------------------------------------------------------------------------
def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"commfuse_dp": commfuse_dp.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        found[name] = _version(name)
    if found["torch"] is not None:
        found["torch"] = _attempt(_torch_version)
    if found["mpi4py"] is not None:
        found["mpi library"] = mpi_launch.library().removeprefix("=")
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except Exception:  # not there, or there in ruins
        return None


def _torch_version() -> str:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return f"{torch.__version__} ({build})"


def _machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "processor": _attempt(_processor),
        "cores": _attempt(lambda: len(os.sched_getaffinity(0))),
        "cores_of_machine": os.cpu_count(),
        "memory_gib": _attempt(lambda: _gib(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))),
        "memory_available_gib": _attempt(_available),
        "dev_shm_gib": _attempt(lambda: _size_of("/dev/shm")),
        "torch_threads": _attempt(_threads),
        "devices": _attempt(_devices),
    }


def _gib(nbytes: int) -> float:
    return round(nbytes / _GIB, 2)


def _size_of(folder: str) -> float:
    figures = os.statvfs(folder)
    return _gib(figures.f_blocks * figures.f_frsize)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _available() -> float | None:
    from commfuse_dp.transport.free_memory import available_memory

    free = available_memory()
    return None if free is None else _gib(free)


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _devices() -> list[str]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(f"{properties.name}, {_gib(properties.total_memory)} GiB")
    return found


# ---- autoload and settings ---------------------------------------------------------------------------------------------
def _autoload() -> Finding:
    """Whether `import torch` calls autoload.activate here; it has just been imported, so that the finder would be there."""
    value = os.environ.get(_TORCH_VARIABLE, "1")
    if value != "1":
        return Finding(False, f"{_TORCH_VARIABLE}={value}: switched off for all of PyTorch; use python -m commfuse_dp.run")
    if autoload.wish() in autoload.OFF:
        return Finding(False, f"COMMFUSE={os.environ['COMMFUSE']}: switched off")
    try:
        names = [entry.name for entry in importlib.metadata.entry_points(group="torch.backends")]
    except Exception as error:
        return Finding(False, f"the installed packages cannot be listed: {type(error).__name__}: {error}")
    if "commfuse_dp" not in names:
        return Finding(False, 'no entry point commfuse_dp in the group "torch.backends": install the package with pip')
    if not autoload.active():
        return Finding(
            False, "the entry point is installed, but has not run: importing torch failed, or is of an older version"
        )
    return Finding(True, "deepspeed and accelerate are hooked into when a program imports them")


def _settings() -> dict[str, Any]:
    """Variables of the environment, and what they make of the settings (those that are not the default)."""
    variables = {
        name: value for name, value in sorted(os.environ.items()) if name == "COMMFUSE" or name.startswith("COMMFUSE_")
    }
    try:
        config = CommFuseConfig.from_environment()
    except ConfigError as error:
        return {"variables": variables, "error": str(error), "changed": {}}
    default = CommFuseConfig().model_dump()
    changed = {key: value for key, value in config.model_dump(mode="json").items() if getattr(config, key) != default[key]}
    return {"variables": variables, "error": None, "changed": changed}


# ---- the page ----------------------------------------------------------------------------------------------------------
def _show(facts: dict[str, Any], console: Console) -> None:
    console.print(
        _section("versions", [(name, version or "not installed", None) for name, version in facts["versions"].items()])
    )
    machine = facts["machine"]
    devices = machine["devices"] if isinstance(machine["devices"], str) else "; ".join(machine["devices"]) or "none: CPU only"
    console.print(
        _section(
            "machine",
            [
                ("system", machine["system"], None),
                (
                    "processor",
                    f"{machine['processor']}; {machine['cores']} of {machine['cores_of_machine']} cores, "
                    f"{machine['torch_threads']} torch threads",
                    None,
                ),
                (
                    "memory",
                    f"{machine['memory_gib']} GiB, {machine['memory_available_gib']} GiB available; "
                    f"/dev/shm {machine['dev_shm_gib']} GiB",
                    None,
                ),
                ("devices", devices, None),
            ],
        )
    )
    console.print(_section("transports", [(name, f["detail"], f["works"]) for name, f in facts["transports"].items()]))
    console.print(_section("kernels", [(name, f["detail"], f["works"]) for name, f in facts["kernels"].items()]))
    settings = facts["settings"]
    said = ", ".join(f"{name}={value}" for name, value in settings["variables"].items()) or "no COMMFUSE variables"
    changed = ", ".join(f"{key}={value}" for key, value in settings["changed"].items()) or "all at their defaults"
    console.print(
        _section(
            "set-up",
            [
                ("autoload", facts["autoload"]["detail"], facts["autoload"]["works"]),
                ("environment", said, None),
                ("settings", settings["error"] or changed, settings["error"] is None),
            ],
        )
    )
    console.print(_section("integrations", [(name, f["detail"], f["works"]) for name, f in facts["integrations"].items()]))


def _section(title: str, rows: list[tuple[str, str, bool | None]]) -> Table:
    """Rows of (name, text, whether it works; None: no question)."""
    table = Table(box=None, show_header=False, title=title, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column(width=3)
    table.add_column(width=15, style="cyan")
    table.add_column(overflow="fold")
    for name, text, works in rows:
        mark = Text("") if works is None else Text("yes", style="green") if works else Text("no", style="red")
        table.add_row(mark, name, Text(str(text)))
    return table
