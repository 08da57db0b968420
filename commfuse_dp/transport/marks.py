"""The place in a GPU's compute stream behind which transfers of a two-sided transport may start."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class Marks:
    """See [Note: Streams] in paired.py. CUDA only; not yet run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._lock = threading.Lock()
        self._latest: torch.cuda.Event | None = None

    def mark(self) -> None:
        """Called by the user's thread, before it tells anybody."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._latest = event

    @contextlib.contextmanager
    def posting(self) -> Iterator[None]:
        """Transfers posted in here start behind the latest mark. Any thread, one at a time."""
        with self._lock, torch.cuda.stream(self._stream):
            if self._latest is not None:
                self._stream.wait_event(self._latest)
            yield
