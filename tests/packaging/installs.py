"""Small installations in a folder: a torch that does nothing but load its extensions, frameworks of a few lines, and this
package's own files with integrations of the test's making. A program in one of them takes 0.1 s instead of 5."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

import commfuse_dp

# What torch/__init__.py does at its end (torch 2.13).
TORCH = """
    import os
    if os.getenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        from importlib.metadata import EntryPoint
        try:
            EntryPoint("commfuse_dp", "commfuse_dp.autoload:activate", "torch.backends").load()()
        except Exception as error:
            raise RuntimeError("Failed to load the backend extension: commfuse_dp") from error
"""
FRAMEWORKS = {
    # As deepspeed and accelerate do: torch is imported in the middle of the package, other modules after it.
    "deepspeed/__init__.py": "import torch\nfrom .runtime import engine\n__version__ = '0.1'\n",
    "deepspeed/runtime/__init__.py": "",
    "deepspeed/runtime/engine.py": "class DeepSpeedEngine: pass\n",
    "accelerate/__init__.py": "from .accelerator import Accelerator\nfrom .utils import fsdp_utils\n",
    "accelerate/accelerator.py": "import torch\nclass Accelerator: pass\n",
    "accelerate/utils/__init__.py": "",
    "accelerate/utils/fsdp_utils.py": "def fsdp2_prepare_model(): pass\n",
}


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return folder


def hooks(*names: str) -> str:
    """Source of an autohook module that prints what it sees."""
    return f"""
        from commfuse_dp.autoload import when_imported

        def register():
            print(f"register {{__name__.split('.')[2]}}\\n", end="")  # at once, for threads
            for name in {names!r}:
                when_imported(name)(lambda module: print(f"hook {{module.__name__}}\\n", end=""))
    """


def install(folder: Path, **integrations: str) -> Path:
    """torch and the frameworks, and this package with the given autohook sources (framework -> source)."""
    write(folder, {"torch.py": TORCH, **FRAMEWORKS})
    package = Path(commfuse_dp.__file__).parent
    for name in ("__init__.py", "autoload.py"):
        (folder / "commfuse_dp").mkdir(exist_ok=True)
        shutil.copy(package / name, folder / "commfuse_dp" / name)
    write(folder, {"commfuse_dp/integrations/__init__.py": ""})
    for framework, source in integrations.items():
        path = f"commfuse_dp/integrations/{framework}"
        write(folder, {f"{path}/__init__.py": "", f"{path}/autohook.py": source})
    return folder


def run(code: str, folder: Path | None = None, *, timeout_s: float = 60.0, **environment: str) -> tuple[list[str], list[str]]:
    """Lines that a program writes to stdout and to stderr; it must end well."""
    done = run_command([sys.executable, "-c", dedent(code)], folder, timeout_s=timeout_s, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


def run_command(
    command: list[str], folder: Path | None = None, *, timeout_s: float = 60.0, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A program outside of any job, with `folder` in front of what is installed."""
    jobs = (
        "COMMFUSE",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
        "TORCHELASTIC_",
        "TORCH_DEVICE_BACKEND_AUTOLOAD",
        "PYTHONPATH",
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(jobs)}
    clean |= {"OMP_NUM_THREADS": "1", **({"PYTHONPATH": str(folder)} if folder is not None else {}), **environment}
    place = cwd or folder or Path("/")  # Python looks there first
    return subprocess.run(command, env=clean, cwd=place, capture_output=True, text=True, timeout=timeout_s, check=False)
