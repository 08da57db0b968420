"""Run-time compilation over a compiler that is simulated: what is compiled and cached, and what is said where something is
missing. The real one: test_nvrtc_real.py."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from commfuse_dp.kernels import cubins, nvrtc
from commfuse_dp.kernels.cubins import CubinCache
from commfuse_dp.kernels.nvrtc import CompileError, Spec, ToolchainError

SUM = Spec(
    "inbox_sum",
    (
        ("COMMFUSE_PARTIAL", "bf16"),
        ("COMMFUSE_OUT", "float"),
        ("COMMFUSE_COUNT", "2"),
        ("COMMFUSE_SCALING", "1"),
        ("COMMFUSE_VECTOR", "1"),
    ),
)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc.compiler_version.cache_clear()
    monkeypatch.setattr(nvrtc, "_kernels", {})
    monkeypatch.setattr(nvrtc, "_failures", {})
    yield
    nvrtc.compiler_version.cache_clear()


class FakeProgram:
    """cuda.core.Program as far as it is used."""

    compiled: ClassVar[list[tuple[str, types.SimpleNamespace]]] = []
    fails = False

    def __init__(self, code: str, kind: str, options: types.SimpleNamespace) -> None:
        assert kind == "c++"
        self.code, self.options = code, options

    def compile(self, target: str, logs: object) -> types.SimpleNamespace:
        assert target == "cubin"
        if self.fails:
            logs.write('inbox_sum.cu(7): error: identifier "oops" is undefined\n')
            raise RuntimeError("NVRTC_ERROR_COMPILATION")
        self.compiled.append((self.options.arch, self.options))
        return types.SimpleNamespace(code=b"cubin for " + self.options.arch.encode())


@pytest.fixture
def toolchain(fresh: None, monkeypatch: pytest.MonkeyPatch) -> type[FakeProgram]:
    class Program(FakeProgram):
        compiled: ClassVar[list[tuple[str, types.SimpleNamespace]]] = []

    core = types.SimpleNamespace(Program=Program, ProgramOptions=lambda **options: types.SimpleNamespace(**options))
    bindings = types.SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0))
    modules = {"cuda.core": core, "cuda.bindings.nvrtc": bindings}
    monkeypatch.setattr(nvrtc, "_import", lambda name: modules[name])
    return Program


def test_compiled_once_then_from_disk(toolchain: type[FakeProgram], tmp_path: Path) -> None:
    disk = CubinCache(tmp_path / "cache")
    for _ in range(2):
        assert nvrtc.cubin(SUM, "sm_90", disk) == b"cubin for sm_90"
    assert [arch for arch, _ in toolchain.compiled] == ["sm_90"]
    options = toolchain.compiled[0][1]
    assert options.define_macro == list(SUM.macros) and options.std == "c++17" and options.name == "inbox_sum.cu"
    assert nvrtc.cubin(SUM, "sm_80", disk) == b"cubin for sm_80"
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_key_depends_on_text_macros_architecture_and_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Spec("inbox_sum", (*SUM.macros[:4], ("COMMFUSE_VECTOR", "0")))
    keys = [
        nvrtc.cache_key(SUM, "sm_90", "nvrtc 13.0"),
        nvrtc.cache_key(SUM, "sm_80", "nvrtc 13.0"),
        nvrtc.cache_key(SUM, "sm_90", "nvrtc 13.1"),
        nvrtc.cache_key(other, "sm_90", "nvrtc 13.0"),
        nvrtc.cache_key(Spec("publish", SUM.macros), "sm_90", "nvrtc 13.0"),
    ]
    text = nvrtc.source("inbox_sum")
    monkeypatch.setattr(nvrtc, "source", lambda *of: text + " ")
    keys.append(nvrtc.cache_key(SUM, "sm_90", "nvrtc 13.0"))
    assert len(set(keys)) == len(keys)


def test_a_failed_compilation_shows_the_log(toolchain: type[FakeProgram], tmp_path: Path) -> None:
    toolchain.fails = True
    with pytest.raises(
        CompileError, match=r'(?s)inbox_sum\(COMMFUSE_PARTIAL=bf16.*for sm_90 with nvrtc 13\.0:.*"oops" is undefined'
    ):
        nvrtc.cubin(SUM, "sm_90", CubinCache(tmp_path))
    assert not list(tmp_path.iterdir())


def test_missing_packages_name_the_extra(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(ToolchainError, match=r"pip install 'commfuse_dp\[cuda\]'"):
        nvrtc.cubin(SUM, "sm_90")
    assert "cuda.bindings.nvrtc cannot be imported" in (nvrtc.unavailable() or "")


def test_old_cuda_core_is_named(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    old = types.ModuleType("cuda.core")
    old.__version__ = "0.3.2"
    monkeypatch.setitem(sys.modules, "cuda.core", old)
    monkeypatch.setitem(sys.modules, "cuda.core.experimental", None)
    with pytest.raises(ToolchainError, match=r"cuda-core 0\.3\.2 is too old"):
        nvrtc._import("cuda.core")


def test_older_cuda_core_has_it_elsewhere(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    experimental = types.ModuleType("cuda.core.experimental")
    monkeypatch.setitem(sys.modules, "cuda.core", types.ModuleType("cuda.core"))
    monkeypatch.setitem(sys.modules, "cuda.core.experimental", experimental)
    assert nvrtc._import("cuda.core") is experimental


def test_missing_library_is_named(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so"\nand more')

    monkeypatch.setattr(nvrtc, "_import", lambda name: types.SimpleNamespace(nvrtcVersion=missing))
    with pytest.raises(ToolchainError, match=r"libnvrtc cannot be loaded.*pip install nvidia-cuda-nvrtc"):
        nvrtc.compiler_version()


def test_old_gpu_is_refused_and_the_failure_remembered(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    for _ in range(2):
        with pytest.raises(ToolchainError, match=r"T4 has compute capability 7\.5"):
            nvrtc.kernel(SUM, torch.device("cuda", 0))
    assert len(asked) == 1


class FakeDriver:
    """cuda.bindings.driver.cuLaunchKernel: reads the struct while it runs, as the real one does."""

    def __init__(self, statuses: list[int]) -> None:
        self.statuses, self.launches = statuses, []

    CUfunction = CUstream = staticmethod(int)

    def cuLaunchKernel(self, *arguments: int) -> tuple[int]:
        self.launches.append(arguments)
        return (self.statuses.pop(0),)


def fake_kernel(monkeypatch: pytest.MonkeyPatch, statuses: list[int]) -> tuple[nvrtc.Kernel, FakeDriver]:
    kernel = object.__new__(nvrtc.Kernel)
    driver = FakeDriver(statuses)
    kernel._driver, kernel._device, kernel._name, kernel._function = driver, torch.device("cuda", 0), "k", 7
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: None)
    return kernel, driver


def test_launch_passes_the_stream_and_one_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, driver = fake_kernel(monkeypatch, [0])
    kernel.launch(5, 256, 0x1234, 0xABC)
    function, gx, gy, gz, bx, by, bz, shared, stream, _, extra = driver.launches[0]
    assert (function, gx, gy, gz, bx, by, bz, shared, stream, extra) == (7, 5, 1, 1, 256, 1, 1, 0, 0xABC, 0)


def test_launch_in_a_new_thread_makes_the_context_current(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, driver = fake_kernel(monkeypatch, [201, 0])
    kernel.launch(1, 256, 0, 0)
    assert len(driver.launches) == 2


def test_failed_launch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, _ = fake_kernel(monkeypatch, [1])
    with pytest.raises(RuntimeError, match=r"launching kernel k on cuda:0 .* failed: 1"):
        kernel.launch(1, 256, 0, 0)


# ---- the cache on disk ---------------------------------------------------------------------------------------------------
def test_broken_entries_are_rebuilt(tmp_path: Path) -> None:
    disk = CubinCache(tmp_path / "c")
    disk.put("key", b"code" * 100)
    (path,) = (tmp_path / "c").iterdir()
    whole = path.read_bytes()
    for broken in (b"", whole[:-1], whole[:20], b"x" + whole[1:], whole[:-1] + b"?"):
        path.write_bytes(broken)
        assert disk.get("key") is None
        assert not path.exists()
    disk.put("key", b"code")
    assert disk.get("key") == b"code"
    path.rename(path.with_name("other.cubin"))
    assert disk.get("other") is None  # the key is part of the checksum


def test_folder_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    disk = CubinCache(folder)
    disk.put("key", b"code")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert disk.get("key") is None
    with pytest.warns(RuntimeWarning, match="can be written to by others"):
        disk.put("key", b"code")
    folder.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert CubinCache(link).get("key") is None and disk.get("key") == b"code"


def test_disk_that_does_not_serve_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="each process compiles its own"):
        CubinCache(tmp_path / "file" / "cache").put("key", b"code")
    assert CubinCache(tmp_path / "file" / "cache").get("key") is None


def test_many_writers_leave_one_whole_file(tmp_path: Path) -> None:
    disk = CubinCache(tmp_path / "c")
    threads = [threading.Thread(target=disk.put, args=("key", b"code" * 10000)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["key.cubin"] and disk.get("key") == b"code" * 10000


def test_place_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cubins.default_folder() == tmp_path / "commfuse_dp" / "cubins"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cubins.default_folder() == Path("/home/somebody/.cache/commfuse_dp/cubins")


@pytest.mark.slow
def test_imports_cost_nothing_and_compile_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import commfuse_dp.kernels.inbox_sum, commfuse_dp.kernels.publish; "
        "print([m for m in sys.modules if m not in before and m.split('.')[0] in ('cuda', 'triton')])"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.strip() == "[]" and not list(tmp_path.iterdir()), done.stderr


def test_fallback_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_warned", set())
    with pytest.warns(RuntimeWarning, match=r"inbox_sum runs by torch's own operations .*: no compiler"):
        nvrtc.warn_of_fallback("inbox_sum", ToolchainError("no compiler"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nvrtc.warn_of_fallback("inbox_sum", ToolchainError("no compiler"))
