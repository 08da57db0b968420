"""The variants that are timed against each other: each owns a model of the same seed and an optimizer, and makes steps.

| name | parameters | communication |
| --- | --- | --- |
| compute | replicated; the optimizer sees its 1/N shard only, as in sharded data parallel | none |
| fsdp2 | `fully_shard` per layer and root, defaults | stock |
| fsdp2-best | the fastest of FSDP2's public settings here, found by `search.best_fsdp2` | stock |
| fsdp2-symm, fsdp2-rs-group | as fsdp2, with one more of its settings: cuda_variants.py | stock |
| ddp | replicated | stock, fastest bucket size, found by `search.best_ddp` |
| commfuse | as fsdp2, then `commfuse_dp.apply` | fused |
| commfuse-unfused | the same with fuse="never" | CommFuse's collectives without fusion |
| commfuse-flat | the same with order="pairwise" | CommFuse without the hierarchical order |
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from benchmarks.case import BenchmarkError, Case
from benchmarks.models import Batch, Task, build
from commfuse_dp.config import CommFuseConfig


def gathered_bytes(module: nn.Module, case: Case) -> int:
    """Of the whole parameters in the dtype that they are gathered in; a sharded parameter's numel counts all ranks' shards."""
    return sum(p.numel() * (2 if case.precision == "bf16" else p.element_size()) for p in module.parameters())


def window_bytes(case: Case, task: Task) -> int | None:
    """What CommFuse may fetch ahead; None: its default. Of a large model that would hold no layer: there it is what FSDP2 holds
    in any case, the layer that computes and the next one; at least the largest parameter."""
    if case.prefetch_bytes is not None or task.fill is None:
        return case.prefetch_bytes
    largest = max(gathered_bytes(layer, case) for layer in task.layers)
    single = max(gathered_bytes(module, case) for module in task.model.modules() if not list(module.children()))
    return max(2 * largest, single, CommFuseConfig().prefetch_bytes)


class Variant:
    """One model and its optimizer; `step` is what a user's loop does. Subclasses set up communication."""

    def __init__(self, name: str, case: Case, batches: list[Batch]) -> None:
        self.name, self.case, self.batches = name, case, batches
        self.notes: dict[str, Any] = {}
        self.losses: list[torch.Tensor] = []
        self.task: Task = build(case)
        self.module: nn.Module = self.task.model
        self.prepare()
        self.optimizer = self.make_optimizer(list(self.module.parameters()))

    def prepare(self) -> None:
        """Shard or wrap the model."""

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4, fused=True if self.case.optimizer == "fused" else None)

    def step(self) -> None:
        loss = self.task.loss(self.module, self.batches[len(self.losses) % len(self.batches)])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def measured(self) -> contextlib.AbstractContextManager[object]:
        """Entered around timed blocks."""
        return contextlib.nullcontext()

    def exposed_ns(self) -> int | None:
        """Nanoseconds that compute was blocked on communication, since the beginning; None if it cannot be observed."""
        return 0

    def end(self) -> tuple[int, int] | None:
        """Of the last step: see observe/skew.py. None if it cannot be observed."""
        return None

    def fill(self) -> None:
        """Give a model that was made without memory its weights. Called once it is sharded."""
        if self.task.fill is not None:
            self.task.fill(dist.get_rank(), dist.get_world_size())

    def finish(self) -> None:
        """Called after the last block: collect closing notes, let go of resources."""


class Compute(Variant):
    """The step without communication; the yardstick of every other variant. In bf16 the optimizer has its shard in fp32."""

    def __init__(self, case: Case, batches: list[Batch], rank: int) -> None:
        self.rank = rank
        super().__init__("compute", case, batches)

    def prepare(self) -> None:
        self.fill()

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        # In fp32 these are views: a step changes the model.
        self.shards = [nn.Parameter(self._own(p.detach()).float()) for p in parameters]
        if self.case.precision == "bf16":
            self.module.to(torch.bfloat16)
        self.full = list(self.module.parameters())
        return super().make_optimizer(self.shards)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows, by FSDP2's rule: chunks of ceil(rows / N), the last ones short or empty."""
        chunks = tensor.chunk(self.case.world_size)
        return chunks[self.rank] if self.rank < len(chunks) else tensor[:0]

    def step(self) -> None:
        loss = self.task.loss(self.module, self.batches[len(self.losses) % len(self.batches)])
        loss.backward()
        for full, shard in zip(self.full, self.shards, strict=True):
            shard.grad = None if full.grad is None else self._own(full.grad).float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for full, shard in zip(self.full, self.shards, strict=True):
            full.grad = None
            if full.dtype != shard.dtype:
                self._own(full.detach()).copy_(shard.detach())
        self.losses.append(loss.detach())


class Fsdp2(Variant):
    """`fully_shard` with one of FSDP2's public settings.

    `grouping`: what is gathered at once ("linear", "layer", "two-layers", "model"); `prefetch`: explicit prefetch lists in
    both directions; `keep_last`: the last groups stay gathered between forward and backward, which needs them first: as many
    as fit into the memory that CommFuse may use for the same (`prefetch_bytes`), at least one.
    """

    def __init__(
        self,
        name: str,
        case: Case,
        batches: list[Batch],
        *,
        grouping: str = "layer",
        prefetch: bool = False,
        keep_last: bool = False,
    ) -> None:
        self.grouping, self.prefetch, self.keep_last = grouping, prefetch, keep_last
        self._meter: Any = None
        super().__init__(name, case, batches)
        self.notes["settings"] = {"grouping": grouping, "prefetch": prefetch, "keep_last": keep_last}

    def groups(self) -> list[list[nn.Module]]:
        layers = self.task.layers
        if self.grouping == "linear":
            return [[module] for layer in layers for module in layer.modules() if isinstance(module, nn.Linear)]
        if self.grouping == "two-layers":
            return [layers[i : i + 2] for i in range(0, len(layers), 2)]
        return [] if self.grouping == "model" else [[layer] for layer in layers]

    def groups_kept(self, groups: list[list[nn.Module]]) -> int:
        """How many trailing groups fit into the window, at least one."""
        room = window_bytes(self.case, self.task) or CommFuseConfig().prefetch_bytes
        count = 0
        for modules in reversed(groups):
            room -= sum(gathered_bytes(module, self.case) for module in modules)
            if room < 0:
                break
            count += 1
        return max(1, count)

    def mesh(self) -> DeviceMesh:
        return init_device_mesh(self.case.device, (self.case.world_size,))

    def prepare(self) -> None:
        options: dict[str, Any] = {"mesh": self.mesh()}
        if self.case.precision == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        groups = self.groups()
        kept = self.groups_kept(groups) if self.keep_last else 0
        for i, modules in enumerate(groups):
            last = i >= len(groups) - kept
            what = modules if len(modules) > 1 else modules[0]
            fully_shard(what, reshard_after_forward=not (self.case.keep or last), **options)
        # The root keeps its default, except where it holds everything: that would be the bytes (and memory) of another class.
        fully_shard(self.module, reshard_after_forward=(not self.case.keep) if self.grouping == "model" else None, **options)
        if self.prefetch:
            heads = [modules[0] for modules in groups]
            for one, other in itertools.pairwise(heads):
                assert isinstance(one, FSDPModule) and isinstance(other, FSDPModule)
                one.set_modules_to_forward_prefetch([other])
                other.set_modules_to_backward_prefetch([one])
        self.fill()

    def measured(self) -> contextlib.AbstractContextManager[object]:
        if self.case.device != "cpu":
            return contextlib.nullcontext()
        from commfuse_dp.observe.stock import StockMeter

        self._meter = self._meter or StockMeter()
        return self._meter

    def exposed_ns(self) -> int | None:
        return self._meter.probe.counters.exposed_ns if self._meter is not None else None

    def end(self) -> tuple[int, int] | None:
        return self._meter.probe.step_end if self._meter is not None else None


class Ddp(Variant):
    """DistributedDataParallel over a communicator of its own."""

    def __init__(self, name: str, case: Case, batches: list[Batch], *, bucket_mb: int = 25, static_graph: bool = True) -> None:
        self.bucket_mb, self.static_graph = bucket_mb, static_graph
        super().__init__(name, case, batches)
        self.notes["settings"] = {"bucket_mb": bucket_mb, "static_graph": static_graph, "gradient_as_bucket_view": True}

    def prepare(self) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self.fill()
        self.module = DistributedDataParallel(
            self.task.model, bucket_cap_mb=self.bucket_mb, static_graph=self.static_graph, gradient_as_bucket_view=True
        )

    def exposed_ns(self) -> int | None:
        return None  # the reducer waits inside the C++ autograd engine


class CommFuse(Fsdp2):
    """FSDP2 with its defaults, then the one line that a user adds."""

    def __init__(self, name: str, case: Case, batches: list[Batch], *, fuse: str, order: str) -> None:
        self.fuse, self.order = fuse, order
        super().__init__(name, case, batches)

    def prepare(self) -> None:
        super().prepare()
        try:
            import commfuse_dp

            apply = commfuse_dp.apply
        except (ImportError, AttributeError) as error:
            raise BenchmarkError(f"variant {self.name!r} needs commfuse_dp.apply, which cannot be imported: {error}") from error
        case = self.case
        settings: dict[str, Any] = {
            "transport": case.transport,
            "order": self.order,
            "kernels": case.kernels,
            "fuse": self.fuse,
        }
        window = window_bytes(case, self.task)
        if window is not None:
            settings["prefetch_bytes"] = window
        self.report = apply(self.module, CommFuseConfig(deadline_s=case.deadline_s, **settings))

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        self.report.probe.watch()
        try:
            yield
        finally:
            self.report.probe.unwatch()

    def exposed_ns(self) -> int | None:
        """On a GPU an upper bound (device/timing.py); None where the transport waits on the host for what streams wait for."""
        probe = self.report.probe
        probe.settle()
        return probe.counters.exposed_ns if self.case.device == "cpu" or probe.timing is not None else None

    def end(self) -> tuple[int, int] | None:
        return self.report.probe.step_end

    def finish(self) -> None:
        import commfuse_dp

        counters = self.report.probe.counters
        self.notes["transport"] = self.report.transport
        self.notes["transport_reason"] = self.report.transport_reason
        self.notes["window_bytes_peak"] = counters.window_bytes_peak
        self.notes["order_misses"] = counters.order_misses
        self.notes["report_minimum_bytes"] = self.report.minimum_bytes_per_step
        commfuse_dp.remove(self.module)
