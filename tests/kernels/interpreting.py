"""Triton's interpreter for tests of kernels: import this before anything that imports triton, in a process of its own."""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter


def _repair_index() -> None:
    """Triton 3.6 converts one-element arrays by int(), which numpy 2.4 refuses: `range` over a kernel's values would fail."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


_repair_index()
