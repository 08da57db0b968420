"""`python -m commfuse_dp.run`: to the script it is plain Python, and the environment says what was asked for."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import installs
import pytest

from commfuse_dp import CommFuseConfig
from tests.support.cells import slow

SCRIPT = """
    from __future__ import annotations
    import json, os, pickle, sys

    class Local:
        def __repr__(self):
            return f"Local of {__name__}, {__file__}"

    def pickled(where):
        print(where, type(pickle.loads(pickle.dumps(Local()))) is Local)

    def show():
        assert vars(sys.modules["__main__"]) is globals()
        names = set(globals()) - {"__annotations__"}  # Python 3.13 and older have it in a script of their own
        spec = __spec__ and __spec__.name
        print(json.dumps([__file__, __package__, spec, type(__loader__).__name__, sys.argv, sys.path[0], sorted(names)]))

    if __name__ == "__main__":
        show()
        pickled("at once")
    if "thread" in sys.argv and __name__ == "__main__":  # goes on when the main thread has ended, like a writer of checkpoints
        import atexit, threading
        atexit.register(pickled, "at exit")
        threading.Thread(target=lambda: (threading.main_thread().join(), pickled("in a thread"))).start()
    if "spawn" in sys.argv and __name__ == "__main__":
        import multiprocessing
        process = multiprocessing.get_context("spawn").Process(target=print, args=("spawned", Local()))
        process.start()
        process.join()
    if "raise" in sys.argv:
        raise ValueError("from the script")
    if "interrupt" in sys.argv:
        raise KeyboardInterrupt
    if "exit" in sys.argv:
        sys.exit("a reason")
"""
ENVIRONMENT = """
    import json, os, sys
    wanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    seen = {name: value for name, value in os.environ.items() if name.startswith("COMMFUSE") or name in wanted}
    from commfuse_dp import autoload
    line = json.dumps({**seen, "argv": sys.argv[1:], "active": autoload.active(), "torch": "torch" in sys.modules})
    print(line + "\\n", end="", flush=True)
"""
RUN = [sys.executable, "-m", "commfuse_dp.run"]
NOTHING = "nothing in this process has used it"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    files = {"train.py": SCRIPT, "pkg/__init__.py": "", "pkg/__main__.py": SCRIPT, "pkg/mod.py": SCRIPT, "bad.py": "x = (\n"}
    files |= {"env.py": ENVIRONMENT, "pkg/env.py": ENVIRONMENT, "sub/needs.py": "import neighbour", "sub/neighbour.py": ""}
    (tmp_path / "link.py").symlink_to(tmp_path / "pkg/mod.py")
    return installs.write(tmp_path, files)


def environment_seen(stdout: str) -> list[dict]:
    return [json.loads(line[line.index("{") :]) for line in stdout.splitlines() if '"argv"' in line]


# ---- as plain Python ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "words",
    [
        "train.py --lr 3 -m x --commfuse-order",
        "sub/../train.py thread spawn",
        "link.py",
        "./train.py",
        "-m pkg.mod a --help",
        "-m pkg exit",
        "train.py raise",
        "train.py interrupt",
        "bad.py",
        "sub/needs.py",
        "pkg",
        "nowhere.py",
    ],
)
def test_same_as_plain_python(place, words):
    """Output, exit status and traceback."""
    plain = installs.run_command([sys.executable, *words.split()], place)
    ours = installs.run_command([*RUN, "--commfuse-order", "ring", *words.split()], place)
    assert ours.returncode == plain.returncode
    said = [line for line in ours.stderr.splitlines() if NOTHING not in line]
    expected = plain.stderr.splitlines()
    if words == "nowhere.py":  # it says who cannot open it
        assert expected[-1].split(": ", 1)[1] == said[-1].split(": error: ", 1)[1] and not ours.stdout
    elif words == "pkg":  # a folder; Python 3.11 makes its path absolute in some places only
        assert ours.stdout.endswith("at once True\n") and plain.stdout.endswith("at once True\n")
    else:
        assert ours.stdout == plain.stdout and said == expected


def test_a_module_that_is_not_there(place):
    for name in ("nowhere", "pkg.nowhere", "nowhere.at.all"):
        done = installs.run_command([*RUN, "-m", name], place)
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"commfuse_dp.run: error: No module named {name}\n")
    installs.write(place, {"pkg/needy.py": "import nowhere"})
    done = installs.run_command([*RUN, "-m", "pkg.needy"], place)
    assert done.returncode == 1 and "ModuleNotFoundError: No module named 'nowhere'" in done.stderr


def test_safe_path(place):
    """No folder comes in front of sys.path if Python was told so."""
    if sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no -P")
    done = installs.run_command([sys.executable, "-P", "-m", "commfuse_dp.run", "sub/needs.py"], place, PYTHONPATH="")
    assert done.returncode == 1 and "No module named 'neighbour'" in done.stderr


# ---- options and environment -------------------------------------------------------------------------------------------
def test_options_become_variables(place):
    (place / "c.json").write_text('{"fuse": "never", "order": "pairwise"}')
    words = [
        "--commfuse-config",
        "c.json",
        "--local_rank=1",
        "--commfuse_order=ring",
        "--commfuse-exclude",
        "a,b",
        "env.py",
        "-x",
    ]
    done = installs.run_command([*RUN, *words], place, COMMFUSE_FUSE="auto", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    [seen] = environment_seen(done.stdout)
    assert seen == {
        "COMMFUSE": "1",
        "COMMFUSE_CONFIG": "c.json",
        "COMMFUSE_ORDER": "ring",
        "COMMFUSE_EXCLUDE": "a,b",
        "COMMFUSE_FUSE": "auto",
        "argv": ["--local_rank=1", "-x"],  # put first by `deepspeed --module`
        "active": True,
        "torch": False,
    }
    assert done.stderr.count(NOTHING) == 1 and "commfuse_dp.apply(model)" in done.stderr


def test_hooks_without_autoload(tmp_path):
    """The frameworks' hooks are set although torch loads no extensions; once, although it does."""
    for value in ("0", "1"):
        folder = installs.install(tmp_path / value, deepspeed=installs.hooks("deepspeed.runtime.engine"))
        package = Path(installs.commfuse_dp.__file__).parent
        for name in ("run.py", "config.py", "errors.py", "mpi_launch.py", "probe.py"):
            shutil.copy(package / name, folder / "commfuse_dp" / name)
        installs.write(folder, {"train.py": "import torch, deepspeed, commfuse_dp.probe\ncommfuse_dp.probe.Probe()"})
        done = installs.run_command([*RUN, "train.py"], folder, TORCH_DEVICE_BACKEND_AUTOLOAD=value)
        assert (done.stdout, done.stderr) == ("register deepspeed\nhook deepspeed.runtime.engine\n", "")


def test_commfuse_0_wins(place):
    done = installs.run_command([*RUN, "--commfuse-order", "ring", "env.py"], place, COMMFUSE="0")
    [seen] = environment_seen(done.stdout)
    assert (seen["COMMFUSE"], seen["active"], done.stderr) == ("0", False, "")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--commfuse-ordr ring env.py", ["'--commfuse-ordr'", "did you mean '--commfuse-order'"]),
        ("--commfuse-order rng env.py", ["COMMFUSE_ORDER='rng'", "'ring' or 'hierarchical'"]),
        slow("--commfuse-order", ["--commfuse-order needs a value"]),
        slow("--commfuse-order ring --commfuse_order=ring env.py", ["given twice"]),
        ("--lr 3 env.py", ["unknown option '--lr'", "options of the script go after it"]),
        ("--commfuse-config nowhere.json env.py", ["COMMFUSE_CONFIG='nowhere.json'", "No such file"]),
        slow("-m", ["-m needs a value"]),
        slow("", ["no script was named"]),
    ],
)
def test_wrong_options(place, words, wanted):
    done = installs.run_command([*RUN, *words.split()], place)
    assert done.returncode == 2 and not done.stdout and done.stderr.startswith("commfuse_dp.run: error: ")
    assert all(part in done.stderr for part in wanted) and done.stderr.count("\n") == 1


def test_help():
    done = installs.run_command([*RUN, "--commfuse-order", "ring", "--help"])
    assert done.returncode == 0 and "apply(model) after the last fully_shard" in done.stdout and not done.stderr
    for key in CommFuseConfig.model_fields:
        assert f"--commfuse-{key.replace('_', '-')} (COMMFUSE_{key.upper()})" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 128


# ---- behind launchers --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("launcher", [slow("torchrun"), slow("accelerate"), "mpiexec"])
def test_launchers(place, launcher):
    folder = Path(sys.executable).parent
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    elif launcher == "accelerate":
        pytest.importorskip("accelerate")
        command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
        command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "-m"]
    else:
        pytest.importorskip("mpi4py")
        mpiexec = shutil.which("mpiexec", path=str(folder)) or shutil.which("mpiexec")
        if mpiexec is None:
            pytest.skip("no mpiexec")
        command = [mpiexec, "-n", "2", sys.executable, "-m"]
    command += ["commfuse_dp.run", "--commfuse-order", "ring", "-m", "pkg.env", "--epochs", "3"]
    done = installs.run_command(command, place, timeout_s=120, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    seen = environment_seen(done.stdout)
    assert done.returncode == 0 and len(seen) == 2, done.stderr
    assert sorted(item["RANK"] for item in seen) == sorted(item["LOCAL_RANK"] for item in seen) == ["0", "1"]
    for item in seen:
        assert (item["WORLD_SIZE"], item["COMMFUSE"], item["COMMFUSE_ORDER"]) == ("2", "1", "ring")
        assert item["argv"] == ["--epochs", "3"] and item["active"]
        assert item.get("COMMFUSE_TRANSPORT") == ("mpi" if launcher == "mpiexec" else None)
