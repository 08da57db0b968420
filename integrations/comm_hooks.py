"""What the communication hooks of DDP and FSDP1 share: a transport, one thread that drives it, and a report.

[Note: One thread per state]
A transport belongs to one thread, and backward must not wait for a collective that it does not need yet. So each state has
a thread that runs its collectives in the order in which backward hands them over, which is the same on all ranks. It sleeps
in the transport while it waits, and what it computes (sums) releases the GIL.

[Note: When the transport is opened]
At construction of the state, which is therefore a collective: settings that differ, a transport that cannot be had or a
missing peer are reported at that line, on all ranks, and not out of the middle of a backward pass; and setting up needs
collectives of the framework's own group, which must not be called from a thread while the framework may call others.
"""

from __future__ import annotations

import logging
import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.announce import log_report
from commfuse_dp.integrations.attach.fingerprint import check_equal
from commfuse_dp.integrations.attach.ranks import Ranks
from commfuse_dp.integrations.attach.report import FROZEN, ParameterRow
from commfuse_dp.integrations.attach.rows import lines_of
from commfuse_dp.integrations.attach.transaction import Transaction
from torch import nn

from commfuse_dp.collectives.arguments import SUMMABLE
from commfuse_dp.collectives.end_of_backward import EndOfBackward, at_end_of_backward, in_backward
from commfuse_dp.config import CommFuseConfig, resolved
from commfuse_dp.errors import CommFuseError, ConfigError, TransportError
from commfuse_dp.probe import WAIT, Probe
from commfuse_dp.transport.base import Transport
from commfuse_dp.transport.budget import Footprint
from commfuse_dp.transport.select import open_for

log = logging.getLogger("commfuse_dp")

_JOIN_S = 5.0  # at close: for what is under way; a thread that waits for a lost peer longer than that is left behind


class BackgroundProbe(Probe):
    """Waits of the communication thread block no compute: they are spans, but no exposed communication."""

    __slots__ = ()

    def exposed(self, layer: str, start_ns: int, end_ns: int) -> None:
        self.span(WAIT, layer, start_ns, end_ns, thread="communication")

    def compute_blocked(self, what: str, start_ns: int, end_ns: int) -> None:
        """Backward itself was blocked on a collective."""
        super().exposed(what, start_ns, end_ns)


class Job:
    """One collective handed to the thread."""

    __slots__ = ("_done", "_work", "error", "nbytes")

    def __init__(self, work: Callable[[], None], nbytes: int) -> None:
        self._work = work
        self._done = threading.Event()
        self.error: BaseException | None = None
        self.nbytes = nbytes

    def run(self, broken: BaseException | None) -> None:
        """broken: an earlier failure on this transport; the ranks' calls no longer match after it."""
        try:
            if broken is not None:
                raise CommFuseError(f"an earlier collective of this hook failed: {broken}") from broken
            self._work()
        except BaseException as error:
            self.error = error
            traceback.clear_frames(error.__traceback__)  # which hold memory of the transport; before anybody raises it again
        finally:
            self._work = _nothing  # the tensors it holds are free now
            self._done.set()

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        """Block until it has run (the transport's deadline is the limit). Raises what it raised."""
        self._done.wait()
        if self.error is not None:
            raise self.error


def _nothing() -> None:
    return None


class CollectiveThread:
    """Runs jobs in order of submission on one thread, which alone uses the transport."""

    def __init__(self, transport: Transport, name: str) -> None:
        self.transport = transport
        self.broken: BaseException | None = None
        self._jobs: queue.SimpleQueue[tuple[Job, Callable[[Job], None]] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None], *, nbytes: int = 0, then: Callable[[Job], None] = lambda job: None) -> Job:
        """then(job) runs on the thread after the job, also if it failed."""
        if self._closed:
            raise CommFuseError("this hook's state was closed; make a new state and a new model wrapper")
        job = Job(work, nbytes)
        self._jobs.put((job, then))
        return job

    def break_off(self, why: str) -> None:
        """What was submitted is all that comes: peers, which wait for more, are told why after it. Never blocks."""

        def work() -> None:
            raise CommFuseError(why)

        if not self._closed:
            self._jobs.put((Job(work, 0), lambda job: None))

    def close(self) -> None:
        """Finish what was submitted, then say goodbye to the peers. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:  # it is where the last reference to the state was dropped by a job
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # of this thread only
        try:
            self._serve()
        finally:
            self.transport.close()

    def _serve(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, then = item
            job.run(self.broken)
            try:
                then(job)
            finally:
                if self.broken is None and job.error is not None:
                    self.broken = job.error
                    # Nothing can follow on it. Of what the transport itself raised the peers know.
                    self.transport.close("" if isinstance(job.error, TransportError) else str(job.error))
            del item, job, then  # do not hold tensors while waiting for the next job


@dataclass(eq=False, repr=False)
class HookReport:
    """Which way the gradient of every parameter takes. `print(report)` shows it."""

    framework: str
    rows: list[ParameterRow]
    _: KW_ONLY
    world_size: int
    transport: str
    transport_reason: str
    probe: Probe
    memory: Footprint | None = None
    """Bytes that CommFuse takes on this rank, as they were announced before; None: nothing."""

    @property
    def summary(self) -> str:
        """One line."""
        hooked = sum(row.numel for row in self.rows if row.path == "hooks")
        frozen = sum(row.numel for row in self.rows if row.reason == FROZEN)
        rest = sum(row.numel for row in self.rows) - hooked - frozen
        text = (
            f"CommFuse for {self.framework}: {self.world_size} ranks, transport {self.transport} ({self.transport_reason}); "
            f"gradients of {hooked:,} parameters over its communication hook, {rest:,} left to {self.framework}"
        )
        return f"{text}; {frozen:,} are frozen and have none" if frozen else text

    def __str__(self) -> str:
        memory = [f"  memory: {self.memory}"] if self.memory is not None else []
        return "\n".join([self.summary, *memory, *lines_of(self.rows)])


class HookState:
    """Base of DDPState and FSDP1State. `thread` is None where nothing is to be sent: world size 1, enabled=False, or a GPU,
    where the framework's own collective stays."""

    framework = "?"

    report: HookReport

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        config: CommFuseConfig | None,
        device: torch.device,
        facts: list[tuple[str, str]],
        rows: Callable[[], Sequence[ParameterRow]],
    ) -> None:
        """Collective over `group`. facts: what else must be equal on all ranks, as (what, value). rows: of the report."""
        self.ranks = Ranks([group if group is not None else _default_group()])
        self.config = self.ranks.together(lambda: checked_config(config))
        self.group = group
        self.device = device
        self.world_size = dist.get_world_size(group)
        self.probe = BackgroundProbe()
        self.thread: CollectiveThread | None = None
        self.transport_name, self.transport_reason = "none", "one rank"
        self._armed: weakref.ref[EndOfBackward] | None = None
        if self.world_size > 1:
            settings = [(f"setting {key}", repr(value)) for key, value in self.config.model_dump().items()]
            check_equal([*settings, *facts], group if group is not None else _default_group())
        try:
            self.ranks.together(lambda: self._set_up(rows))
        except BaseException:
            self.close()
            raise
        if self.config.exclude:
            log.warning(
                "CommFuse for %s: exclude=%r has no effect: gradients of all parameters travel together in buckets",
                self.framework,
                self.config.exclude,
            )

    def _set_up(self, rows: Callable[[], Sequence[ParameterRow]]) -> None:
        if self.world_size > 1:
            self._open()
        self.report = HookReport(
            self.framework,
            list(rows()),
            world_size=self.world_size,
            transport=self.transport_name,
            transport_reason=self.transport_reason,
            probe=self.probe,
            memory=self.thread.transport.footprint if self.thread is not None else None,
        )

    def _open(self) -> None:
        if not self.config.enabled:
            self.transport_reason = "enabled=False"
            return
        if self.device.type != "cpu":
            settings = {"transport": self.config.transport, "order": self.config.order}
            asked = [f"{key}={value!r}" for key, value in settings.items() if value != "auto"]
            own = (
                f"{self.framework} keeps its own collective on {self.device.type}: its hook gets whole buckets, which a thread "
                "of ours would send and wait for on the host, and nothing could be fused with compute"
            )
            if asked:
                raise ConfigError(
                    f"{' and '.join(asked)} cannot be met: {own}. Leave it at 'auto', or use FSDP2 (fully_shard) with "
                    "commfuse_dp.apply, whose layers are fused"
                )
            self.transport_reason = own
            return
        if self.config.order == "hierarchical":
            raise ConfigError(
                f"order='hierarchical' is for FSDP2 and ZeRO-3, whose layers are fused; {self.framework}'s hook sends buckets: "
                "use order='auto', 'pairwise' or 'ring'"
            )
        transport, self.transport_reason = open_for(self.config, group=self.group, device=self.device, probe=self.probe)
        self.transport_name = transport.name
        self.thread = CollectiveThread(transport, f"commfuse-{self.framework.lower()}")
        self._finalizer = weakref.finalize(self, self.thread.close)  # with the model, or at exit: peers are told goodbye

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of every collective of this state."""
        assert self.thread is not None
        return {
            "order": "ring" if self.config.order == "ring" else "pairwise",
            "slices_per_rank": self.config.slices_per_rank or 1,
            "transport": self.thread.transport,
        }

    def close(self) -> None:
        """End the thread and the transport; the hook cannot be used after it. Happens by itself at exit."""
        if self.thread is not None:
            self.thread.close()

    def retire(self) -> None:
        """From now on the hook does what the framework does without it: DDP cannot give one back."""
        self.close()
        self.thread = None
        self.transport_name, self.transport_reason = "none", "it was taken back"

    def follow_backward(self) -> None:
        """The backward that is under way reduces something: if it is broken off, peers that wait for the rest are told."""
        if not in_backward():
            return  # the zeros of a rank that has run out of batches (DDP's join)
        if self._armed is None or self._armed() is None:
            self._armed = at_end_of_backward(self._end_backward)

    def _end_backward(self, complete: bool) -> None:
        if not complete and self.thread is not None:
            self.thread.break_off("an exception in its backward")

    def __reduce__(self) -> Any:
        """Copies and pickles of a model go without: connections cannot be copied, and DDP registers no hook for a copy."""
        return LeftBehind, ()


State = TypeVar("State", bound=HookState)


def attach_hook(
    model: nn.Module, make: Callable[[], State], register: Callable[[State], None], undo: Callable[[], None]
) -> HookReport:
    """Collective, on all ranks or on none: a state is made, the hook registered with it, the report logged."""

    transaction, ranks = Transaction(), Ranks([getattr(model, "process_group", None)])

    def attach() -> HookReport:
        state = transaction.acquire(make, HookState.retire)
        if state.thread is not None or state.device.type == "cpu":  # else the framework's own is quicker without a hook
            transaction.do(lambda: register(state), undo)
        return state.report

    try:
        report = ranks.together(attach)
    except BaseException:
        transaction.roll_back()
        raise
    log_report(report, ranks)
    return report


class LeftBehind:
    """In place of the state in a copy of a model: no state of any hook."""


def checked_config(config: CommFuseConfig | None) -> CommFuseConfig:
    """The configuration given, else that of the environment. Raises ConfigError for what hooks cannot do."""
    config = resolved(config)
    if config.fuse == "always":
        raise ConfigError(
            "fuse='always', but communication hooks get whole buckets of gradients and cannot fuse them with compute; "
            "use FSDP2 (fully_shard) with commfuse_dp.apply, or fuse='auto'"
        )
    return config


def check_state(state: object, expected: type, hook: str, example: str) -> None:
    """Raises ConfigError if a hook was registered with another kind of state."""
    if not isinstance(state, expected):
        raise ConfigError(
            f"{hook} was registered with a state of type {type(state).__name__}; it needs a {expected.__name__}: {example}"
        )


def require_distributed(what: str) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(f"{what} needs torch.distributed: call init_process_group first, and start with torchrun")


def _default_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


__all__ = [
    "SUMMABLE",
    "CollectiveThread",
    "HookReport",
    "HookState",
    "Job",
    "attach_hook",
    "check_state",
    "require_distributed",
]
