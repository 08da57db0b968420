"""How an unmodified script gets CommFuse: what runs at the end of every `import torch` in an environment with this package.

`activate` is an entry point of the group "torch.backends", PyTorch's own way to load extensions
(TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches all of them off, COMMFUSE=0 this one). It puts one finder on sys.meta_path and
returns. When one of FRAMEWORKS is imported, and not before, the integration's hooks are registered; they act when a JSON block,
a flag or COMMFUSE=1 asks for CommFuse.

An exception here would break `import torch` for programs that never heard of CommFuse. So nothing is imported before it is
needed (torch, pydantic and wrapt neither), and what goes wrong becomes one warning: that the hooks could not be set.

[Note: Why the loader and not the finder registers]
Libraries ask `importlib.util.find_spec("deepspeed")` merely to see whether it is installed, and Python holds its one import
lock while it calls a finder: importing from there can deadlock with another thread. So the finder only wraps the loader, and
the hooks are registered when the framework's module is about to be made (it must not be in sys.modules yet, or wrapt would take
it for imported). For that one module wrapt's own finder comes too late, so its hooks are run from here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

FRAMEWORKS = {  # module whose first import is waited for -> its integration
    "torch": "unmodified",  # what it wraps itself; only if COMMFUSE=1 asks for that
    "deepspeed": "deepspeed",
    "accelerate": "accelerate",
    "transformers": "hugging_face_tp",
}
ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "no", "off")

_registered: set[str] = set()  # frameworks whose hooks are set, or could not be: once, whatever happens
_warned: set[str] = set()
_watching_exit = False


def activate() -> None:
    """Be ready for the frameworks in FRAMEWORKS. Called by torch, and by `python -m commfuse_dp.run`. Never raises."""
    try:
        if wish() in OFF and not _flagged():
            return
        if not active():
            sys.meta_path.insert(0, _Finder())
        for framework in FRAMEWORKS:
            if framework in sys.modules and (framework != "torch" or wish() in ON):  # it imports torch just now, or did before
                register(framework)
        if wish() in ON and "RANK" in os.environ:
            warn_at_exit()
    except Exception as error:
        if os.environ.get("COMMFUSE"):
            warn(f"CommFuse could not be loaded, and does nothing in this process: {_text(error)}")


def active() -> bool:
    """Whether `activate` has been at work in this process."""
    return any(type(finder) is _Finder for finder in sys.meta_path)


def register(framework: str) -> None:
    """Have the integration of `framework` register its hooks; once. Never raises: warns."""
    if framework in _registered:
        return
    _registered.add(framework)
    try:
        import importlib

        importlib.import_module(f"commfuse_dp.integrations.{FRAMEWORKS[framework]}.autohook").register()
    except Exception as error:
        warn(
            f"CommFuse could not hook into {framework}, which therefore runs without it, whatever its configuration says: "
            f"{_text(error)}. Reinstall commfuse_dp, or set COMMFUSE=0 to do without it and without this warning."
        )


def when_imported(name: str) -> Callable[[Callable[[ModuleType], None]], Callable[[ModuleType], None]]:
    """Decorator for the integrations: `hook(module)` runs after module `name` has been imported, or now if it has been.

    wrapt.when_imported, except that a hook that raises is reported and left out instead of failing the framework's import.
    A module that is being imported just now, such as the one that imports torch, counts as imported: hook a later one.
    """
    import wrapt

    def decorate(hook: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def guarded(module: ModuleType) -> None:
            try:
                hook(module)
            except Exception as error:
                warn(f"CommFuse could not hook into {name}, which is left as it is: {_text(error)}")

        wrapt.register_post_import_hook(guarded, name)
        return hook

    return decorate


def warn(message: str) -> None:
    """One line to the log, that is to stderr unless the program says otherwise; each text once."""
    if message not in _warned:
        _warned.add(message)
        import logging

        logging.getLogger("commfuse_dp").warning("%s", message)


def warn_at_exit() -> None:
    """Say so at the end of this process if CommFuse was asked for and nothing has switched it on. Rank 0 only."""
    global _watching_exit
    if not (_watching_exit or os.environ.get("RANK", "0") != "0" or _is_helper()):
        _watching_exit = True
        import atexit

        atexit.register(_check_use)


def _check_use() -> None:
    """Whatever uses CommFuse makes a probe."""
    probe = sys.modules.get("commfuse_dp.probe")
    used = probe is not None and probe.Probe.made > 0
    if used or wish() not in ON or hasattr(sys, "last_type"):
        return
    warn(
        "CommFuse was asked for (COMMFUSE=1), but nothing in this process has used it. It serves models of fully_shard, FSDP,"
        " parallelize_module, transformers' tensor parallelism from their first forward on, DDP's from the first in training,"
        " and what DeepSpeed and Accelerate wrap. Models whose own forward is never called need commfuse_dp.apply(model)"
        " after the last fully_shard."
    )


def _is_helper() -> bool:
    """A process that the training program has started for itself: data loading (multiprocessing), compilation (of torch)."""
    main, torch = getattr(sys.modules.get("__main__"), "__file__", None), getattr(sys.modules.get("torch"), "__file__", None)
    if main and torch and os.path.abspath(main).startswith(os.path.join(os.path.dirname(torch), "")):
        return True
    multiprocessing = sys.modules.get("multiprocessing.process")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


def _flagged() -> bool:
    """--commfuse is in the command line: a contradiction to COMMFUSE=0, which the launcher must know the flag to say."""
    return any(word.startswith("--commfuse") for word in getattr(sys, "argv", ()))


def wish() -> str:
    """COMMFUSE of the environment, in small letters; empty if unset."""
    return os.environ.get("COMMFUSE", "").strip().lower()


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class _Finder:
    """Sees the first import of a framework; finds nothing itself, and leaves the finding to the others on sys.meta_path."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in FRAMEWORKS or fullname in _registered:
            return None
        spec = self._find(fullname, path, target)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, fullname)  # type: ignore[assignment]
        return spec

    def _find(self, fullname: str, path: Any, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            spec = None if finder is self or find_spec is None else find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


class _Loader:
    """A framework's own loader, with the hooks registered just before the module is made."""

    def __init__(self, loader: Any, framework: str) -> None:
        self._loader = loader
        self._framework = framework

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        register(self._framework)
        create: Callable[[ModuleSpec], ModuleType | None] = self._loader.create_module
        return create(spec)

    def exec_module(self, module: ModuleType) -> None:
        for holder, attribute in ((module, "__loader__"), (module.__spec__, "loader")):
            if getattr(holder, attribute, None) is self:
                setattr(holder, attribute, self._loader)
        self._loader.exec_module(module)
        wrapt = sys.modules.get("wrapt")
        if wrapt is not None:
            wrapt.notify_module_loaded(module)
