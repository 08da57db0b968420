"""All names of DeepSpeed that are not documented, but for those of ZeRO-1 and 2 (flat_compat.py). Checked at start; what is
missing is a reason, not a crash.

Read in deepspeed 0.19.8: runtime/engine.py, runtime/zero/{stage3, stage_1_and_2, parameter_offload,
partitioned_param_coordinator}.py, comm/comm.py.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.transaction import Transaction
from torch import nn

_UNFETCHED = "_commfuse_unfetched"
_FETCHERS = ("deepspeed.runtime.zero.partitioned_param_coordinator", "deepspeed.runtime.zero.parameter_offload")

_ENGINE_NAMES = ("_backward_epilogue", "zero_optimization_stage", "gradient_accumulation_steps", "micro_steps")
_OPTIMIZER_NAMES = {
    3: (
        "partition_grads",
        "micro_step_id",
        "independent_gradient_partition_epilogue",
        "gradient_accumulation_dtype",
        "get_param_comm_dtype",
        "ipg_buckets",
        "averaged_gradients",
        "params_already_reduced",
        "grad_partitions_flat_buffer",
    ),
    2: (
        "independent_gradient_partition_epilogue",
        "round_robin_bit16_groups",
        "round_robin_bit16_offsets",
        "bit16_groups_flat",
        "partition_size",
        "partition_gradients",
        "use_grad_accum_attribute",
        "gradient_accumulation_dtype",
        "_use_compact_grad_partition_buffer",
        "_get_compact_grad_partition_slice",
        "setup_buckets",
        "reduce_ipg_grads",
        "is_gradient_accumulation_boundary",
        "get_param_comm_dtype",
        "micro_step_id",
        "averaged_gradients",
        "all_grad_tensors",
        "params_already_reduced",
        "ipg_buckets",
        "extra_large_param_to_reduce",
        "_release_ipg_buffers",
    ),
}
_PARAM_NAMES = ("ds_id", "ds_tensor", "ds_shape", "ds_numel", "ds_status", "ds_persist", "partition")


def version() -> str:
    return str(importlib.import_module("deepspeed").__version__)


# ---- what is changed for the whole process ---------------------------------------------------------------------------
class Shared:
    """A change of state that belongs to the process: made for the first of its users, taken back with the last one.

    begin: makes the change, wholly or not at all, and returns what takes it back.
    """

    def __init__(self, begin: Callable[[], Callable[[], object]]) -> None:
        self._begin = begin
        self._end: Callable[[], object] | None = None
        self._users = 0

    def use(self, transaction: Transaction, user: object) -> None:
        """Until the undo, or until `user` has gone."""
        ending: list[Any] = []
        transaction.on_undo(lambda: [end() for end in ending])
        if self._end is None:
            self._end = self._begin()
        self._users += 1
        ending.append(weakref.finalize(user, self._leave))
        ending[0].atexit = False

    def _leave(self) -> None:
        self._users -= 1
        if self._users == 0 and self._end is not None:
            end, self._end = self._end, None
            end()


# ---- the communication backend ---------------------------------------------------------------------------------------
def backend_obstacle() -> str | None:
    """Why the backend cannot be substituted."""
    comm = importlib.import_module("deepspeed.comm.comm")
    if not hasattr(comm, "cdb"):
        return f"deepspeed {version()}: deepspeed.comm.comm has no cdb"
    backend = comm.cdb
    if backend is None:
        return "DeepSpeed's communication is not initialised"
    lacking = [
        name
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "broadcast")
        if not hasattr(backend, name)
    ]
    return f"deepspeed {version()}: its {type(backend).__name__} lacks {', '.join(lacking)}" if lacking else None


def get_backend() -> Any:
    return importlib.import_module("deepspeed.comm.comm").cdb


def set_backend(backend: Any) -> None:
    # The module's own global: deepspeed.comm.cdb is a copy made at import that nobody reads.
    vars(importlib.import_module("deepspeed.comm.comm"))["cdb"] = backend


# ---- the engine ------------------------------------------------------------------------------------------------------
def engine_obstacle(engine: Any) -> str | None:
    """Why no layer of this engine can be fused, for what it is or how it is configured."""
    optimizer = engine.optimizer
    lacking = [name for name in _ENGINE_NAMES if not hasattr(engine, name)]
    if lacking:
        return f"deepspeed {version()}: its engine lacks {', '.join(lacking)}"
    stage = int(engine.zero_optimization_stage())
    if stage == 0:
        return "ZeRO stage 0 shards nothing"
    if optimizer is None or not hasattr(optimizer, "independent_gradient_partition_epilogue"):
        return f"the optimizer ({type(optimizer).__name__}) does not partition gradients"
    lacking = [name for name in _OPTIMIZER_NAMES[3 if stage == 3 else 2] if not hasattr(optimizer, name)]
    if lacking:
        return f"deepspeed {version()}: its {type(optimizer).__name__} lacks {', '.join(lacking)}"
    for what, present in _features(engine, optimizer).items():
        if present:
            return f"{what} is on"
    return None


def _features(engine: Any, optimizer: Any) -> dict[str, bool]:
    """What takes gradients or parameters on ways that fused layers do not follow."""

    def asked(name: str) -> bool:
        value = getattr(engine, name, None)
        return bool(value() if callable(value) else value)

    offload = getattr(optimizer, "offload_optimizer", False) or getattr(optimizer, "cpu_offload", False)
    return {
        "pipeline parallelism": asked("pipeline_parallelism"),
        "ZenFlow": asked("zenflow") or bool(getattr(optimizer, "zenflow", False)),
        "DeepCompile": asked("is_deepcompile_enabled"),
        "optimizer offloading": bool(offload),
        "tensor parallelism (AutoTP)": getattr(engine, "autotp_size", lambda: 0)() > 1,
        "hpZ (zero_hpz_partition_size)": getattr(engine, "zero_hpz_partition_size", lambda: 1)() > 1,
        "quantisation of weights": asked("zero_quantized_weights") or asked("zero_quantized_nontrainable_weights"),
        "quantisation of gradients": asked("zero_quantized_gradients"),
        "MiCS": "MiCS" in type(optimizer).__name__,
        "mixture of experts": asked("has_moe_layers"),
        "sequence parallelism": getattr(optimizer, "sequence_parallel_size", 1) > 1,
        "Muon": "Muon" in type(getattr(optimizer, "optimizer", None)).__name__,
    }


def group_of(engine: Any) -> dist.ProcessGroup:
    """The data-parallel group over which parameters and gradients are sharded."""
    group = getattr(engine.optimizer, "dp_process_group", None)
    return group if group is not None else dist.group.WORLD  # type: ignore[return-value]


def before_epilogue(transaction: Transaction, optimizer: Any, action: Callable[[], None]) -> None:
    """Call `action` before the optimizer collects the gradients of a backward."""
    original = optimizer.independent_gradient_partition_epilogue

    @functools.wraps(original)
    def epilogue(*args: Any, **kwargs: Any) -> Any:
        action()
        return original(*args, **kwargs)

    transaction.set(vars(optimizer), "independent_gradient_partition_epilogue", epilogue)


def during(transaction: Transaction, engine: Any, method: str, context: Callable[[], AbstractContextManager[None]]) -> None:
    """A method of DeepSpeed's engine, if it has that, runs in a `context`. "_backward_epilogue": what it does at the end of a
    backward, its last reductions and releases."""
    original = getattr(engine, method, None)
    if original is None:
        return

    @functools.wraps(original)
    def surrounded(*args: Any, **kwargs: Any) -> Any:
        with context():
            return original(*args, **kwargs)

    transaction.set(vars(engine), method, surrounded)


def coalescing(optimizer: Any) -> bool:
    """Inside engine.coalesce_grad_reduction(): gradients stay local until its end."""
    return bool(getattr(optimizer, "_coalesce_grad_reduction", False))


def unsynchronised(engine: Any) -> bool:
    """Inside engine.no_sync(), which ZeRO-1 has: gradients stay local until a backward behind it."""
    return bool(getattr(engine, "inside_no_sync_ctxt", False))


def steps_now(engine: Any) -> bool:
    """Whether engine.step(), called now, would move the parameters."""
    managed = getattr(engine, "managed_gradient_accumulation", None)  # newer versions; if not, every step is the caller's word
    return (managed is not None and not managed()) or bool(engine.is_gradient_accumulation_boundary())


# ---- gradients over several microbatches ------------------------------------------------------------------------------
def holds_gradients(engine: Any) -> bool:
    """Whether the optimizer has gradients of earlier microbatches. Asked between a forward and its backward, or later."""
    optimizer = engine.optimizer
    if coalescing(optimizer) and any(param.grad is not None for param in engine.module.parameters()):
        return True
    first = 0 if int(engine.zero_optimization_stage()) == 3 else -1
    return int(optimizer.micro_step_id) > first


def forget_gradients(engine: Any) -> None:
    """Between steps: as after an optimizer step, with a new accumulation to begin. `engine.zero_grad` alone clears param.grad,
    neither what ZeRO has reduced nor its counters."""
    optimizer = engine.optimizer
    engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
    if hasattr(engine, "_unmanaged_backward_count"):  # newer versions
        engine._unmanaged_backward_count = 0
    optimizer.zero_grad()
    for flag in ("_backward_active_depth", "_epilogue_ran_this_backward"):  # newer versions
        if hasattr(optimizer, flag):
            setattr(optimizer, flag, 0)
    reduced = optimizer.params_already_reduced
    for key in reduced if isinstance(reduced, dict) else range(len(reduced)):
        reduced[key] = False
    optimizer.averaged_gradients = {}
    if int(engine.zero_optimization_stage()) == 3:
        forget_broken_backward(optimizer)
        if optimizer.grad_partitions_flat_buffer is not None:
            optimizer.grad_partitions_flat_buffer.zero_()
        return
    optimizer.all_grad_tensors = {}
    optimizer.micro_step_id = -1
    optimizer.extra_large_param_to_reduce.clear()
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
    optimizer._release_ipg_buffers()


class GradientHooks:
    """Finds hooks of the user's on gradients of parameters. They want this rank's whole gradient before it is reduced, and of a
    layer computed by slices that is nowhere."""

    def __init__(self, optimizer: Any) -> None:
        self._own = {handle.id for handle in getattr(optimizer, "_grad_acc_hooks", ())}  # DeepSpeed's

    def on(self, param: torch.Tensor) -> bool:
        if param._backward_hooks:
            return True
        return any(key not in self._own for key in getattr(param, "_post_accumulate_grad_hooks", None) or ())


# ---- streams of an accelerator ---------------------------------------------------------------------------------------
# [Note: Streams that gradients pass]
# A reduced gradient is delivered on a stream of CommFuse's (engine/ordering.py); compute has joined that one when a backward's
# gradients are collected. DeepSpeed has streams of its own, which wait for compute only where stock DeepSpeed needs it:
#
#   CommFuse's   | sum, partition_grads: copy or add to the partition's buffer |
#   compute                                                     join ^|  epilogue ... norm, unscale, optimizer
#   DeepSpeed's  | the same, for what is not fused |     after_current |  has_overflow: reads the buffers of all   (ZeRO-3)
#   DeepSpeed's  | reduces its buckets, if other code reads a weight | see_reductions: compute adds to it          (ZeRO-1, 2)
#
# * ZeRO-3 looks for inf and nan on its stream, not behind compute: `after_current` orders it there, once a backward.
# * A weight that other code reads gets gradients from both streams in one microbatch: `sum_partitions` orders each delivery
#   behind the one before.
_STREAMS = ("reduce_and_partition_stream", "reduction_stream")


def accelerator() -> Any:
    return importlib.import_module("deepspeed.accelerator").get_accelerator()


def _own_streams(optimizer: Any) -> list[Any]:
    """Streams on which an optimizer works beside the current one; none on a CPU."""
    found = [getattr(optimizer, name, None) for name in _STREAMS]
    return [] if accelerator().is_synchronized_device() else [stream for stream in found if stream is not None]


def after_current(optimizer: Any) -> None:
    """What the optimizer does on its own streams from now on sees what the current one has been given."""
    for stream in _own_streams(optimizer):
        stream.wait_stream(accelerator().current_stream())


def see_reductions(optimizer: Any) -> None:
    """The current stream sees what the optimizer has been given to do on its own ones."""
    for stream in _own_streams(optimizer):
        accelerator().current_stream().wait_stream(stream)


# ---- ZeRO-3 ----------------------------------------------------------------------------------------------------------
# [Note: Weights that other code reads]
# DeepSpeed fetches a module's own parameters before its forward and backward, and those of other modules that its forward reads
# ("external" ones, found when they are first read). What CommFuse serves is left out of the first, not of the second: so
# whoever reads the weight of a served layer gets it as in stock DeepSpeed, gathered whole around the reader's forward and
# backward, and its gradient from there comes by DeepSpeed's way, to be added to the layer's own (`sum_partitions`).
class Unfetched:
    """Marks a parameter that DeepSpeed need not fetch for the module that CommFuse serves with it; for a shallow copy of that
    module it must. `reader`: called once, when other code reads it."""

    def __init__(self, module: nn.Module, reader: Callable[[], None]) -> None:
        self._module = weakref.ref(module)
        self._reader: Callable[[], None] | None = reader

    def passes_over(self, param: nn.Parameter, module: nn.Module) -> bool:
        """Whether `module`, which uses the parameter, needs it not."""
        if self._module() is module and id(param) not in vars(module).get("_external_params", {}):
            return True
        reader, self._reader = self._reader, None
        if reader is not None:
            reader()
        return False


def fetch_obstacle() -> str | None:
    """Why DeepSpeed cannot be kept from fetching what CommFuse serves."""
    for name in _FETCHERS:
        if not hasattr(importlib.import_module(name), "iter_params"):
            return f"deepspeed {version()}: {name} has no iter_params"
    return None


def _pass_over() -> Callable[[], object]:
    originals = {name: importlib.import_module(name).iter_params for name in _FETCHERS}
    transaction = Transaction()
    for name, original in originals.items():

        def iter_params(
            module: nn.Module, recurse: bool = False, _original: Callable[..., Iterable[Any]] = original
        ) -> Iterable[Any]:
            params = _original(module, recurse=recurse)
            if recurse:  # to release whatever has been gathered; or a leaf module, of which nothing is served
                return params
            return [param for param in params if not _passed_over(param, module)]

        transaction.set(vars(importlib.import_module(name)), "iter_params", iter_params)
    return transaction.roll_back


def _passed_over(param: nn.Parameter, module: nn.Module) -> bool:
    mark = getattr(param, _UNFETCHED, None)
    return mark is not None and mark.passes_over(param, module)


_passing_over = Shared(_pass_over)


def leave_unfetched(
    transaction: Transaction, user: object, weights: Iterable[tuple[nn.Module, nn.Parameter, Callable[[], None]]]
) -> None:
    """Make DeepSpeed pass over these parameters when it fetches those of these modules. user: whose life ends it.

    Each comes with what is called once, when other code reads it."""
    _passing_over.use(transaction, user)
    for module, param, reader in weights:
        transaction.set(vars(param), _UNFETCHED, Unfetched(module, reader))


def external_parameters(model: nn.Module) -> set[int]:
    """id(param) of all that was given to deepspeed.zero.register_external_parameter. ZeRO-3 marks them at first use only."""
    return {id(param) for module in model.modules() for param in vars(module).get("_external_params", {}).values()}


def numel(param: nn.Parameter) -> int:
    """Of the whole parameter, partitioned or not."""
    return int(getattr(param, "ds_numel", param.numel()))


def is_kept_whole(param: nn.Parameter) -> bool:
    """By stage3_param_persistence_threshold."""
    return bool(getattr(param, "ds_persist", False))


def partition_obstacle(param: nn.Parameter, device: torch.device, group: dist.ProcessGroup) -> str | None:
    """Why a parameter of a ZeRO-3 engine cannot be served out of its partitions."""
    lacking = [name for name in _PARAM_NAMES if not hasattr(param, name)]
    if lacking:
        return f"it is not partitioned by ZeRO-3 (it lacks {lacking[0]})"
    if is_kept_whole(param):
        return "kept whole on every rank (stage3_param_persistence_threshold)"
    if getattr(param, "is_external_param", False):
        return "registered as an external parameter"
    if hasattr(param, "ds_z3_leaf_module"):
        return "it belongs to a ZeRO-3 leaf module"
    if getattr(param, "ds_secondary_tensor", None) is not None:
        return "it has a secondary partition (hpZ)"
    shard = param.ds_tensor  # type: ignore[attr-defined]
    if hasattr(shard, "ds_quant_scale"):
        return "its partition is quantised"
    if str(getattr(shard, "final_location", None)).lower().endswith(("nvme", "cpu")) or shard.device.type != device.type:
        return f"its partition is offloaded ({shard.device})"
    own = getattr(param, "ds_process_group", None)
    if own is not None and dist.get_process_group_ranks(own) != dist.get_process_group_ranks(group):
        return "it is partitioned over another group of ranks"
    return None


def whole_shape(param: torch.Tensor) -> tuple[int, ...]:
    """Of a parameter of any stage."""
    return tuple(getattr(param, "ds_shape", param.shape))


def travelling_dtype(param: torch.Tensor) -> torch.dtype:
    """Dtype in which ZeRO-3 gathers a parameter, and in which its gradient travels if no other is asked for: under the block
    "torch_autocast" that of autocast, if its module is in the list there; else its own."""
    found = getattr(param, "comm_dtype", None)
    return found if isinstance(found, torch.dtype) else param.dtype


def reduced_dtype(zero: Any, param: torch.Tensor) -> torch.dtype:
    """Dtype in which DeepSpeed reduces a gradient: as ZeRO's optimizer says, or the engine where there is none (stage 0, and
    stage 1 with `"immediate_grad_update": false`, whose BF16_Optimizer inherits the method but not what it returns)."""
    says = hasattr(zero.optimizer, "communication_data_type")
    found: torch.dtype = zero.optimizer.get_param_comm_dtype(param) if says else zero.communication_data_type
    return found


def partition(param: torch.Tensor, real: int) -> torch.Tensor:
    """This rank's elements of the flattened parameter, without padding: 1-D, `real` elements."""
    return param.ds_tensor.data.view(-1)[:real]  # type: ignore[attr-defined]


def accumulate_partition(optimizer: Any, param: torch.Tensor, grad: torch.Tensor) -> None:
    """Hand a reduced gradient of this rank's partition to ZeRO-3: set in the first microbatch, added in the others."""
    waiting, param.grad = param.grad, None  # of other code that reads the weight: in a bucket, not reduced yet
    optimizer.partition_grads([param], [grad])
    param.grad = waiting


def sum_partitions(transaction: Transaction, optimizer: Any) -> Callable[[], None]:
    """Have ZeRO-3 add up the gradients that a partition gets in one microbatch. Returns what says that a microbatch begins.

    In the first microbatch it overwrites, as autograd gives it one gradient a backward. Layers served here deliver one for each
    forward, and DeepSpeed one more if other code reads the weight.
    """
    original = optimizer.partition_grads
    delivered: dict[int, torch.Tensor] = {}  # id(param) -> where its gradient lies
    passed: dict[int, Any] = {}  # id(param) -> event behind that delivery; on an accelerator, for what is fused

    @functools.wraps(original)
    def partition_grads(params: list[nn.Parameter], grads: list[torch.Tensor]) -> list[torch.Tensor]:
        buffers: list[torch.Tensor] = []
        for param, grad in zip(params, grads, strict=True):
            earlier = delivered.get(id(param))
            if id(param) in passed:
                accelerator().current_stream().wait_event(passed[id(param)])
            if earlier is not None and optimizer.micro_step_id == 0:
                grad = earlier.view(grad.shape) + grad
            got = original([param], [grad])  # empty if this rank's partition is
            if got:
                delivered[id(param)] = got[0]
                if getattr(param, _UNFETCHED, False) and not accelerator().is_synchronized_device():
                    passed[id(param)] = accelerator().current_stream().record_event()
            buffers += got
        return buffers

    transaction.set(vars(optimizer), "partition_grads", partition_grads)

    def begin() -> None:
        delivered.clear()
        passed.clear()

    return begin


def forget_broken_backward(optimizer: Any) -> None:
    """Between a backward that was broken off by an exception and the next forward: drop the gradients that ZeRO-3 had taken
    into its buckets, but not reduced. They would meet those of the next backward, which it does not allow.

    Stock DeepSpeed gets away with it if its buckets overflow in between; without the gradients of fused layers they may not.
    """
    for bucket in optimizer.ipg_buckets.values():
        for param in bucket.params:
            param.grad = None
        bucket.clear_params()
