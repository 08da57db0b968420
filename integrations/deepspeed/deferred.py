"""ZeRO-1/2: the all-gather after the optimizer's step, moved under the next forward (setting `defer_gather`).

    step()      own partitions are published, the peers' are asked for; step() returns
    forward     a module that reads a parameter waits for the part of the flattened group that it lies in
    elsewhere   state_dict, parameters(), module.weight, ...: the same, as all of them look into the modules' dictionaries

[Note: What is not seen]
A tensor that somebody took out of the model before the step (a list of parameters that an averaging of weights keeps, say) is
read without asking. Until the next forward it may still hold the values from before the step. So this is on only if asked for.

[Note: A transport of its own]
Epochs here are optimizer steps, while the engine's are forwards, and transfers of one outlive the other's.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from commfuse_dp.integrations.attach.slots import hold_parameters
from torch import nn

from commfuse_dp.errors import CommFuseError, Where
from commfuse_dp.probe import now_ns
from commfuse_dp.program.orders import gather_owners
from commfuse_dp.transport.base import PullRequest, Transfer, Transport

PIECE_BYTES = 4 << 20


class FlatGroup(NamedTuple):
    """One flattened parameter group of the optimizer, in equal partitions."""

    whole: torch.Tensor  # [elements], the memory of the parameters
    partition: int  # elements of every rank's part


class _Piece:
    """A range of a group that a peer keeps, under way."""

    __slots__ = ("start", "stop", "target", "transfer")

    def __init__(self, start: int, stop: int, target: torch.Tensor, transfer: Transfer) -> None:
        self.start = start
        self.stop = stop
        self.target = target
        self.transfer = transfer


class DeferredGather:
    """All-gathers of the flattened groups that finish when they are needed. Collective to construct and to start."""

    def __init__(self, transport: Transport, groups: list[FlatGroup]) -> None:
        self.footprint = transport.footprint
        self._transport = transport
        self._groups = groups
        self._order = gather_owners(transport.rank, transport.world_size, "pairwise")[1:]
        self._epoch = 0
        self._started: set[int] = set()
        self._pieces: dict[int, list[_Piece]] = {}
        self.pending = False
        transport.expose([[group.partition * group.whole.element_size()] * transport.world_size for group in groups])

    def index_of(self, output: torch.Tensor) -> int | None:
        """Which group a collective's output is, if any."""
        for index, group in enumerate(self._groups):
            if group.whole.data_ptr() == output.data_ptr() and group.whole.numel() == output.numel():
                return index
        return None

    def start(self, index: int) -> None:
        """Publish this rank's partition of a group and ask for the others'."""
        transport, group = self._transport, self._groups[index]
        if index in self._started or not self._started:
            self.complete()
            transport.wait_finished(self._epoch, Where("(all-gather after the step)", self._epoch, "all"))
            self._epoch += 1
            self._started.clear()
        self._started.add(index)
        flat = group.whole.detach().view(torch.uint8)
        size = group.partition * group.whole.element_size()
        transport.segments[index].copy_(flat[transport.rank * size : (transport.rank + 1) * size])
        transport.publish((index,), self._epoch)
        targets: list[tuple[int, torch.Tensor]] = []
        requests: list[PullRequest] = []
        step = max(1, PIECE_BYTES // group.whole.element_size()) * group.whole.element_size()
        for start in range(0, size, step):  # by turns, so that no owner's link is the one that all wait for
            stop = min(start + step, size)
            for owner in self._order:
                target = flat[owner * size + start : owner * size + stop]
                targets.append((owner * size + start, target))
                requests.append(PullRequest(owner, index, start, stop - start, None if transport.in_place else target))
        self._pieces[index] = [
            _Piece(start, start + target.numel(), target, transfer)
            for (start, target), transfer in zip(targets, transport.pull(self._epoch, requests), strict=True)
        ]
        self.pending = True

    def require(self, index: int, start: int, stop: int, name: str) -> None:
        """Wait until elements start .. stop-1 of a group are there."""
        pieces = self._pieces.get(index)
        if not pieces:
            return
        itemsize = self._groups[index].whole.element_size()
        low, high = start * itemsize, stop * itemsize
        wanted = [piece for piece in pieces if piece.start < high and piece.stop > low]
        for piece in wanted:
            self._take(piece, name)
            pieces.remove(piece)
        if not any(self._pieces.values()):
            self._finish()

    def complete(self) -> None:
        """Wait for everything that was started."""
        if self.pending:
            for pieces in self._pieces.values():
                for piece in pieces:
                    self._take(piece, "(all-gather after the step)")
                pieces.clear()
            self._finish()

    def _take(self, piece: _Piece, name: str) -> None:
        start = now_ns()
        late = not piece.transfer.done()
        data = piece.transfer.wait(Where(name, self._epoch, "all", piece.target.numel()))
        if late:
            self._transport.probe.exposed(name, start, now_ns())
        if self._transport.in_place:
            with torch.no_grad():
                piece.target.copy_(data)

    def _finish(self) -> None:
        self.pending = False
        self._transport.finish(self._epoch)

    def close(self) -> None:
        with contextlib.suppress(CommFuseError):
            self.complete()
        self._transport.close()


class _Waiting(dict):  # type: ignore[type-arg]
    """A module's parameters: reading one waits for its values. What torch and the module itself look into."""

    def __init__(self, parameters: dict[str, Any], gather: DeferredGather, places: dict[str, tuple[int, int, int]]) -> None:
        super().__init__(parameters)
        self._gather = gather
        self._places = places  # name -> (group, first element, last element + 1)

    def _wait(self, name: str) -> None:
        if self._gather.pending and name in self._places:
            self._gather.require(*self._places[name], name)

    def _wait_all(self) -> None:
        if self._gather.pending:
            for name in self._places:
                self._wait(name)

    def __getitem__(self, name: str) -> Any:
        self._wait(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._wait(name)
        return super().get(name, default)

    def items(self) -> Any:
        self._wait_all()
        return super().items()

    def values(self) -> Any:
        self._wait_all()
        return super().values()

    def __reduce__(self) -> Any:  # copies and pickles of the model are plain
        self._wait_all()
        return dict, (dict(super().items()),)


def watch(model: nn.Module, gather: DeferredGather, places: dict[int, tuple[int, int, int]]) -> None:
    """Make every module of a model wait for what it reads, until `unwatch`.

    places: id(param) -> (group, first element, last element + 1).
    """
    for module in model.modules():
        known = {name: places[id(p)] for name, p in module._parameters.items() if p is not None and id(p) in places}
        if known:
            hold_parameters(module, _Waiting(module._parameters, gather, known))


def unwatch(module: nn.Module) -> None:
    if isinstance(module._parameters, _Waiting):
        hold_parameters(module, dict(module._parameters.items()))
