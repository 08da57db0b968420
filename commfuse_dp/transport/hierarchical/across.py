"""What crosses hosts is counted apart."""

from __future__ import annotations

from commfuse_dp.probe import Probe


class AcrossProbe(Probe):
    """Counts what crosses hosts apart from what moves inside them; spans go where the main probe's go."""

    __slots__ = ("_main",)

    def __init__(self, main: Probe) -> None:
        self._main = main
        super().__init__()

    @property  # type: ignore[override]
    def sink(self):  # type: ignore[no-untyped-def]
        return self._main.sink

    @sink.setter
    def sink(self, value: object) -> None:
        """Only the main probe's counts."""

    @property  # type: ignore[override]
    def timing(self):  # type: ignore[no-untyped-def]
        return self._main.timing

    @timing.setter
    def timing(self, value: object) -> None:
        """Likewise."""
