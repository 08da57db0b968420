"""`--commfuse` and the settings, as options of `accelerate launch`.

They are checked in the launcher, before any process is started, and handed to the workers as COMMFUSE=1 and the variables that
`CommFuseConfig.from_environment` reads; launchers of Accelerate pass their own environment on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NoReturn

from commfuse_dp.integrations.accelerate import compat

from commfuse_dp.autoload import OFF, ON
from commfuse_dp.config import CommFuseConfig, nearest, variable_of
from commfuse_dp.errors import ConfigError

TITLE = "CommFuse Arguments"
_CONFIG = "commfuse_config"


def add_to(module: ModuleType) -> None:
    """module: accelerate.commands.launch. Raises ConfigError if it is not as expected."""

    def with_flags(original: Callable[..., Any]) -> Callable[..., Any]:
        def launch_command_parser(*args: Any, **kwargs: Any) -> argparse.ArgumentParser:
            return add_options(original(*args, **kwargs))

        return launch_command_parser

    def with_check(original: Callable[..., Any]) -> Callable[..., Any]:
        def launch_command(args: argparse.Namespace) -> Any:
            prepare(args)
            return original(args)

        return launch_command

    # The command first: the parser takes it over as its default.
    if not (
        compat.replace(module, "launch_command", with_check) and compat.replace(module, "launch_command_parser", with_flags)
    ):
        raise ConfigError(
            f"accelerate {compat.version()} has no launch_command or launch_command_parser, so `accelerate launch` knows no "
            "--commfuse; set COMMFUSE=1 in the environment instead"
        )
    groups = getattr(module, "options_to_group", None)
    if isinstance(groups, dict):  # help of `accelerate launch --commfuse --help`, which hides groups that are not used
        groups.setdefault("commfuse", TITLE)


def add_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group(TITLE, "Sharded data parallelism without the stalls: commfuse_dp.")
    group.add_argument(
        "--commfuse",
        default=False,
        action="store_true",
        help="Use CommFuse in the script, which need not know of it: FSDP2, FSDP1, DDP, or DeepSpeed.",
    )
    group.add_argument(
        f"--{_CONFIG}", default=None, metavar="FILE", help="Settings of CommFuse, JSON or YAML; the options below go before it."
    )
    for key, field in CommFuseConfig.model_fields.items():
        text = f"{field.description} Default: {field.default!r}.".replace("%", "%%")
        group.add_argument(f"--commfuse_{key}", default=None, metavar="V", help=text)
    known = [word for action in group._group_actions for word in action.option_strings]
    parse = parser.parse_known_args

    def parse_known_args(*args: Any, **kwargs: Any) -> Any:
        namespace, unknown = parse(*args, **kwargs)
        script = getattr(namespace, "training_script_args", None) or []
        for word in unknown:
            if word.startswith("--commfuse") and word not in script:
                name = word.partition("=")[0]
                parser.error(
                    f"unknown option {name}: {nearest(name, known)}Allowed: {', '.join(k for k in known if '-' not in k[2:])}"
                )
        return namespace, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    return parser


def prepare(args: argparse.Namespace) -> None:
    """Check the flags and put them into this process's environment, which the workers inherit. Exits with 2 on a wrong one."""
    given = {name: str(value) for name, value in vars(args).items() if name.startswith("commfuse_") and value is not None}
    wanted = bool(getattr(args, "commfuse", False))
    wish = os.environ.get("COMMFUSE", "").strip()
    if wanted and wish.lower() in OFF:
        _fail(f"--commfuse asks for CommFuse and COMMFUSE={wish} in the environment forbids it: leave one of them away")
    if given and not wanted and wish.lower() not in ON:
        _fail(f"--{next(iter(given))} was given without --commfuse: add --commfuse, or leave it away")
    if not (given or wanted):
        return
    try:
        variables = _variables(given)
        os.environ.update({"COMMFUSE": "1", **variables})
        CommFuseConfig.from_environment()  # what the environment had before counts, too
    except ConfigError as error:
        _fail(str(error))
    count = getattr(args, "num_processes", None)
    if getattr(args, "cpu", False) and (count or 1) > 1 and getattr(args, "mpirun_hostfile", None) is None:
        print(
            f"accelerate launch: warning: --cpu starts ONE process, not {count} (--num_processes is for MPI there), so "
            f"CommFuse has nobody to talk to. For {count} processes: ACCELERATE_USE_CPU=1 accelerate launch --multi_gpu "
            f"--num_processes {count} ..., or add --mpirun_hostfile.",
            file=sys.stderr,
        )


def _variables(given: Mapping[str, str]) -> dict[str, str]:
    """Variable -> text. Raises ConfigError, naming the option."""
    variables = {}
    for name, text in given.items():
        if name == _CONFIG:
            variable, text = "COMMFUSE_CONFIG", os.path.abspath(text)  # a worker may start elsewhere
        else:
            variable = variable_of(name.removeprefix("commfuse_"))
        if not text.strip():
            raise ConfigError(f"--{name} needs a value, got {text!r}")
        before = dict(os.environ)
        try:
            for other in [key for key in before if key.startswith("COMMFUSE")]:
                del os.environ[other]
            os.environ[variable] = text
            CommFuseConfig.from_environment()
        except ConfigError as error:
            raise ConfigError(f"--{name}: {error}") from None
        finally:
            os.environ.clear()
            os.environ.update(before)
        variables[variable] = text
    return variables


def _fail(message: str) -> NoReturn:
    print(f"accelerate launch: error: {message}", file=sys.stderr)
    raise SystemExit(2)
