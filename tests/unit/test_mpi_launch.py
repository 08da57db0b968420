"""Who started this process, which library mpi4py has, where rank 0 is: without an MPI job."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commfuse_dp import mpi_launch
from commfuse_dp.errors import ConfigError, TransportError
from commfuse_dp.transport.two_sided import mpi
from tests.support.mpi import ROOT, mpiexec
from tests.support.threads import ExchangeFn, run_ranks

needs_mpi = pytest.mark.skipif(mpiexec() is None, reason="needs mpi4py and mpiexec (pip install mpi4py mpich)")
PREFIXES = ("PMI", "OMPI_", "MPI_LOCAL", "MV2_", "SLURM_", "TORCHELASTIC_", "MASTER_")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(PREFIXES) or name in ("RANK", "WORLD_SIZE", "COMMFUSE_TCP_ADDRESS", "GLOO_SOCKET_IFNAME"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, None),  # srun without MPI
        ({"RANK": "0", "WORLD_SIZE": "2"}, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}, ("PMI", 1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}, ("Open MPI", 0, 2)),
        ({"PMIX_RANK": "3", "SLURM_STEP_NUM_TASKS": "8"}, ("PMIx", 3, 8)),
        ({"PMIX_RANK": "3"}, ("PMIx", 3, None)),
        ({"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "3"}, ("MVAPICH2", 2, 3)),
        ({"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"}, ("Hydra", None, None)),
    ],
)
def test_launcher(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: tuple[Any, ...] | None) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = mpi_launch.launcher()
    assert mpi_launch.under_mpi() == (expected is not None)
    if expected is None:
        assert found is None
    else:
        assert found is not None and found.name.startswith(expected[0]) and found[1:] == expected[1:]
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun within mpiexec: torchrun's numbers count
        assert not mpi_launch.under_mpi()
        with pytest.raises(ConfigError, match="torchrun"):
            mpi_launch.export_environment()


def _python(code: str, **environment: str) -> str:
    """Output and errors of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr


EXPORT = "from commfuse_dp import mpi_launch; print(mpi_launch.export_environment())"


@needs_mpi
def test_library_of_another_mpi_is_named() -> None:
    """Every process is alone in a world of its own, though the launcher started four."""
    text = _python(EXPORT, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="4")
    for part in ("TransportError", "Open MPI", "4 processes", "world of 1", "built for another MPI", "which mpiexec", "mpicc"):
        assert part in text, (part, text)


@needs_mpi
def test_one_process_without_a_launcher() -> None:
    text = _python(EXPORT, COMMFUSE_TRANSPORT="tcp", MASTER_PORT="12345")
    expected = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    assert ast.literal_eval(text.strip()) == {**expected, "MASTER_PORT": "12345", "COMMFUSE_TRANSPORT": "tcp"}, text


@needs_mpi
def test_contradicting_variables_are_refused() -> None:
    text = _python(EXPORT, RANK="2", WORLD_SIZE="4")
    assert "ConfigError" in text and "RANK='2'" in text and "WORLD_SIZE='4' in the environment, 1 by MPI" in text
    assert "Unset RANK" in text


@needs_mpi
@pytest.mark.parametrize(("level", "refused"), [("single", "SINGLE"), ("funneled", "FUNNELED"), ("serialized", "")])
def test_thread_levels(level: str, refused: str) -> None:
    text = _python(f"import mpi4py; mpi4py.rc.thread_level = {level!r}; {EXPORT}")
    if refused:
        assert f"MPI_THREAD_{refused}" in text and "mpi4py.rc.thread_level = 'multiple'" in text, text
    else:
        assert "'RANK': '0'" in text, text


@needs_mpi
def test_after_finalize() -> None:
    assert "has been finalised" in _python(f"from mpi4py import MPI; MPI.Finalize(); {EXPORT}")


def test_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_launch.importlib.util, "find_spec", lambda name: None)
    text = mpi_launch.obstacle()
    assert text is not None and "not installed" in text and "pip install mpi4py" in text
    with pytest.raises(TransportError, match="pip install mpi4py"):
        mpi_launch.load()
    with pytest.raises(TransportError, match=r"2 of 2 ranks.*rank 0.*pip install mpi4py"):
        run_ranks(2, lambda rank, exchange: mpi.open_lanes(exchange))


@needs_mpi
def test_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(sys.modules)
    assert mpi_launch.obstacle() is None
    assert "mpi4py.MPI" not in set(sys.modules) - before, "asking must not initialise MPI"
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setattr(mpi_launch, "library", lambda: "=Open MPI v5.0.8")
    text = mpi_launch.obstacle()
    assert text is not None and "built for another MPI" in text and "Open MPI v5.0.8" in text
    monkeypatch.setattr(mpi_launch, "library", lambda: "ImportError: libmpi.so.12: cannot open shared object file")
    text = mpi_launch.obstacle()
    assert text is not None and "libmpi.so.12" in text and "pip install" in text


@pytest.mark.slow
@needs_mpi
def test_transport_without_a_launcher() -> None:
    """torchrun and transport 'mpi': every rank is alone in its MPI world."""
    code = (
        "from commfuse_dp.transport.two_sided.mpi import open_lanes; from tests.support.threads import run_ranks\n"
        "run_ranks(2, lambda rank, exchange: open_lanes(exchange))"
    )
    text = _python(code)
    for part in ("TransportError", "not different processes of one MPI job", "[0, 0]", "mpiexec -n 2", "'auto'"):
        assert part in text, (part, text)


# ---- where rank 0 is -----------------------------------------------------------------------------------------------------
class FakeWorld:
    """The collectives of mpi4py that finding rank 0 takes, among threads."""

    def __init__(self, rank: int, size: int, exchange: ExchangeFn) -> None:
        self.rank, self.size, self.allgather = rank, size, exchange

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def bcast(self, item: Any, root: int) -> Any:
        return self.allgather(item)[root]

    def allreduce(self, number: int) -> int:
        return sum(self.allgather(number))


def meet(candidates: list[str], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    monkeypatch.setattr(mpi_launch, "own_addresses", lambda: candidates)
    return run_ranks(
        3,
        lambda rank, exchange: mpi_launch._rendezvous(FakeWorld(rank, 3, exchange), host_leader=rank != 1, one_host=False),
    )


def test_the_address_that_answers_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that cannot be reached and one at which somebody else answers are passed over."""
    found = meet(["255.255.255.255", "127.0.0.1"], monkeypatch)
    assert len(set(found)) == 1 and found[0][0] == "127.0.0.1" and 0 < int(found[0][1]) < 65536


def test_no_address_is_named_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransportError, match=r"255\.255\.255\.255.*MASTER_ADDR"):
        meet(["255.255.255.255"], monkeypatch)


def test_given_address_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.setenv("MASTER_PORT", "4711")
    assert meet([], monkeypatch) == [("node7", "4711")] * 3


@pytest.fixture
def stranger() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=mpi_launch._answer, args=(server, b"x" * 16), daemon=True).start()
        yield server.getsockname()[1]


def test_a_stranger_is_not_rank_0(stranger: int) -> None:
    assert mpi_launch._answers("127.0.0.1", stranger, b"x" * 16)
    assert not mpi_launch._answers("127.0.0.1", stranger, b"y" * 16)


def test_own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [address for address in mpi_launch.own_addresses() if address.startswith("127.")]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch,lo")
    assert mpi_launch.own_addresses() == ["127.0.0.1"]
    monkeypatch.setenv("COMMFUSE_TCP_ADDRESS", "10.1.2.3")
    assert mpi_launch.own_addresses() == ["10.1.2.3"]


def test_import_is_light() -> None:
    code = "import sys, commfuse_dp.mpi_launch; print([m for m in ('torch', 'mpi4py', 'numpy') if m in sys.modules])"
    assert _python(code).startswith("[]")
    assert Path(mpi_launch.__file__).exists()
