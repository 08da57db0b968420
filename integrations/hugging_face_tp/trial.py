"""Whether a decoder layer may run on shards of the sequence: it is tried on a few positions, all of them and some of them.

Between a row-parallel layer and the next column-parallel one a layer must compute every position by itself (norms, residuals,
scales). That is not read from the class but seen: in both runs the tensor-parallel layers answer with fixed numbers, with all
positions or with those of the shard; column-parallel layers are given the whole input, or what stands for it (`StandIn`);
experts are given tokens, which must be the shard's of the first run. The output of the second run must be the shard's positions
of the first one's. No rank waits for another here, no parameter changes.
Layers are tried as in training, where dropout shows: two runs over all positions differ. What a router draws may leave no trace
in them, but in the state of the random numbers, outside of what has all positions anyway (dropout of attention).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from commfuse_dp.integrations.attach.forwards import own_class
from commfuse_dp.integrations.attach.rules import original_type
from commfuse_dp.integrations.attach.transaction import Transaction
from commfuse_dp.integrations.hugging_face_tp.key_heads import GROUPS, PROJECTIONS
from commfuse_dp.integrations.tensor_parallel.stand_in import StandIn
from torch import nn
from torch.distributed.tensor import DTensor

from commfuse_dp.collectives.arguments import even_sizes

if TYPE_CHECKING:
    from commfuse_dp.integrations.hugging_face_tp.select import Block, Styled

_POSITIONS, _SHARD, _ALL = 5, slice(1, 3), slice(None)
INPUT = "hidden_states"  # how transformers calls the input of layers and blocks


def layer_obstacle_by_trial(
    layer: nn.Module, owner: nn.Module, blocks: Sequence[Block], experts: Sequence[Styled]
) -> str | None:
    """Why a decoder layer cannot run in shards (None: it can). owner: has the layers, and their rotary embedding."""
    served = [block for block in blocks if block.obstacle is None]
    width = width_of(served, owner)
    like = next((served[0].rows[0] if served else experts[0]).module.parameters())
    name = original_type(layer).__name__
    with _trying(like.device) as changes:
        x = _fixed(-1, width, like)
        why = "it returned no tensor"
        for tuples in (False, True) if len(served) < len(blocks) else (False,):  # what an unserved block returns
            try:
                _train(changes, layer)
                answered = [module for block in blocks for module in _answered(block)]
                _make_whole(changes, layer, [*answered, *(found.module for found in experts)])
                arguments = _arguments(layer, owner, x)
                runs = _Runs(changes, blocks, experts, tuples)
                whole, again = (runs.run(layer, x, arguments) for _ in range(2))
                if runs.drawn or (isinstance(whole, torch.Tensor) and not _close(again, whole)):
                    return f"{name} draws random numbers (dropout) between its tensor-parallel layers: shards would draw others"
                part = runs.run(layer, _part(x), arguments, sharded=True)
            except Exception as error:
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                continue
            if not isinstance(whole, torch.Tensor) or not isinstance(part, torch.Tensor):
                continue
            if part.shape == (1, 2, width) and _close(part, _part(whole)):
                return None
            return f"{name} does not compute every position of the sequence by itself between its tensor-parallel layers"
    return f"{name} could not be tried on a shard of the sequence ({why})"


def norm_obstacle_by_trial(module: nn.Module, width: int) -> str | None:
    """Why a module behind the layers cannot run in shards (None: it can)."""
    like = next(module.parameters())
    with _trying(like.device) as changes:
        x = _fixed(-1, width, like)
        try:
            _make_whole(changes, module, ())
            whole, part = (original_type(module).forward(module, rows) for rows in (x, _part(x)))  # type: ignore[attr-defined]
        except Exception as error:
            return f"it could not be tried: {type(error).__name__}: {error}"
    same = isinstance(whole, torch.Tensor) and whole.shape == x.shape and _close(part, _part(whole))
    return None if same else "it does not compute every position by itself"


def width_of(blocks: Sequence[Block], owner: nn.Module) -> int:
    """Features of a position between the parts of a decoder layer."""
    config: Any = getattr(owner, "config", None)
    return next((int(row.module.out_features) for block in blocks for row in block.rows), getattr(config, "hidden_size", 0))  # type: ignore[arg-type]


def _part(whole: torch.Tensor) -> torch.Tensor:
    """The shard's positions."""
    return whole[..., _SHARD, :]


@contextlib.contextmanager
def _trying(device: torch.device) -> Iterator[Transaction]:
    """What a layer makes is made on its device; the program keeps its random numbers. `changes` end with it."""
    changes = Transaction()
    with torch.no_grad(), torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type), device:
        try:
            yield changes
        finally:
            changes.roll_back()


def _answered(block: Block) -> list[nn.Module]:
    """Modules of the block that compute nothing in a trial."""
    if block.obstacle is not None:
        return list(block.module.modules())
    return [found.module for found in (*block.columns, *block.rows)]


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or not a.dtype.is_floating_point:
        return torch.equal(a, b)
    tolerance = 8 * torch.finfo(a.dtype).eps
    return torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance * float(b.abs().max()))


def _random_state(device: torch.device) -> torch.Tensor:
    """Of what the layer draws from."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.cat((torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device)))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _arguments(layer: nn.Module, owner: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """What transformers' models hand to a decoder layer."""
    positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
    found: dict[str, Any] = {"attention_mask": None, "position_ids": positions, "past_key_values": None, "use_cache": False}
    if "shared_kv_states" in inspect.signature(original_type(layer).forward).parameters:  # type: ignore[attr-defined]
        found["shared_kv_states"] = {}  # Gemma4's: later layers attend to keys and values of earlier ones
    rotary = getattr(owner, "rotary_emb", None)
    if rotary is not None:
        kinds: Any = getattr(getattr(owner, "config", None), "layer_types", None)
        several = kinds is not None and "layer_type" in inspect.signature(rotary.forward).parameters  # Gemma3's
        kind = {"layer_type": kinds[getattr(layer, "layer_idx", 0)]} if several else {}
        found["position_embeddings"] = rotary(x, position_ids=positions, **kind)
    return found


class _Runs:
    """Two runs of a layer, whose tensor-parallel layers answer alike in both."""

    def __init__(self, changes: Transaction, blocks: Sequence[Block], experts: Sequence[Styled], tuples: bool) -> None:
        self._changes = changes
        self._blocks = blocks
        self._experts = experts
        self._routed: dict[int, tuple[torch.Tensor, ...]] = {}  # what experts were given, whole
        self._tuples = tuples
        self._inputs: dict[int, torch.Tensor] = {}  # of a block, whole
        self._state = torch.empty(0, device="cpu")  # of the random numbers, when it was looked at
        self.drawn = False  # whether a layer has drawn some outside of its blocks

    def run(self, layer: nn.Module, x: torch.Tensor, arguments: dict[str, Any], sharded: bool = False) -> Any:
        for seed, block in enumerate(self._blocks):
            if block.obstacle is not None:
                self._answer(block.module, self._unserved(seed, block, x.shape[-1], sharded))
                continue
            self._answer(block.module, self._entered(block, sharded))
            if block.key_heads is not None:
                self._changes.set(vars(block.module), GROUPS, block.key_heads.groups)
            for number, found in enumerate(block.columns):
                self._answer(found.module, _column(_fixed(100 * seed + number, _features(found, block), x)))
            for number, found in enumerate(block.rows):
                fixed = _fixed(100 * seed + 50 + number, int(found.module.out_features), x)
                self._answer(found.module, _row(fixed, sharded))
        for number, found in enumerate(self._experts):
            self._answer(found.module, self._summed(1000 + number, found, sharded))
        self._state = _random_state(x.device)
        out = original_type(layer).forward(layer, x, **arguments)  # type: ignore[attr-defined]
        self._look(x.device)
        return out

    def _look(self, device: torch.device) -> None:
        self.drawn |= not torch.equal(_random_state(device), self._state)

    def _answer(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._changes.set(vars(module), "forward", forward)

    def _entered(self, block: Block, sharded: bool) -> Callable[..., Any]:
        """The block's own forward, with what stands for its whole input."""
        module, stock = block.module, own_class(block.module).forward  # type: ignore[attr-defined]

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = args[0] if args else kwargs[INPUT]
            self._look(given.device)
            try:
                return computed(given, args, kwargs)
            finally:
                self._state = _random_state(given.device)

        def computed(given: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not sharded:
                self._inputs[id(module)] = given
                return stock(module, *args, **kwargs)
            whole = self._inputs[id(module)]
            if not _close(given, _part(whole)):
                raise ValueError(f"the input of {block.name} depends on other positions")
            stand_in = StandIn(given, tuple(whole.shape), lambda: whole)
            args, kwargs = replaced_input(stand_in, args, kwargs)
            return stock(module, *args, **kwargs)

        return forward

    def _unserved(self, seed: int, block: Block, width: int, sharded: bool) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = args[0] if args else kwargs[INPUT]
            if sharded and not _close(given, _part(self._inputs[id(block)])):
                raise ValueError(f"the input of {block.name} depends on other positions")
            self._inputs.setdefault(id(block), given)
            out = _answer_to(given, _fixed(100 * seed + 99, width, given), _SHARD if sharded else _ALL)
            return (out, None) if self._tuples else out

        return forward

    def _summed(self, seed: int, found: Styled, sharded: bool) -> Callable[..., torch.Tensor]:
        def forward(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            given = (x, index, weights)
            if not sharded:
                self._routed[id(found)] = given
            elif not all(
                part.dim() == 2 and _close(part, _part(whole))
                for part, whole in zip(given, self._routed[id(found)], strict=True)
            ):
                raise ValueError(f"what {found.name} are given depends on other positions")
            return _answer_to(x, _fixed(seed, x.shape[-1], x), _SHARD if sharded else _ALL)

        return forward


def replaced_input(x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with another input of a layer or block."""
    return ((x, *args[1:]), kwargs) if args else ((), {**kwargs, INPUT: x})


def _features(found: Styled, block: Block) -> int:
    """Of a column-parallel layer's output on this rank."""
    if block.key_heads is not None and found.leaf in PROJECTIONS:
        return block.key_heads.width
    mesh = found.style.mesh
    assert mesh is not None and isinstance(found.module.weight, torch.Tensor)
    features = int(found.module.weight.shape[0])
    return features if found.style.whole else even_sizes(features, mesh.size())[mesh.get_local_rank()]


def _fixed(seed: int, features: int, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(1, _POSITIONS, features, generator=_generator(1 + seed), device="cpu").to(like.device, like.dtype)


def _column(fixed: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda input: _answer_to(input, fixed, _ALL)


def _row(fixed: torch.Tensor, sharded: bool) -> Callable[..., torch.Tensor]:
    def forward(input: torch.Tensor) -> torch.Tensor:
        whole = _answer_to(input, fixed, _ALL)
        return _part(whole).clone() if sharded else whole

    return forward


def _answer_to(input: torch.Tensor, fixed: torch.Tensor, positions: slice) -> torch.Tensor:
    """In the shape of the input: [1, positions, D], or [positions, D]."""
    found = fixed[..., positions, :]
    if input.dim() not in (2, 3) or input.shape[-2] != found.shape[-2]:
        raise ValueError(f"a layer was given {tuple(input.shape)}, not {found.shape[-2]} positions")
    return found.clone() if input.dim() == 3 else found[0].clone()


def _train(changes: Transaction, layer: nn.Module) -> None:
    for module in layer.modules():
        changes.set(vars(module), "training", True)


def _make_whole(changes: Transaction, layer: nn.Module, answered: Sequence[nn.Module]) -> None:
    """In place of parameters that are sharded (by `fully_shard`) some of their shape: their values do not matter. answered:
    modules that compute nothing, and whose parameters, the large ones, nobody looks at."""
    skipped, generator = set(map(id, answered)), _generator(0)
    for module in layer.modules():
        own: dict[str, Any] = {} if id(module) in skipped else module._parameters
        for name, param in own.items():
            if isinstance(param, DTensor):
                made = torch.rand(param.shape, generator=generator, device="cpu").to(param.device, param.dtype)
                changes.set(own, name, nn.Parameter(made, requires_grad=False))
