"""Triton's interpreter for tests of kernels: import this before anything that imports triton, in a process of its own.

The interpreter runs the programs of a grid one after the other, on CPU tensors. `watched` tells a test of every atomic
operation of a kernel at the moment when it happens, so that a test can hold a slice back until the kernel asks for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

Watch = Callable[[str, int], None]  # (operation, address), before it happens
_watch: Watch | None = None


def _repair_index() -> None:
    """Triton 3.6 converts one-element arrays by int(), which numpy 2.4 refuses: `range` over a kernel's values would fail."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _report_atomics() -> None:
    original = interpreter.InterpreterBuilder.create_atomic_rmw

    def create_atomic_rmw(self: Any, operation: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if _watch is not None and bool(mask.data.item()):
            _watch(str(operation).rsplit(".", 1)[-1].lower(), int(ptr.data.item()))
        return original(self, operation, ptr, val, mask, sem, scope)

    interpreter.InterpreterBuilder.create_atomic_rmw = create_atomic_rmw


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Report atomics to `watch` while the context lasts."""
    global _watch
    _watch = watch
    try:
        yield
    finally:
        _watch = None


_repair_index()
_report_atomics()
