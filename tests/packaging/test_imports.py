"""Rules of the package that no other test would notice: who imports whom, what importing costs, frozen names."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commfuse_dp.integrations import fsdp1_compat
from commfuse_dp.integrations.deepspeed import compat as deepspeed_compat
from commfuse_dp.integrations.fsdp2 import compat as fsdp2_compat
from torch.utils._device import _device_constructors

import commfuse_dp
from commfuse_dp import CommFuseConfig

ROOT = Path(commfuse_dp.__file__).parent
OUTSIDE = {room: ROOT.parent / room for room in ("integrations", "examples")}  # installed inside the package

# A room imports only rooms to its left, and the modules of the foundation.
ROOMS = ("program", "device", "transport", "kernels", "collectives", "ops", "engine", "observe", "integrations")
ROOMS += ("launch", "examples", "cli")
FOUNDATION = ("errors", "interrupts", "probe", "config", "ports", "autoload", "mpi_launch")
ENTRIES = ("run",)  # modules that a user starts with: above all rooms
STRANGERS = {("kernels", "transport")}  # neither needs the other: whoever uses both joins them
FRAMEWORKS = ("deepspeed", "accelerate", "transformers", "lightning", "pytorch_lightning")
HEAVY = ("deepspeed", "accelerate", "lightning", "mpi4py", "triton", "matplotlib", "typer", "rich")


def files() -> list[tuple[str, Path]]:
    """(room, file) of every source file; room '' is the foundation, 'package' the package's own __init__ and the entries."""
    found = [
        (path.relative_to(ROOT).parts[0] if len(path.relative_to(ROOT).parts) > 1 else "", path) for path in ROOT.rglob("*.py")
    ]
    found += [(room, path) for room, folder in OUTSIDE.items() for path in folder.rglob("*.py")]
    above = {ROOT / "__init__.py", *(ROOT / f"{name}.py" for name in ENTRIES)}
    return [("package" if path in above else room, path) for room, path in found]


@functools.cache
def imports(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every import in a file, also those inside functions and `importlib.import_module("...")`; not those
    for type checking only."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            found.append((node.lineno, module))
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            found += [(node.lineno, str(node.args[0].value))] if name == "import_module" else []
    return found


def room_of(module: str) -> str | None:
    """Room of an imported module of this package; '' for the foundation; None for anything else."""
    parts = module.split(".")
    if parts[0] != "commfuse_dp":
        return None
    if len(parts) == 1 or parts[1] not in ROOMS:
        return ""
    return parts[1]


def test_every_folder_is_a_room():
    assert {room for room, _ in files()} <= {"", "package", *ROOMS}
    assert {path.stem for room, path in files() if room == ""} == set(FOUNDATION)


def test_imports_point_down_the_list_only():
    wrong = []
    for room, path in files():
        for line, module in imports(path):
            target = room_of(module)
            if target is None or target == "" or room == "package":
                continue
            allowed = room != "" and ROOMS.index(target) <= ROOMS.index(room) and (room, target) not in STRANGERS
            if not allowed:
                wrong.append(f"{path.name}:{line}: {room or 'foundation'} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_rule_can_fail():
    assert room_of("commfuse_dp.engine.plan") == "engine" and room_of("commfuse_dp.errors") == "" and room_of("torch") is None
    assert any(room == "engine" and room_of(module) == "transport" for room, path in files() for _, module in imports(path))


def test_programs_are_pure_python():
    allowed = set(sys.stdlib_module_names) | {"commfuse_dp", "__future__"}
    for room, path in files():
        if room == "program":
            assert {module.split(".")[0] for _, module in imports(path)} <= allowed, path


def test_private_names_of_a_framework_are_used_in_integrations_only():
    for room, path in files():
        names = {module.split(".")[0] for _, module in imports(path)}
        if room not in ("integrations", "examples", "cli"):
            assert not names & set(FRAMEWORKS), path
        private = [module for _, module in imports(path) if module.startswith("torch.distributed.fsdp")]
        assert not private or room in ("integrations", "examples", "cli", "observe"), (path, private)


PRIVATE = {  # files of an integration -> the framework's names that its compat module checks, and alone uses
    "fsdp2": [name for name in (*fsdp2_compat._GROUP_FIELDS, *fsdp2_compat._PARAM_FIELDS) if name.startswith("_")],
    "fsdp1": list(fsdp1_compat._STATE_FIELDS),
    "deepspeed": [name for name in deepspeed_compat._PARAM_NAMES if name.startswith("ds_")],
}


@pytest.mark.parametrize("framework", PRIVATE)
def test_private_names_are_used_in_compat_modules_only(framework):
    own = [path for room, path in files() if room == "integrations" and framework in (path.parent.name, path.stem)]
    assert own
    for path in own:
        if not path.stem.endswith("compat"):
            nodes = list(ast.walk(ast.parse(path.read_text())))
            used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            used |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
            assert not used & set(PRIVATE[framework]), path


def without_device(source: str) -> list[str]:
    """Calls of torch that make a tensor on whatever the default device is just then (`torch.set_default_device("cuda")`)."""
    makers = {maker.__name__ for maker in _device_constructors()}
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in makers) == ("torch", True)
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]


def test_tensors_name_their_device():
    assert without_device("a = torch.empty(3, dtype=torch.uint8); b = torch.zeros(1, device=d)") == [
        "torch.empty(3, dtype=torch.uint8)"
    ]
    found = {str(path): calls for room, path in files() if room != "examples" and (calls := without_device(path.read_text()))}
    assert not found, found


def test_import_is_light_and_quiet():
    code = (
        "import sys, torch; before = set(sys.modules); import commfuse_dp; "
        f"print([m for m in {HEAVY!r} if m in sys.modules and m not in before]); "
        "from commfuse_dp.integrations import fsdp2; import commfuse_dp.ops, commfuse_dp.collectives, commfuse_dp.observe; "
        f"print([m for m in {HEAVY!r} if m in sys.modules and m not in before])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.split("\n")[:2] == ["[]", "[]"]
    assert not result.stderr


def test_names_of_test_files_are_unique():
    """Worker processes import a test's function by the name of its file alone."""
    names = [path.name for path in (ROOT.parent / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_names_of_the_configuration_are_frozen():
    """Users' scripts and JSON files carry them: a new one may be added here, none renamed or removed."""
    assert set(CommFuseConfig.model_fields) == {
        "enabled",
        "fuse",
        "transport",
        "order",
        "slices_per_rank",
        "prefetch_bytes",
        "inbox_bytes",
        "exclude",
        "defer_gather",
        "save_activations",
        "kernels",
        "replay",
        "deadline_s",
    }
    assert all(field.description for field in CommFuseConfig.model_fields.values())


@pytest.mark.parametrize("name", commfuse_dp.__all__)
def test_public_names_exist(name):
    assert getattr(commfuse_dp, name).__doc__


def test_rooms_are_reachable_from_the_package():
    for name in ("collectives", "observe", "ops"):
        assert getattr(commfuse_dp, name).__name__ == f"commfuse_dp.{name}"
    with pytest.raises(AttributeError, match="nonsense"):
        commfuse_dp.nonsense  # noqa: B018


@pytest.mark.slow
def test_frameworks_are_reachable_and_imported_when_they_are():
    code = "import sys, commfuse_dp; assert 'commfuse_dp.integrations.deepspeed' not in sys.modules"
    subprocess.run([sys.executable, "-c", f"{code}; commfuse_dp.integrations.deepspeed.remove"], check=True, cwd=ROOT)


def test_every_package_is_installed():
    """An editable installation finds folders that pyproject.toml leaves out; a wheel does not have them."""
    text = (ROOT.parent / "pyproject.toml").read_text()
    listed = set(re.findall(r'"(commfuse_dp[\w.]*)"', text.partition("packages = [")[2].partition("]")[0]))
    found = {path.parent.relative_to(ROOT.parent).parts for top in (ROOT, *OUTSIDE.values()) for path in top.rglob("*.py")}
    assert {".".join(parts if parts[0] == ROOT.name else (ROOT.name, *parts)) for parts in found} == listed


# ---- names -----------------------------------------------------------------------------------------------------------
PROGRAMS = ROOT.parent / "benchmarks"


def file_of(module: str) -> Path | None:
    """The source of a module of this repository; None: it is somebody else's."""
    package, *rest = module.split(".")
    if package == "commfuse_dp":
        above = OUTSIDE[rest.pop(0)] if rest and rest[0] in OUTSIDE else ROOT
    elif package == "benchmarks":
        above = PROGRAMS
    else:
        return None
    found = above.joinpath(*rest)
    return found / "__init__.py" if found.is_dir() else found.with_suffix(".py")


@functools.cache
def names_of(path: Path) -> set[str] | None:
    """What `from module import name` finds at the top level of a file; None if it may be anything (`__getattr__`)."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return None if "__getattr__" in found else found


def _is_module(name: str) -> bool:
    path = file_of(name)
    return path is not None and path.is_file()


def test_what_the_benchmarks_import_is_there():
    """Most of it is imported inside functions, of variants that only a measurement runs."""
    missing, looked_at = [], 0
    for path in PROGRAMS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            target = file_of(node.module or "") if isinstance(node, ast.ImportFrom) else None
            if target is None:
                continue
            assert target.is_file(), f"{path}:{node.lineno}: no module {node.module}"
            names = names_of(target)
            for alias in node.names:
                looked_at += 1
                if names is not None and alias.name not in names and not _is_module(f"{node.module}.{alias.name}"):
                    missing.append(f"{path.name}:{node.lineno}: {node.module} has no {alias.name}")
    assert looked_at > 100
    assert not missing, "\n".join(missing)
