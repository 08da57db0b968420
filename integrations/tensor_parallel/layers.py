"""What a served layer does in place of its style's hook and of its own forward.

| module | hook, before | hook, now | forward, now |
| --- | --- | --- | --- |
| PrepareModuleInput | gathers x | hands on a stand-in for the gathered x | its own |
| Colwise inside of it | x is replicated | lets the stand-in pass | the group's: one gather, all members' GEMMs by slices |
| Colwise by itself | gathers x | hands on a stand-in | likewise, a group of one |
| Rowwise | x is sharded by features | takes the local part | GEMM by slices, each sent as it is computed |

(Colwise of a replicated x: replicated.py.)

The hooks behind a forward stay: they get a DTensor that already is what they make. What comes in another way than the style
expects (a DTensor of another layout, weights of others) goes the framework's own way. In graphs of torch.compile the layers are
registered ops, and traced.py has what stands for the gathered x.
"""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from commfuse_dp.integrations.attach.forwards import Hook
from commfuse_dp.integrations.tensor_parallel.compat import Style, hooked
from commfuse_dp.integrations.tensor_parallel.select import Group, Member
from commfuse_dp.integrations.tensor_parallel.stand_in import StandIn
from commfuse_dp.integrations.tensor_parallel.traced import hand_on, traced
from commfuse_dp.integrations.tensor_parallel.units import holds_unit, sharded_weights, stock_forward, unit_layer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from commfuse_dp.collectives.arguments import even_sizes
from commfuse_dp.collectives.end_of_backward import in_backward
from commfuse_dp.config import CommFuseConfig
from commfuse_dp.errors import MismatchError
from commfuse_dp.ops.gathered import ShardedWeights
from commfuse_dp.ops.operands import register_operand
from commfuse_dp.ops.sequence.column_parallel import column_parallel_of
from commfuse_dp.ops.sequence.row_parallel import row_parallel_of
from commfuse_dp.ops.sequence.rows import GraphPlace, Layout, Place, exchange_lengths, place_of
from commfuse_dp.transport.base import Transport

Own = Callable[[nn.Module | None, int, DeviceMesh], tuple[torch.Tensor | None, torch.Tensor | None]]


class Input(Protocol):
    """Of column-parallel layers. local: what this rank has. sizes: positions of every rank; None: all have all."""

    @property
    def local(self) -> torch.Tensor: ...

    @property
    def sizes(self) -> tuple[int, ...] | None: ...


class Over:
    """Over what the served layers of a model communicate, and how."""

    def __init__(self, transport: Transport, config: CommFuseConfig) -> None:
        self.transport, self.config = transport, config
        self.order = "ring" if config.order == "ring" else "pairwise"
        self.world_size = transport.world_size
        self.gathered_inputs: dict[str, int] = {}  # group -> how often its input was needed whole

    @property
    def options(self) -> dict[str, Any]:
        return {"transport": self.transport, "slices_per_rank": self.config.slices_per_rank, "order": self.order}


class Division(Over):
    """How the sequence of the forward under way is divided among the ranks.

    It is exchanged at the first gather of the root's forward; a layer that is called outside of that, or again in a backward
    (activation checkpointing), exchanges anew, for other sequences may have come in between."""

    def __init__(self, transport: Transport, config: CommFuseConfig, stock_gathers: Sequence[str]) -> None:
        super().__init__(transport, config)
        self._stock_gathers = list(stock_gathers)
        self._lengths: tuple[int, ...] | None = None
        self._in_root = False

    def enter(self) -> None:
        self._in_root, self._lengths = True, None

    def leave(self) -> None:
        self._in_root = False

    def of(self, name: str, local: torch.Tensor, dim: int) -> tuple[int, ...]:
        """Positions of all ranks, where this rank has local.shape[dim]."""
        positions = int(local.shape[dim])
        known = self._lengths
        if not self._in_root or in_backward() or known is None or known[self.transport.rank] != positions:
            known = self._lengths = exchange_lengths(name, self.transport, local, dim)
            if len(set(known)) > 1 and self._stock_gathers:
                raise MismatchError(
                    f"{name}: the ranks have {list(known)} positions of the sequence. Sequences that do not divide evenly are "
                    "served only if every gather of the model is; these stay with DTensor, which cannot do it: "
                    f"{', '.join(self._stock_gathers)}. Pad the sequence, or see the report for what these layers need."
                )
        return known

    def divided(self, length: int) -> tuple[int, ...]:
        """Positions that every rank keeps of a result with `length` of them."""
        if torch.compiler.is_compiling():  # what was exchanged outside of a graph is not known in it
            return even_sizes(length, self.world_size)
        if self._lengths is not None and sum(self._lengths) == length:
            return self._lengths
        return even_sizes(length, self.world_size)


class ServedLayer:
    """What is served as one: a group of column-parallel layers, or a row-parallel one."""

    takes_units = True  # weights that data parallelism shards as well, by slices
    sharded_dim: int  # of its weights
    mesh: DeviceMesh

    def __init__(self, name: str, over: Over) -> None:
        self.name, self._over = name, over
        number = torch.tensor(register_operand(self), device="cpu")
        self.in_graphs = GraphPlace(number, over.transport.rank, over.world_size)

    @property
    def place(self) -> Place:
        """Where a graph finds it: see ops/sequence/graph_ops.py."""
        over = self._over
        return place_of(None, over.transport, over.order, over.config.slices_per_rank, self.name)


class Columns(ServedLayer):
    """Column-parallel layers that share one gather."""

    sharded_dim = 0

    def __init__(self, name: str, over: Over, members: Sequence[nn.Module], mesh: DeviceMesh) -> None:
        super().__init__(name, over)
        self._members = [weakref.ref(member) for member in members]
        self.mesh = mesh

    def holds_own(self) -> bool:
        """`functional_call` may have put other weights in."""
        return all(holds_own(member(), 0, self.mesh) for member in self._members)

    def parameters(
        self, members: Sequence[nn.Module | None], own: Own | None = None
    ) -> tuple[ShardedWeights | None, list[torch.Tensor], list[torch.Tensor | None]]:
        """(what is sharded by data parallelism, too; weights; biases). own: in place of `own_parameters`."""
        sharded = sharded_weights(members)
        if sharded is not None:
            return sharded, list(sharded.weights), list(sharded.biases)
        take = own_parameters if own is None else own
        weights, biases = zip(*(take(member, 0, self.mesh) for member in members), strict=True)
        return None, list(weights), list(biases)

    def compute(
        self,
        input: Input,
        dim: int,
        own: Own | None = None,
        *,
        modules: Sequence[nn.Module] | None = None,
        layout: Layout = "sharded",
    ) -> tuple[torch.Tensor, ...]:
        """Outputs of all members, or of these modules. own: what one computes with, in place of `own_parameters`."""
        members = [member() for member in self._members] if modules is None else modules
        sharded, weights, biases = self.parameters(members, own)
        return column_parallel_of(
            self.name,
            input.local,
            weights,
            biases,
            dim=dim,
            sizes=input.sizes,
            save=self._over.config.save_activations,
            layout=layout,
            sharded=sharded,
            served=self.in_graphs,
            **self._over.options,
        )


# ---- hooks -----------------------------------------------------------------------------------------------------------
class StyleHook(Hook, ABC):
    """In place of a style's hook of one module. Copies of the module have the style's own."""

    def __init__(self, module: nn.Module, style: Style) -> None:
        self._module = weakref.ref(module)
        self._stock = style.hook
        self.hook_id = style.hook_id

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        return self.run(module, args) if module is self._module() else self._stock(module, args)

    def stock(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """What the style's hook makes of it."""
        return self._stock(module, tuple(arg.whole() if type(arg) is StandIn else arg for arg in args))

    @abstractmethod
    def run(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Of the module itself."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self._stock

    def __reduce__(self) -> Any:
        raise TypeError("a module with hooks of torch.distributed.tensor.parallel cannot be pickled")


class GatherHook(StyleHook):
    """Of a group: hands on a stand-in for the gathered input."""

    def __init__(self, group: ColumnGroup) -> None:
        super().__init__(group.holder, group.style)
        self._group = group

    def run(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        group = self._group
        layouts = group.style.inputs
        x = args[group.position] if len(args) > group.position else None
        if len(args) != len(layouts) or hooked([reference() for reference in group.way]) or not group.takes(x):
            return self.stock(module, args)
        given = [arg for arg, layout in zip(args, layouts, strict=True) if layout is not None]
        if not all(isinstance(arg, torch.Tensor) and type(arg) is not StandIn for arg in given):
            return self.stock(module, args)
        pairs = enumerate(zip(args, layouts, strict=True))
        return tuple(arg if layout is None else group.input(at, arg) for at, (arg, layout) in pairs)


class PassHook(StyleHook):
    """Of a member inside of a group's module: its input is a stand-in already."""

    def run(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        known = traced(args[0]) is not None if torch.compiler.is_compiling() else type(args[0]) is StandIn
        return None if known else self.stock(module, args)


class NormHook(StyleHook):
    """Of a LayerNorm, on a rank that has no positions: DTensor takes the input to have none anywhere, and replicates it."""

    def __init__(self, module: nn.Module, style: Style) -> None:
        super().__init__(module, style)
        self._mesh, self._layouts = style.mesh, style.inputs

    def run(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        x, layout = args[0], self._layouts[0]
        if not isinstance(layout, Shard) or not isinstance(x, torch.Tensor) or isinstance(x, StandIn) or x.dim() <= layout.dim:
            return self.stock(module, args)
        local = x.to_local() if isinstance(x, DTensor) and x.placements == (layout,) else x
        if isinstance(local, DTensor) or local.shape[layout.dim] > 0:
            return self.stock(module, args)
        # How many there are elsewhere matters to nothing: each is computed by itself.
        return (as_dtensor(local, self._mesh, layout.dim, self._mesh.size()), *args[1:])


class FeaturesHook(StyleHook):
    """Of a row-parallel layer: its own features."""

    def __init__(self, module: nn.Module, style: Style) -> None:
        super().__init__(module, style)
        self._mesh = style.mesh

    def run(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        x = args[0]
        if hooked((module,)) or not holds_own(module, 1, self._mesh):
            return self.stock(module, args)
        if isinstance(x, DTensor):
            last = (Shard(x.dim() - 1),), (Shard(-1),)
            return (x.to_local(), *args[1:]) if x.placements in last else self.stock(module, args)
        return None if isinstance(x, torch.Tensor) and type(x) is not StandIn else self.stock(module, args)


# ---- columns ---------------------------------------------------------------------------------------------------------
class ColumnGroup(Columns):
    """Inside of a module whose hook gathers, or one by itself."""

    def __init__(self, group: Group, division: Division) -> None:
        super().__init__(group.name, division, [member.module for member in group.members], group.style.mesh)
        self._module, self._division = weakref.ref(group.module), division
        self.style, self.position = group.style, group.position
        self.alone = group.members[0].module is group.module
        members = {id(member.module) for member in group.members}
        holders = (module for module in group.module.modules() if not members.isdisjoint(map(id, module.modules())))
        self.way = [weakref.ref(module) for module in holders]  # that the stand-in goes to the members

    @property
    def holder(self) -> nn.Module:
        module = self._module()
        assert module is not None
        return module

    @property
    def _dim(self) -> int:
        layout = self.style.inputs[self.position]
        assert isinstance(layout, Shard)
        return layout.dim

    def takes(self, x: Any) -> bool:
        """Whether x is laid out as the style expects: this rank's shard."""
        if isinstance(x, DTensor):
            return x.placements == (Shard(self._dim),) and x.device_mesh == self.mesh and self.holds_own()
        return isinstance(x, torch.Tensor) and type(x) is not StandIn and x.dim() > self._dim + 1 and self.holds_own()

    def input(self, at: int, x: torch.Tensor) -> torch.Tensor:
        """What stands for the gathered x. Another one of the module's inputs is not moved, only told how it is laid out."""
        if at != self.position:
            layout = self.style.inputs[at]
            assert layout is not None
            known = x if isinstance(x, DTensor) else DTensor.from_local(x, self.mesh, (layout,), run_check=False)
            return known.to_local() if self.style.local_output else known
        local = x.to_local() if isinstance(x, DTensor) else x
        if torch.compiler.is_compiling():
            return hand_on(local, self._dim, self, self.in_graphs, self.mesh, local_output=self.style.local_output)
        return self._stand_in(local)

    def _stand_in(self, local: torch.Tensor) -> StandIn:
        dim = self._dim
        sizes = self._division.of(self.name, local, dim)
        shape = (*local.shape[:dim], sum(sizes), *local.shape[dim + 1 :])

        def gather() -> torch.Tensor:
            counts = self._division.gathered_inputs
            counts[self.name] = counts.get(self.name, 0) + 1
            return self._stock_gather(local, shape)

        stand_in = StandIn(local, shape, gather)
        stand_in.group, stand_in.sizes = self, sizes
        return stand_in

    def _stock_gather(self, local: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """As the framework does; its input may be uneven, which it takes if it is told the whole shape."""
        layout = (Shard(self._dim),)
        sharded = DTensor.from_local(
            local, self.mesh, layout, run_check=False, shape=torch.Size(shape), stride=_dense_strides(shape)
        )
        whole = sharded.redistribute(placements=(Replicate(),))
        return whole.to_local() if self.style.local_output else whole

    def forward(self, module: nn.Module, input: torch.Tensor) -> torch.Tensor:
        """A member's."""
        if torch.compiler.is_compiling():
            return self._in_graph(module, input)
        if not isinstance(input, StandIn):
            return stock_forward(module, input)
        if input.group is not self:
            return stock_forward(module, replicated(input.whole(), self.mesh))
        if input.outputs is None:
            ys = self.compute(input, self._dim)
            input.outputs = {id(member()): y for member, y in zip(self._members, ys, strict=True)}
        y = input.outputs.pop(id(module), None)
        if y is None:  # called a second time with the same input
            return stock_forward(module, replicated(input.whole(), self.mesh))
        return as_dtensor(y, self.mesh, y.dim() - 1, module.out_features)  # type: ignore[arg-type]

    def _in_graph(self, module: nn.Module, input: torch.Tensor) -> torch.Tensor:
        found = traced(input, self)
        if found is None:
            return stock_forward(module, replicated(input, self.mesh))
        if found.outputs is None:
            found.outputs = self.compute(found, self._dim)
        (y,) = [y for y, member in zip(found.outputs, self._members, strict=True) if member() is module]
        return as_dtensor(y, self.mesh, y.dim() - 1, module.out_features)  # type: ignore[arg-type]


# ---- rows ------------------------------------------------------------------------------------------------------------
class RowLayer(ServedLayer):
    """A row-parallel layer whose output is sharded along the sequence, or summed up for all ranks."""

    sharded_dim = 1

    def __init__(self, member: Member, division: Division) -> None:
        super().__init__(member.name, division)
        self._division = division
        layout = member.style.outputs[0]
        self._dim = layout.dim if isinstance(layout, Shard) else None
        self.mesh = member.style.mesh

    def forward(self, module: nn.Module, input: torch.Tensor) -> torch.Tensor:
        sharded = None
        weight = bias = None
        if not isinstance(input, DTensor):
            sharded = sharded_weights([module])
            if sharded is not None:
                weight, bias = sharded.weights[0], sharded.biases[0]
            else:
                weight, bias = own_parameters(module, 1, self.mesh)
        if weight is None or input.dim() < (self._dim or 0) + 2 or input.shape[-1] != weight.shape[1]:
            features = () if isinstance(input, DTensor) else (Shard(-1),)
            stock = DTensor.from_local(input, self.mesh, features, run_check=False) if features else input
            return stock_forward(module, stock)
        if self._dim is None:
            how: dict[str, Any] = {"dim": 0, "sizes": None, "layout": "replicated"}
        else:
            length = int(input.shape[self._dim])
            how = {"dim": self._dim, "sizes": self._division.divided(length)}
        y = row_parallel_of(
            self.name,
            input,
            weight,
            bias,
            **how,
            sharded=sharded,
            served=self.in_graphs,
            **self._division.options,
        )
        return replicated(y, self.mesh) if self._dim is None else as_dtensor(y, self.mesh, self._dim, length)


# ---- parameters and layouts ------------------------------------------------------------------------------------------
def holds_own(module: nn.Module | None, dim: int, mesh: DeviceMesh) -> bool:
    """Whether a layer holds its own parameters, its weight sharded along `dim` over the mesh."""
    if module is not None and unit_layer(module) is not None:
        return holds_unit(module)
    return local_weight(module, dim, mesh) is not None


def own_parameters(module: nn.Module | None, dim: int, mesh: DeviceMesh) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """This rank's part of weight and bias, gathered over data-parallel ranks where these shard it as well."""
    unit = unit_layer(module)
    if unit is None:
        return local_weight(module, dim, mesh), local_bias(module)
    weight, *bias = unit.gathered()
    return weight, bias[0] if bias else None


def local_weight(module: nn.Module | None, dim: int, mesh: DeviceMesh) -> torch.Tensor | None:
    """This rank's part of the weight, if it is one that is sharded along `dim` over the mesh."""
    weight = None if module is None else module.weight
    if not isinstance(weight, DTensor) or weight.device_mesh != mesh or weight.placements != (Shard(dim),):
        return None
    return weight.to_local()


def local_bias(module: nn.Module | None) -> torch.Tensor | None:
    bias: Any = None if module is None else module.bias
    return bias.to_local() if isinstance(bias, DTensor) else bias


def replicated(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """`whole` is what every rank has."""
    if isinstance(whole, DTensor):
        return whole
    return DTensor.from_local(whole, mesh, (Replicate(),), run_check=False)


def as_dtensor(local: torch.Tensor, mesh: DeviceMesh, dim: int, extent: int) -> DTensor:
    """`local` is this rank's shard along `dim` of a tensor with `extent` there."""
    if torch.compiler.is_compiling() and extent == local.shape[dim] * mesh.size():  # dynamo takes constants only
        return DTensor.from_local(local, mesh, (Shard(dim),), run_check=False)
    shape = torch.Size((*local.shape[:dim], extent, *local.shape[dim + 1 :]))
    return DTensor.from_local(local, mesh, (Shard(dim),), run_check=False, shape=shape, stride=_dense_strides(shape))


@functools.lru_cache(maxsize=1024)  # every layer asks, in every step
def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()
