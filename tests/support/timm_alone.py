"""timm without torchvision: its models do without, and there is no build of that for the torch of CPUs.

It is installed in a folder of its own, out of the way: accelerate, for one, imports a timm that it finds, and fails.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(sys.prefix) / "timm"  # as in the Makefile
ABSENT = "torchvision"


def installed() -> bool:
    return FOLDER.is_dir()


def import_timm() -> ModuleType:
    """ImportError if it is not installed. Afterwards torchvision is as absent as before for whoever asks."""
    if "timm" in sys.modules:
        return sys.modules["timm"]
    placeholder = _Placeholder()
    if importlib.util.find_spec(ABSENT) is None:
        sys.meta_path.insert(0, placeholder)
    sys.path.append(str(FOLDER))
    try:
        return importlib.import_module("timm")
    finally:
        sys.path.remove(str(FOLDER))
        if placeholder in sys.meta_path:
            sys.meta_path.remove(placeholder)
            for name in [name for name in sys.modules if name.partition(".")[0] == ABSENT]:
                del sys.modules[name]


class _Placeholder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """torchvision as a package in which every name is a class of its own."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__version__ = "0"  # type: ignore[attr-defined]


class _Named(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name  # the members of an enumeration


class _Anything(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Named(name, (), {}))
        return getattr(self, name)
