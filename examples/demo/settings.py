"""What the demo's parent process tells its ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

SETTINGS_VARIABLE = "COMMFUSE_DEMO"


@dataclass(frozen=True)
class DemoSettings:
    """One run of the demo; travels to the ranks as JSON in an environment variable."""

    corpus: str  # folder with train.bin and validation.bin
    result: str  # folder into which rank 0 writes its raw results
    steps: int  # at most; fewer where the time is short
    block: int  # steps of one variant before the other has its turn
    world_size: int
    transport: str
    order: str
    device: str
    seed: int
    threads: int  # of each rank
    started_at_s: float  # of the whole run, on the monotonic clock, which is one for all processes of a host
    budget_s: float  # for the whole run
    warmup: int = 2  # first steps of each variant: trained and compared, not timed
    recorded: int = 3  # steps with spans, after the timed ones; 1 where the time is short
    width: int = 512
    layers: int = 8
    heads: int = 8
    context: int = 256  # bytes of text in one sequence
    batch: int = 2  # sequences a rank and step
    learning_rate: float = 5e-4
    learning_rate_steps: int = 12  # over which it rises to its full value
    validation_batches: int = 4  # a rank
    link: str = "none"  # speed of the shaped link between the ranks
    interface: str = ""  # read the bytes off this network interface; empty: payload as counted

    @property
    def tokens(self) -> int:
        """Predicted bytes a step, all ranks."""
        return self.batch * self.context * self.world_size

    @property
    def ends_at_s(self) -> float:
        """When the run is to be over, on the monotonic clock."""
        return self.started_at_s + self.budget_s

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DemoSettings:
        return cls(**json.loads(text))
