"""What makes a foreign test suite run on this host's CPU over gloo, and what puts CommFuse into its models.

Its own module name, beside no `tests` folder, since the foreign suites have packages of that name. All of it waits for the
imports of the suite (wrapt), so that processes that import neither torch nor DeepSpeed do nothing.

Environment: PEERS_SUITE, PEERS_MODE ("stock" or "commfuse"), PEERS_DEVICES (as many as the suite shall believe to have),
PEERS_FOLDER (where `current` names the running test, and `applied.jsonl` collects what was served), PEERS_PARTITION_ALL.
"""

from __future__ import annotations

import collections
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wrapt

_FSDP2 = "torch.distributed.fsdp._fully_shard"
_FOREIGN_GROUPS = ("threaded", "fake")  # ranks that are threads of one process (which only other suites have), or do not exist

_sharded: weakref.WeakSet[Any] = weakref.WeakSet()  # what fully_shard was called for
_served: weakref.WeakSet[Any] = weakref.WeakSet()


def register(suite: str, *, injected: bool) -> None:
    wrapt.register_post_import_hook(_name_no_devices, "torch.nn.parallel.distributed")
    if suite == "fsdp2":
        wrapt.register_post_import_hook(_pretend_devices, "torch.testing._internal.common_distributed")
        wrapt.register_post_import_hook(_count_devices, "torch.testing._internal.common_fsdp")
        wrapt.register_post_import_hook(_fork_threads, "torch.testing._internal.common_fsdp")
        wrapt.register_post_import_hook(_sleep_never, "torch.testing._internal.common_utils")
        if injected:
            wrapt.register_post_import_hook(_watch_states, f"{_FSDP2}._fsdp_state")
            wrapt.register_post_import_hook(_watch_calls, f"{_FSDP2}._fully_shard")
    else:
        # The Adam that offloading asks for is there (suites.py); an op for all-reduces of inference would be compiled first: a
        # minute, and under a lock.
        wrapt.register_post_import_hook(
            lambda module: vars(module).update(__compatible_ops__=collections.defaultdict(bool, cpu_adam=True)), "deepspeed.ops"
        )
        wrapt.register_post_import_hook(  # it asks for NCCL and CUDA; a CPU does without
            lambda module: vars(module).update(bf16_required_version_check=lambda accelerator_check=True: True), "unit.util"
        )
        wrapt.register_post_import_hook(  # tests make tensors there, and stock's is a number as a string
            lambda module: setattr(module.CPU_Accelerator, "current_device", lambda self: "cpu"),
            "deepspeed.accelerator.cpu_accelerator",
        )
        wrapt.register_post_import_hook(_gather_no_scalars, "unit.common")
        wrapt.register_post_import_hook(_name_sparse_modules, "deepspeed.runtime.engine")
        if os.environ.get("PEERS_PARTITION_ALL"):
            wrapt.register_post_import_hook(_keep_nothing_whole, "deepspeed.runtime.zero.config")
        if injected:  # by COMMFUSE=1, which does the same as an empty block "commfuse" in every configuration
            wrapt.register_post_import_hook(_watch_engines, "commfuse_dp.integrations.deepspeed.apply")


# ---- FSDP2's tests on CPU ----------------------------------------------------------------------------------------------
def _pretend_devices(module: Any) -> None:
    """Tests that want 2 GPUs run on 2 ranks of this host; their processes are forked from one that has imported torch."""
    import torch.multiprocessing

    devices = int(os.environ["PEERS_DEVICES"])
    stock_skip, stock_context = module.skip_if_lt_x_gpu, torch.multiprocessing.get_context

    def skip_if_lt_x_gpu(x: int, *, allow_cpu: bool = False) -> Any:
        return (lambda test: test) if x <= devices else stock_skip(x)

    def get_context(method: str | None = None) -> Any:
        if method != "spawn":
            return stock_context(method)
        context = stock_context("forkserver")
        context.set_forkserver_preload(["torch.testing._internal.common_fsdp", "commfuse_dp.integrations.fsdp2"])
        return context

    module.skip_if_lt_x_gpu = skip_if_lt_x_gpu
    torch.multiprocessing.get_context = get_context
    torch.cpu.device_count = lambda: devices
    torch.accelerator.device_count = lambda: devices


def _count_devices(module: Any) -> None:
    """On a CPU tests start as many ranks as they like best: those that like 8 do with 4, if that is not too few for them."""
    devices = module.DEVICE_COUNT = int(os.environ["PEERS_DEVICES"])
    most = max(devices, 4)

    def limit(cls: Any, **kwargs: Any) -> None:
        own = vars(cls).get("world_size")
        if isinstance(own, property):
            cls.world_size = property(lambda self: min(own.__get__(self), most))

    module.FSDPTest.__init_subclass__ = classmethod(limit)


def _fork_threads(module: Any) -> None:
    """Ranks that are threads of one process become processes: CommFuse has one rank in each. Stock is run in the same way."""

    class FSDPTestMultiThread(module.FSDPTest):  # type: ignore[misc, name-defined]
        def perThreadSetUp(self) -> None:
            pass

        def perThreadTearDown(self) -> None:
            pass

        def run_test(self, *args: Any) -> None:
            self.perThreadSetUp()
            super().run_test(*args)
            self.perThreadTearDown()

    module.FSDPTestMultiThread = FSDPTestMultiThread


def _sleep_never(module: Any) -> None:
    """Delays are for streams; where a CPU computes they would only take time. Some tests are skipped without the function."""
    import torch

    module.get_cycles_per_ms = lambda device="cuda": 0.0
    torch.cpu._sleep = module._cpu_sleep


def _name_no_devices(module: Any) -> None:
    """The models that tests compare with are DDP over named GPUs; over a CPU DDP takes no names."""

    def build(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wrapped(*args, **{key: value for key, value in kwargs.items() if key not in ("device_ids", "output_device")})

    wrapt.wrap_function_wrapper(module, "DistributedDataParallel.__init__", build)


# ---- apply() at the first forward of the outermost module that fully_shard was called for -------------------------------
def _watch_states(module: Any) -> None:
    import torch

    state = module.FSDPState
    stock_init, stock_pre_forward = state.init, state._pre_forward

    def init(self: Any, modules: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, modules, *args, **kwargs)
        _sharded.add(modules[0])

    def pre_forward(self: Any, module: Any, *args: Any) -> Any:
        _serve(module)  # methods named by register_fsdp_forward_method come here without __call__
        return stock_pre_forward(self, module, *args)

    state.init = init
    state._pre_forward = torch._disable_dynamo(pre_forward)


def _watch_calls(module: Any) -> None:
    import torch

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _serve(self)
        return torch.nn.Module.__call__(self, *args, **kwargs)

    module.FSDPModule.__call__ = call


def _serve(module: Any) -> None:
    root = module
    for other in list(_sharded):
        if other is not root and any(inner is root for inner in other.modules()):
            root = other
    if root in _served:
        return
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    import commfuse_dp

    if not isinstance(root, FSDPModule) or dist.get_backend() in _FOREIGN_GROUPS:
        return
    _served.add(root)
    for inner in root.modules():
        if inner is not root and inner in _served:
            commfuse_dp.remove(inner)
            _served.discard(inner)
    report = commfuse_dp.apply(root)
    if dist.get_rank() == 0:
        _note(report)


# ---- DeepSpeed ----------------------------------------------------------------------------------------------------------
def _gather_no_scalars(module: Any) -> None:
    """Ranks tell each other in tensors without dimensions whether they have found the same, which gloo does not gather."""
    import torch.distributed as dist

    def reduce_boolean_flags(flag: bool, op: Callable[[list[bool]], bool] = all) -> bool:
        flags = [flag] * dist.get_world_size()
        dist.all_gather_object(flags, flag)
        return op(flags)

    module.reduce_boolean_flags = reduce_boolean_flags


def _name_sparse_modules(module: Any) -> None:
    """Its tests compare an attribute of checkpoints' engines that newer versions have no more."""
    if not hasattr(module.DeepSpeedEngine, "sparse_tensor_module_names"):
        module.DeepSpeedEngine.sparse_tensor_module_names = frozenset()


def _keep_nothing_whole(module: Any) -> None:
    """ZeRO-3 keeps parameters below 100,000 elements whole, that is all of these tests' models, and partitions nothing."""

    def build(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not {"stage3_param_persistence_threshold", "param_persistence_threshold"} & kwargs.keys():
            kwargs["stage3_param_persistence_threshold"] = 0
        wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module, "DeepSpeedZeroConfig.__init__", build)


def _watch_engines(module: Any) -> None:
    import torch.distributed as dist

    def note(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        report = wrapped(*args, **kwargs)
        if dist.get_rank() == 0:
            _note(report)
        return report

    wrapt.wrap_function_wrapper(module, "apply_to_engine", note)


def _note(report: Any) -> None:
    folder = Path(os.environ["PEERS_FOLDER"])
    line = {"test": (folder / "current").read_text(), "paths": report.numel_by_path(), "transport": report.transport}
    with (folder / "applied.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
