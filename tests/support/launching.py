"""Unmodified programs under their launchers, as a user starts them, on the CPU of this host."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

from commfuse_dp.ports import free_port

BIN = Path(sys.executable).parent

# DeepSpeed compiles a C++ op for its all-reduce of inference when its communication starts: a minute, and under a lock that a
# rank which is killed leaves behind. Nothing here needs it.
#
# Stock gloo aborts a process that exits while its worker threads live ("terminate called without an active exception"): one of
# them asks for the GIL to drop the tensors of its last work, and finds an interpreter that finalizes. Scripts destroy their
# groups against that, but DeepSpeed's modules keep references to them. The handler is registered first and so runs after all
# others.
#
# Who does not end says where it stands: see `_tell_stacks`.
_SITE = """
    import atexit
    import collections
    import faulthandler
    import glob
    import os
    import signal
    import sys

    faulthandler.register(signal.SIGUSR1, all_threads=True)

    def leave_before_finalization():
        gloo = any("pt_gloo" in open(path).read() for path in glob.glob("/proc/self/task/*/comm"))
        if gloo and not hasattr(sys, "last_value"):  # a script that raised ends as Python ends it
            MPI = sys.modules.get("mpi4py.MPI")
            if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
                MPI.Finalize()  # which removes MPI's shared memory
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    atexit.register(leave_before_finalization)

    try:
        import wrapt
    except ImportError:
        pass
    else:
        wrapt.register_post_import_hook(
            lambda module: vars(module).update(__compatible_ops__=collections.defaultdict(bool)), "deepspeed.ops"
        )
"""

_JOBS = ("COMMFUSE", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "ACCELERATE_", "TORCH_DEVICE_BACKEND_AUTOLOAD")


def launch(command: Sequence[str], folder: Path, *, timeout_s: float = 400.0, **environment: str) -> tuple[str, str]:
    """(stdout, stderr) of a launcher of this installation and all its ranks; it must end well.

    command: `torchrun --nproc-per-node 2 train.py ...`; {port} stands for a free port. Run in `folder`.
    timeout_s: for what hangs. (Where sessions are scheduled as groups, processes beside busy ones of another session were seen
    to get 2 % of a core for minutes: imports alone took longer than 90 s.)
    """
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(dedent(_SITE))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_JOBS)}
    inherited |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(site)}
    inherited |= {"PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}", "HF_HUB_OFFLINE": "1", **environment}
    words = [word.replace("{port}", str(free_port())) for word in command]
    process = subprocess.Popen(
        [str(BIN / words[0]), *words[1:]],
        cwd=folder,
        env=inherited,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _tell_stacks(process.pid)
        process.terminate()  # the launcher ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10.0)
        _end_group(process.pid)
        out, err = process.communicate()
        raise AssertionError(f"{words} did not end within {timeout_s} s:\n{out[-3000:]}\n{err[-20000:]}") from None
    finally:
        _end_group(process.pid)
    assert process.returncode == 0, f"{words} ended with {process.returncode}:\n{out[-3000:]}\n{err[-6000:]}"
    return out, err


def _tell_stacks(launcher: int) -> None:
    """Every Python process below a launcher, and that one, writes the stacks of its threads to its stderr."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    below, found = {launcher}, {launcher}
    while below:
        below = {child for child, parent in parents.items() if parent in below}
        found |= below
    for process in sorted(found):
        with contextlib.suppress(OSError):
            if "python" in os.readlink(f"/proc/{process}/exe"):
                os.kill(process, signal.SIGUSR1)
                time.sleep(0.5)  # one after the other: they write into one pipe


def _end_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
