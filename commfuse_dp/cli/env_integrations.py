"""`commfuse env`: what each integration will do with the frameworks installed here.

Every framework is asked in a process of its own (`python -m commfuse_dp.cli.env_integrations NAME ...`): importing one takes
seconds, and may fail in ways that an exception handler does not see.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from commfuse_dp.cli.env_transports import Finding

TIMEOUT_S = 90.0
_MARK = "commfuse-env:"  # before the answer: frameworks print, too


def ask_integrations() -> dict[str, Finding]:
    """Integration -> finding. Never raises."""
    missing = {
        name: Finding(False, f"{package} is not installed") for name, package in _NEEDS.items() if not _installed(package)
    }
    # Neither ranks nor launchers: these processes must not believe they belong to a job.
    alone = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "COMMFUSE", "PMI", "OMPI_", "MPI_LOCAL", "ACCELERATE_", "TORCHELASTIC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(alone)}
    command = [sys.executable, "-m", "commfuse_dp.cli.env_integrations"]
    processes = {}
    for names in _TOGETHER:
        if not missing.keys() & set(names):
            processes[names] = subprocess.Popen(
                [*command, *names],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
    limit = time.monotonic() + TIMEOUT_S
    found = dict(missing)
    for names, process in processes.items():
        found.update(_answers(names, process, limit))
    return {name: found[name] for name in _QUESTIONS}


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _answers(names: tuple[str, ...], process: subprocess.Popen[str], limit: float) -> dict[str, Finding]:
    try:
        output, _ = process.communicate(timeout=max(limit - time.monotonic(), 0.1))
        lines = [line for line in output.splitlines() if line.strip()]
        problem = f"its process ended with status {process.returncode}: {lines[-1] if lines else 'no output'}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        problem = f"no answer within {TIMEOUT_S:g} s"
    marked = [json.loads(line.removeprefix(_MARK)) for line in output.splitlines() if line.startswith(_MARK)]
    return {name: Finding(False, problem) for name in names} | {name: Finding(*finding) for name, *finding in marked}


# ---- in the process that is asked --------------------------------------------------------------------------------------
def _ask_fsdp2() -> Finding:
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from commfuse_dp.integrations.fsdp2 import compat

    _one_rank()
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model)
    problem = compat.probe(model)
    if problem is not None:
        return Finding(True, f"public hooks only; fused layers need commfuse_dp.claim before fully_shard ({problem})")
    return Finding(
        True, "commfuse_dp.apply(model) after the last fully_shard: linears fused, the rest gathered in the same stream"
    )


def _ask_fsdp1() -> Finding:
    import torch
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel

    from commfuse_dp.integrations import fsdp1_compat

    importlib.import_module("commfuse_dp.integrations.fsdp1")
    _one_rank()
    problem = fsdp1_compat.probe(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))
    if problem is not None:
        return Finding(True, f"gradient hook that blocks backward ({problem})")
    return Finding(True, "gradient hook: reduction in the background of backward, unfused")


def _ask_ddp() -> Finding:
    importlib.import_module("commfuse_dp.integrations.ddp")
    return Finding(True, "gradient hook: all-reduce of each bucket in the background of backward, unfused")


def _ask_tensor_parallel() -> Finding:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as styles

    from commfuse_dp.integrations.tensor_parallel import compat

    _one_rank()
    mesh = DeviceMesh("cpu", torch.arange(1, device="cpu"))
    plan = {
        compat.COLUMN: styles.ColwiseParallel(),
        compat.ROW: styles.RowwiseParallel(),
        compat.SEQUENCE: styles.SequenceParallel(),
        compat.INPUT: styles.PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)),
    }
    found = {}
    for name, style in plan.items():
        module = styles.parallelize_module(nn.LayerNorm(4) if name == compat.SEQUENCE else nn.Linear(4, 4), mesh, style)
        found[name] = [known.kind for known in compat.styles_of(module)]
    unknown = [name for name, kinds in found.items() if kinds != [name]]
    if unknown:
        return Finding(False, f"torch {torch.__version__} leaves what {', '.join(unknown)} did in a way that is not known here")
    return Finding(
        True, "commfuse_dp.apply(model) after parallelize_module, or COMMFUSE=1: column- and row-parallel linears by slices"
    )


def _ask_transformers() -> Finding:
    from commfuse_dp.integrations.hugging_face_tp import compat

    modules = ["transformers.distributed.mixin", compat.HOME]
    return _ask_framework("transformers", modules, "COMMFUSE=1 switches it on for DistributedConfig(tp_size=N)")


def _ask_ulysses() -> Finding:
    from commfuse_dp.integrations.ulysses import compat

    return _ask_framework("deepspeed", list(compat.CLASSES), 'the block "commfuse", or COMMFUSE=1, switches it on')


def _ask_lightning() -> Finding:
    callback = importlib.import_module("commfuse_dp.integrations.lightning").CommFuseCallback
    version = getattr(sys.modules["lightning"], "__version__", "of unknown version")
    return Finding(True, f"callbacks=[{callback.__name__}()] of a Trainer or a Fabric (lightning {version})")


def _ask_deepspeed() -> Finding:
    """Its private names are looked for when an engine is built, whose report names what falls back."""
    return _ask_framework("deepspeed", ["deepspeed.runtime.engine"], 'a top-level block "commfuse" in its JSON switches it on')


def _ask_accelerate() -> Finding:
    modules = ["accelerate.commands.launch", "accelerate.utils.fsdp_utils"]
    return _ask_framework("accelerate", modules, "`accelerate launch --commfuse` switches it on")


def _ask_framework(name: str, modules: Sequence[str], how: str) -> Finding:
    """Import what the integration hooks into, as a run that asks for CommFuse does, and see whether it complains."""
    from commfuse_dp import autoload

    complaints: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commfuse_dp").addHandler(handler)
    os.environ["COMMFUSE"] = "1"
    importlib.import_module("torch")
    if not autoload.active():
        how += ", in a program started by python -m commfuse_dp.run, as autoload is off"
        autoload.activate()
    version = getattr(importlib.import_module(name), "__version__", "of unknown version")
    for module in modules:
        importlib.import_module(module)
    if complaints:
        return Finding(False, "; ".join(complaints))
    return Finding(True, f"{how} ({name} {version}, hooked into)")


def _one_rank() -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


_QUESTIONS: dict[str, Callable[[], Finding]] = {
    "fsdp2": _ask_fsdp2,
    "fsdp1": _ask_fsdp1,
    "ddp": _ask_ddp,
    "tensor_parallel": _ask_tensor_parallel,
    "deepspeed": _ask_deepspeed,
    "ulysses": _ask_ulysses,
    "accelerate": _ask_accelerate,
    "transformers": _ask_transformers,
    "lightning": _ask_lightning,
}
_NEEDS = {
    "deepspeed": "deepspeed",
    "ulysses": "deepspeed",
    "accelerate": "accelerate",
    "transformers": "transformers",
    "lightning": "lightning",
}
_TOGETHER = (  # each in a process
    ("fsdp2", "fsdp1", "ddp", "tensor_parallel"),
    ("deepspeed", "ulysses"),
    ("accelerate",),
    ("transformers",),
    ("lightning",),
)


def main(names: Sequence[str]) -> None:
    for name in names:
        try:
            finding = _QUESTIONS[name]()
        except Exception as error:
            finding = Finding(False, f"{type(error).__name__}: {error}".splitlines()[0])
        print(f"\n{_MARK}{json.dumps([name, *finding])}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
