"""Runs from a checkout with nothing installed: a GPU machine may have neither pip nor a network.

The source folder integrations/ stands at the top level and is installed as `commfuse_dp.integrations`. Where the package is not
installed, the repository's root is added to the places where submodules of `commfuse_dp` are looked for.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What the training part needs besides torch; the other parts need less.
NEEDED = {"pydantic": "pydantic>=2.7", "wrapt": "wrapt>=1.16"}


def prepare() -> None:
    """Make `commfuse_dp.integrations` importable. Call it before anything of it is imported; twice does no harm."""
    import commfuse_dp

    if importlib.util.find_spec("commfuse_dp.integrations") is None:
        commfuse_dp.__path__.append(str(ROOT))


def missing() -> list[str]:
    """Requirements of commfuse_dp.apply that are not installed, as pip names them."""
    return [requirement for name, requirement in NEEDED.items() if importlib.util.find_spec(name) is None]


def environment() -> dict[str, str]:
    """For child processes: the checkout comes first on the path."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *([before] if before else [])])}
