"""What waits of one stream do for other streams: the list of callbacks, wherever garbage is collected."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from types import FrameType
from typing import Any

from commfuse_dp.collectives import progress


class Stream:
    def make_progress(self) -> None:
        pass


class Cycle:
    """Garbage that only the collector finds, as a dropped model is."""

    def __init__(self) -> None:
        self.me = self


def test_garbage_whose_end_unregisters_may_be_collected_at_any_line() -> None:
    kept, dropped = Stream(), Stream()
    collected: list[str] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != progress.__file__:
            return None
        weakref.finalize(Cycle(), progress.unregister, dropped.make_progress)
        collected.append(frame.f_code.co_name)
        gc.collect(0)
        return trace

    def work() -> None:
        progress.register(dropped.make_progress)
        sys.settrace(trace)
        progress.register(kept.make_progress)
        found.extend(progress.callbacks())
        progress.unregister(dropped.make_progress)
        sys.settrace(None)
        progress.unregister(kept.make_progress)
        found.extend(progress.callbacks())

    found: list[Any] = []
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60.0)
    assert not thread.is_alive(), f"stuck in {collected[-1]}, where garbage was collected"
    assert found == [kept.make_progress]
    assert {"register", "callbacks", "unregister"} <= set(collected)


def test_a_callback_ends_with_its_object() -> None:
    stream = Stream()
    progress.register(stream.make_progress)
    assert progress.callbacks() == [stream.make_progress]
    del stream
    gc.collect()
    assert not progress.callbacks()
