"""`python -m commfuse_dp.run [options] script.py ...`: run a training script with CommFuse asked for, also where autoload is
disabled. To the script it is plain Python: sys.argv, sys.path[0], __main__, exit status and tracebacks are those of
`python script.py ...` (or `python -m module ...`).
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import runpy
import sys
import textwrap
import zipfile
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any, NamedTuple, NoReturn

from commfuse_dp import autoload, mpi_launch
from commfuse_dp.config import CommFuseConfig, nearest, variable_of
from commfuse_dp.errors import CommFuseError, ConfigError

_PROGRAM = "commfuse_dp.run"
_OWN_FRAMES = (__file__, "<frozen runpy>", runpy.__file__)

_HELP = """\
usage: python -m commfuse_dp.run [--commfuse-config FILE] [--commfuse-<key> VALUE ...] script.py [arguments of the script]
       python -m commfuse_dp.run [--commfuse-...] -m module [arguments of the module]

Runs an unmodified training script as Python itself would, with CommFuse asked for (COMMFUSE=1), also where PyTorch's autoload
of extensions is disabled (TORCH_DEVICE_BACKEND_AUTOLOAD=0). Put it where the launcher wants a module:

  torchrun --nproc-per-node 2 -m commfuse_dp.run train.py
  accelerate launch -m commfuse_dp.run train.py
  deepspeed --module commfuse_dp.run train.py --deepspeed_config ds.json
  mpiexec -n 2 python -m commfuse_dp.run train.py     (rank, world size and rendezvous come from MPI)

DeepSpeed and Accelerate are hooked into when the script imports them. Models of fully_shard (FSDP2), FSDP, DDP,
parallelize_module (also below fully_shard) and transformers' tensor parallelism are served from their first forward on, DDP's
from the first in training. A script that calls nothing but other methods of its model must say where it is ready, which nobody
else can know: commfuse_dp.apply(model) after the last fully_shard. If nothing has used CommFuse in the end, the log says so.

COMMFUSE=0 in the environment runs the script without CommFuse. Each option sets a variable of the environment, which the
script's own child processes inherit; lists are separated by commas:
"""


class _Request(NamedTuple):
    """What the command line asks for."""

    variables: dict[str, str]  # of the environment
    target: str  # a file, or the name of a module
    is_module: bool
    arguments: list[str]  # for the target


def main(argv: Sequence[str] | None = None) -> None:
    """Run what the command line names; returns or raises as the script does. Exits with 2 on a wrong option."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        request = _parse(words)
        os.environ.update(request.variables)
        if autoload.wish() not in autoload.OFF:
            _switch_on()
    except CommFuseError as error:
        _fail(str(error))
    sys.excepthook = _trimmed(sys.excepthook)
    try:
        if request.is_module:
            _run_module(request.target, request.arguments)
        else:
            _run_script(request.target, request.arguments)
    except SystemExit as end:
        if end.code not in (None, 0):
            mpi_launch.mark_failed()  # no excepthook sees this end
        raise


def _switch_on() -> None:
    os.environ["COMMFUSE"] = "1"
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys() and mpi_launch.under_mpi():
        mpi_launch.export_environment()
    CommFuseConfig.from_environment()  # what is wrong with the settings is said now
    autoload.activate()


# ---- the command line --------------------------------------------------------------------------------------------------
def _parse(words: list[str]) -> _Request:
    """Raises ConfigError."""
    variables: dict[str, str] = {}
    for_script: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        spelled = name.replace("_", "-")
        if spelled == "--local-rank":  # put here by launchers (deepspeed --module), meant for the script
            for_script += [word] if equals else [word, _following(name, rest)]
        elif spelled.startswith("--commfuse-"):
            variable = _variable(name, spelled)
            if variable in variables:
                raise ConfigError(f"option {name} was given twice; give it once (lists are separated by commas)")
            variables[variable] = value if equals else _following(name, rest)
        elif word == "-m":
            return _Request(variables, _following(word, rest), True, [*for_script, *rest])
        elif word in ("-h", "--help"):
            print(_help())
            raise SystemExit(0)
        elif word.startswith("-"):
            raise ConfigError(
                f"unknown option {word!r} before the script: options of the script go after it, those of "
                f"{_PROGRAM} are -m, --help and {', '.join(_options())}"
            )
        else:
            return _Request(variables, word, False, [*for_script, *rest])
    raise ConfigError("no script was named; usage: python -m commfuse_dp.run [--commfuse-<key> VALUE ...] script.py ...")


def _following(option: str, rest: Iterator[str]) -> str:
    value = next(rest, None)
    if value is None:
        raise ConfigError(f"option {option} needs a value after it")
    return value


def _options() -> dict[str, str]:
    """Option -> variable of the environment."""
    keys = {f"--commfuse-{key.replace('_', '-')}": variable_of(key) for key in CommFuseConfig.model_fields}
    return {"--commfuse-config": "COMMFUSE_CONFIG", **keys}


def _variable(name: str, spelled: str) -> str:
    options = _options()
    if spelled not in options:
        raise ConfigError(f"unknown option {name!r}: {nearest(spelled, options)}Allowed: {', '.join(options)}.")
    return options[spelled]


def _help() -> str:
    lines = [_HELP]
    for option, variable in _options().items():
        if variable == "COMMFUSE_CONFIG":
            meaning = "Settings in a file, JSON or YAML; the options below go before it."
        else:
            field = CommFuseConfig.model_fields[variable.removeprefix("COMMFUSE_").lower()]
            meaning = f"{field.description} Default: {field.default!r}."
        lines.append(f"  {option} ({variable})")
        lines.append(textwrap.fill(meaning, 118, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join(lines)


def _fail(message: str, status: int = 2) -> NoReturn:
    print(f"{_PROGRAM}: error: {message}", file=sys.stderr)
    raise SystemExit(status)


# ---- what Python does with a script or a module ------------------------------------------------------------------------
# runpy's public functions put the old __main__ back when the code has ended, while threads and exit handlers of the script may
# still run (and pickle classes of __main__): so the module is made here, and stays.
def _run_script(path: str, arguments: list[str]) -> None:
    sys.argv[:] = [path, *arguments]
    if os.path.isdir(path) or path.endswith(".pyc") or (os.path.isfile(path) and zipfile.is_zipfile(path)):
        _leave_path()
        autoload.warn_at_exit()
        runpy.run_path(path, run_name="__main__")
        return
    absolute = os.path.join(os.getcwd(), path)  # as Python does: "sub/../train.py" stays
    try:
        with io.open_code(absolute) as file:
            source = file.read()
    except OSError as error:
        _fail(f"can't open file {absolute!r}: [Errno {error.errno}] {error.strerror}")
    _leave_path()
    if not _safe_path():
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    main_module = _new_main(__file__=absolute, __cached__=None, __loader__=SourceFileLoader("__main__", absolute))
    exec(compile(source, absolute, "exec", dont_inherit=True), vars(main_module))


def _run_module(name: str, arguments: list[str]) -> None:
    if not _safe_path():
        _leave_path()
        sys.path.insert(0, os.getcwd())
    sys.argv[:] = ["-m", *arguments]  # as long as the package is being imported
    spec, code = _find_module(name)
    sys.argv[0] = str(spec.origin)
    main_module = _new_main(
        __file__=spec.origin, __cached__=spec.cached, __loader__=spec.loader, __spec__=spec, __package__=spec.parent
    )
    exec(code, vars(main_module))


def _find_module(name: str) -> tuple[ModuleSpec, CodeType]:
    """The module's code, a package's __main__; ends the process, as Python does, if there is none."""
    spec = _find_spec(name)
    if spec.submodule_search_locations is not None:
        spec = _find_spec(f"{name}.__main__")
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if code is None:
        _fail(f"No code object available for {spec.name}", 1)
    return spec, code


def _find_spec(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the package is there, and what it imports is not
        spec = None
    except ValueError:  # in sys.modules, but not imported in the usual way
        spec = None
    return spec or _fail(f"No module named {name}", 1)


def _new_main(**attributes: Any) -> ModuleType:
    """Nothing but the code of the target is left to come."""
    autoload.warn_at_exit()
    module = ModuleType("__main__")
    vars(module).update(__builtins__=builtins, **attributes)
    sys.modules["__main__"] = module
    return module


def _safe_path() -> bool:
    """Python was told (-P, -I, PYTHONSAFEPATH) to put no folder in front of sys.path."""
    return bool(getattr(sys.flags, "safe_path", False) or sys.flags.isolated)


def _leave_path() -> None:
    """Take the folder off sys.path that Python put there for this module."""
    if not _safe_path():
        del sys.path[0]


def _trimmed(show: Any) -> Any:
    """An excepthook whose tracebacks begin in the script."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FRAMES:
            trace = trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    return hook


if __name__ == "__main__":
    main()
