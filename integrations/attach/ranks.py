"""Ranks that attach together: either all of them do, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from commfuse_dp.errors import CommFuseError, ConfigError, MismatchError, TransportError
from commfuse_dp.ops.compat import transforms_active, untransformed
from commfuse_dp.transport.exchange import ExchangeFailed, Failures, exchange_of, give_up

T = TypeVar("T")


class Ranks:
    """The ranks of one mesh, over process groups along its dimensions. No group: this rank alone.

    groups: the first is the one that collectives inside of an action go over, if there are any.
    doing: what they do together, as errors name it."""

    def __init__(self, groups: Sequence[dist.ProcessGroup | None], doing: str = "attach CommFuse") -> None:
        self._doing = doing
        self.groups: list[dist.ProcessGroup] = []
        for group in groups:
            members = dist.get_process_group_ranks(group) if group is not None else []
            if len(members) > 1 and members not in map(dist.get_process_group_ranks, self.groups):
                assert group is not None
                self.groups.append(group)

    @property
    def first(self) -> bool:
        """Whether this rank is the first of the mesh."""
        return all(dist.get_rank(group) == 0 for group in self.groups)

    def together(self, action: Callable[[], T]) -> T:
        """Collective: what `action()` returns here, once it has succeeded on all ranks. No rank goes on alone.

        A rank whose action raised raises that; all others raise an error of the same class (CommFuseError, if it is not one
        of ours) that names the rank and the cause. Nobody waits for a rank that has failed, if `action` communicates by
        `transport.exchange` over the first group. Inside a transform of torch.func it is not begun: ConfigError."""
        with untransformed():  # else what ranks tell each other would be wrapped, and have no memory to be sent from
            return self._together(_refuse if transforms_active() else action)

    def _together(self, action: Callable[[], T]) -> T:
        result: Any = None
        own: BaseException | None = None
        groups, failures = self.groups, {}
        try:
            result = action()
        except ExchangeFailed as error:  # the ranks of the first group have heard of it
            groups, failures = groups[1:], error.failures
        except BaseException as error:
            if hasattr(error, _TOLD):  # of an action inside of this one: everybody knows
                raise
            own, failures = error, {_rank(): (type(error).__name__, str(error))}
        try:
            for group in (*groups, *self.groups[:-1]):  # and back: who hears in the last one has passed the others
                try:
                    failures = {**failures, **give_up(group, failures)}
                except TransportError as error:  # a rank has died: the groups that follow hear of it from this one
                    own = own if own is not None else error
                    failures = {_rank(): (type(own).__name__, str(own)), **failures}
            wrong = own if own is not None else _of_another(failures, self._doing)
            if wrong is not None:
                if self.groups:
                    setattr(wrong, _TOLD, True)
                raise wrong
        finally:
            own = wrong = None  # a kept exception keeps its frames, and these the exception
        return result


_TOLD = "_commfuse_told"  # on an exception that all ranks know of


def _refuse() -> NoReturn:
    raise ConfigError(
        "CommFuse cannot be attached inside a transform of torch.func (jvp, vjp, grad, vmap, ...). Attach it before the "
        "transform is called, which then runs over it."
    )


def _of_another(failures: Failures, doing: str) -> CommFuseError | None:
    for rank, (kind, text) in sorted(failures.items()):
        return _class_of(kind)(f"rank {rank} could not {doing} ({kind}): {text.rstrip('.')}. No rank has it now.")
    return None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _class_of(name: str) -> type[CommFuseError]:
    return next((kind for kind in (ConfigError, MismatchError, TransportError) if kind.__name__ == name), CommFuseError)


def any_of(group: dist.ProcessGroup, device: torch.device) -> Callable[[bool], bool]:
    """A vote of the ranks of one group: collective; True on all ranks if it is on one."""
    if device.type == "cpu":
        exchange = exchange_of(group)
        return lambda own: any(exchange(own))

    def vote(own: bool) -> bool:
        flag = torch.tensor([own], dtype=torch.int32, device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        return bool(flag.item())

    return vote
