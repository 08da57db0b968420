"""commfuse_dp.autoload in a process of its own: what `import torch` does, and what an import of a framework does then."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import installs
import pytest

import commfuse_dp

DEEPSPEED = installs.hooks("deepspeed", "deepspeed.runtime.engine")
ACCELERATE = installs.hooks("accelerate", "accelerate.utils.fsdp_utils")
SEEN = ["register deepspeed", "hook deepspeed.runtime.engine", "hook deepspeed"]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return installs.install(tmp_path, deepspeed=DEEPSPEED, accelerate=ACCELERATE)


# ---- the hooks are set in time -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("import torch; import deepspeed", SEEN),
        ("import torch; import deepspeed.runtime.engine", SEEN),
        ("import torch; from deepspeed.runtime import engine; import deepspeed", SEEN),
        ("import torch", []),
        ("import torch; import importlib, deepspeed; importlib.reload(deepspeed)", SEEN),
    ],
)
def test_torch_first(site, code, seen):
    assert installs.run(code, site) == (seen, [])


def test_torch_imported_in_the_middle_of_a_framework(site):
    """The package itself is half imported then: wrapt calls its hook at once. Modules that come later are seen in full."""
    out, err = installs.run("import deepspeed; assert deepspeed.__version__", site)
    assert (sorted(out), err) == (sorted(SEEN), [])
    out, err = installs.run("from accelerate import Accelerator", site)
    assert (out, err) == (["register accelerate", "hook accelerate", "hook accelerate.utils.fsdp_utils"], [])


def test_frameworks_one_in_the_other(site):
    (site / "accelerate/utils/fsdp_utils.py").write_text("import deepspeed\n")
    out, err = installs.run("import torch, accelerate", site)
    assert out == ["register accelerate", *SEEN, "hook accelerate.utils.fsdp_utils", "hook accelerate"] and not err


def test_activated_after_the_framework(site):
    code = "import deepspeed, commfuse_dp.autoload as a; print('late'); a.activate(); a.activate()"
    out, err = installs.run(code, site, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert out[:2] == ["late", "register deepspeed"] and sorted(out[1:]) == sorted(SEEN) and not err


def test_looking_whether_a_framework_is_installed_registers_nothing(site):
    code = """
        import sys, torch, importlib.util
        spec = importlib.util.find_spec("deepspeed")
        assert spec.loader.is_package("deepspeed") and spec.origin.endswith("__init__.py")
        assert importlib.util.find_spec("accelerate.utils.fsdp_utils") is not None  # imports the parent
        print("wrapt" in sys.modules, sys.modules["commfuse_dp.autoload"]._registered)
        import deepspeed
        print(type(deepspeed.__loader__).__name__, type(deepspeed.__spec__.loader).__name__)
    """
    out, err = installs.run(code, site)
    first = ["register accelerate", "hook accelerate.utils.fsdp_utils", "hook accelerate", "True {'accelerate'}"]
    assert out == [*first, *SEEN, "SourceFileLoader SourceFileLoader"]
    assert not err


def test_hooks_of_others_run_once(site):
    """wrapt's finder is on sys.meta_path before ours, with a hook for the very package that ours waits for."""
    code = """
        import wrapt
        wrapt.when_imported("deepspeed")(lambda module: print("theirs", module.__version__))
        import torch, deepspeed
    """
    out, err = installs.run(code, site)
    assert sorted(out) == sorted([*SEEN, "theirs 0.1"]) and not err


def test_two_threads_import_two_frameworks(site):
    code = """
        import sys, threading, torch
        sys.setswitchinterval(1e-6)
        start = threading.Barrier(3)
        def main(name):
            start.wait()
            __import__(name)
        threads = [threading.Thread(target=main, args=(name,)) for name in ("deepspeed", "accelerate", "wrapt")]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    """
    out, err = installs.run(code, site)
    assert (
        sorted(out) == sorted([*SEEN, "register accelerate", "hook accelerate.utils.fsdp_utils", "hook accelerate"]) and not err
    )


# ---- off ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("variables", [{"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, {"COMMFUSE": "0"}, {"COMMFUSE": " Off "}])
def test_switched_off(site, variables):
    code = "import sys, torch, deepspeed, accelerate; print('commfuse_dp.integrations' in sys.modules, 'wrapt' in sys.modules)"
    assert installs.run(code, site, **variables) == (["False False"], [])


def test_a_launcher_with_the_flag_knows_it_even_where_it_is_switched_off(site):
    code = """
        import sys
        sys.argv = ["accelerate", "launch", "--commfuse", "train.py"]
        import torch, accelerate
        print("commfuse_dp.integrations.accelerate.autohook" in sys.modules)
    """
    out, err = installs.run(code, site, COMMFUSE="0")
    assert "register accelerate" in out and not err, (out, err)


def test_frameworks_that_are_not_installed(tmp_path):
    installs.install(tmp_path, deepspeed=DEEPSPEED, accelerate=ACCELERATE)
    (tmp_path / "deepspeed/__init__.py").unlink()  # a folder of that name, as in a checkout
    shutil.rmtree(tmp_path / "accelerate")
    code = """
        import sys, torch
        sys.path[:] = [entry for entry in sys.path if "-packages" not in entry]  # where the real ones may be
        import deepspeed
        print(deepspeed.__file__)
        try:
            import accelerate
        except ModuleNotFoundError as error:
            print(error)
    """
    out, err = installs.run(code, tmp_path)
    assert out[-2:] == ["None", "No module named 'accelerate'"] and len(err) <= 1  # wrapt is out of reach, too


# ---- broken ------------------------------------------------------------------------------------------------------------
BROKEN = {
    "autohook raises": ("raise OSError('torn file')", "OSError: torn file"),
    "syntax": ("def register(:", "SyntaxError"),
    "no register": ("", "has no attribute 'register'"),
    "register raises": ("def register(): raise KeyError('name')", "KeyError: 'name'"),
    "needs what is not there": ("import commfuse_dp.nowhere", "No module named 'commfuse_dp.nowhere'"),
    "config raises": ("from commfuse_dp.config import CommFuseConfig", "ImportError: pydantic is broken"),
    "hook raises": (
        "from commfuse_dp.autoload import when_imported\n"
        "@when_imported('deepspeed.runtime.engine')\ndef hook(module): module.NotHere\n"
        "def register(): pass",
        "has no attribute 'NotHere'",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_integration(tmp_path, case):
    """The frameworks work, the other integration works, and there is one line about it."""
    source, reason = BROKEN[case]
    code = "import deepspeed, accelerate" if case == "syntax" else "import torch, deepspeed, accelerate"
    installs.install(tmp_path, deepspeed=source, accelerate=ACCELERATE)
    installs.write(tmp_path, {"commfuse_dp/config.py": "raise ImportError('pydantic is broken')"})
    out, err = installs.run(f"{code}; print(deepspeed.runtime.engine.DeepSpeedEngine.__name__)", tmp_path)
    assert out[-1] == "DeepSpeedEngine" and "register accelerate" in out
    assert len(err) == 1 and "CommFuse could not hook into deepspeed" in err[0] and reason in err[0]
    assert installs.run("import torch", tmp_path) == ([], [])


def test_missing_integration_and_missing_wrapt(site):
    installs.write(site, {"wrapt.py": "raise ModuleNotFoundError(\"No module named 'wrapt'\")"})
    (site / "commfuse_dp/integrations/deepspeed/autohook.py").unlink()
    out, err = installs.run("import torch, deepspeed, accelerate", site)
    assert out == ["register accelerate"] and len(err) == 2
    assert "commfuse_dp.integrations.deepspeed" in err[0] and "No module named 'wrapt'" in err[1]
    assert installs.run("import torch", site) == ([], [])


@pytest.mark.parametrize("variables", [{}, {"COMMFUSE": "1"}])
def test_activate_itself_fails(site, variables):
    """Silent, unless CommFuse was asked for."""
    out, err = installs.run("import sys; sys.meta_path = tuple(sys.meta_path); import torch; print('fine')", site, **variables)
    assert out == ["fine"]
    assert len(err) == len(variables) and all("could not be loaded" in line and "AttributeError" in line for line in err)


# ---- asked for, and nothing came of it ---------------------------------------------------------------------------------
NOTHING = "nothing in this process has used it"


@pytest.mark.parametrize(
    ("code", "variables", "said"),
    [
        ("", {"COMMFUSE": "1", "RANK": "0"}, 1),
        ("", {"COMMFUSE": "1", "RANK": "1"}, 0),  # once per job
        ("", {"COMMFUSE": "1"}, 0),  # no rank: a launcher
        ("", {"RANK": "0"}, 0),
        ("; import commfuse_dp.probe", {"COMMFUSE": "1", "RANK": "0"}, 1),
        ("; import commfuse_dp.probe; commfuse_dp.probe.Probe()", {"COMMFUSE": "1", "RANK": "0"}, 0),
        ("; raise ValueError", {"COMMFUSE": "1", "RANK": "0"}, 0),  # its error is what is to be read
        (
            "; import multiprocessing as m; p = m.get_context('spawn').Process(target=print, args=('x',)); p.start(); p.join()",
            {"COMMFUSE": "1", "RANK": "0"},
            1,  # the helper process says nothing
        ),
    ],
)
def test_warning_at_exit(site, code, variables, said):
    shutil.copy(Path(commfuse_dp.__file__).parent / "probe.py", site / "commfuse_dp")
    done = installs.run_command([sys.executable, "-c", f"import torch{code}"], site, **variables)
    assert done.stderr.count(NOTHING) == said, done.stderr


def test_workers_of_torch_itself_do_not_warn_at_exit(site):
    (site / "torch.py").unlink()
    installs.write(
        site, {"torch/__init__.py": installs.TORCH, "torch/worker.py": "import torch", "torchtrain.py": "import torch"}
    )
    for program, said in (("torch/worker.py", 0), ("torchtrain.py", 1)):
        done = installs.run_command([sys.executable, str(site / program)], site, COMMFUSE="1", RANK="0")
        assert done.stderr.count(NOTHING) == said, done.stderr


# ---- with the real torch -----------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_cost_beside_the_real_torch():
    """Two modules, neither of them heavy, and less than a hundredth of the time of `import torch`."""
    code = """
        import sys, time
        start = time.perf_counter()
        import torch
        middle = time.perf_counter()
        before = set(sys.modules)
        from commfuse_dp.autoload import activate
        activate()
        end = time.perf_counter()
        print(sorted(set(sys.modules) - before))
        print((end - middle) / (middle - start) < 0.01)
        rounds = []
        for _ in range(5):
            sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "commfuse_dp.autoload"]
            begun = time.perf_counter()
            activate()
            rounds.append(time.perf_counter() - begun)
        print(min(rounds) < (middle - start) * 1e-3)  # two thousandths of a second, and it takes a hundredth of that
    """
    out, err = installs.run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert out == ["['commfuse_dp', 'commfuse_dp.autoload']", "True", "True"] and not err


def test_the_real_torch_calls_it(tmp_path):
    """By an entry point of a distribution in the folder, so that it does not matter how this package is installed."""
    entry = (Path(__file__).parents[2] / "pyproject.toml").read_text().split('[project.entry-points."torch.backends"]\n')[1]
    name, target = entry.splitlines()[0].replace('"', "").split(" = ")
    assert (name, target) == ("commfuse_dp", "commfuse_dp.autoload:activate")
    installs.write(
        tmp_path,
        {
            "other-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: other\nVersion: 1.0\n",
            "other-1.0.dist-info/entry_points.txt": f"[torch.backends]\n{name} = {target}\n",
            **{name: text for name, text in installs.FRAMEWORKS.items() if name.startswith("deepspeed")},
            "deepspeed/zero.py": "",
        },
    )
    code = """
        import sys, torch
        heavy = ("wrapt", "pydantic", "commfuse_dp.config", "commfuse_dp.integrations")
        print([name for name in heavy if name in sys.modules])
        from commfuse_dp import autoload
        print(autoload.active(), sum(type(finder) is autoload._Finder for finder in sys.meta_path))
    """
    out, _ = installs.run(code, tmp_path)
    assert out == ["[]", "True 1"]


def test_the_real_integrations_wait_until_they_are_asked(tmp_path):
    """Beside programs that never heard of CommFuse, an import of a framework brings in the hooks, and none of the rooms."""
    installs.write(tmp_path, {"torch.py": installs.TORCH, **installs.FRAMEWORKS})
    for framework in ("accelerate", "deepspeed"):
        code = f"import sys, {framework}; print(*sorted(sys.modules))"
        out, err = installs.run(code, tmp_path)
        names = out[-1].split()
        assert f"commfuse_dp.integrations.{framework}.autohook" in names and not err, err
        rooms = ("schedule", "transport", "collectives", "ops", "engine", "observe")
        assert not [name for name in names if name.startswith("torch.") or name.split(".")[1:2] in [[room] for room in rooms]]


def test_exit_status_of_a_program_that_fails(site):
    done = subprocess.run(
        [sys.executable, "-c", "import torch; raise SystemExit(3)"], env={"PYTHONPATH": str(site)}, check=False
    )
    assert done.returncode == 3
