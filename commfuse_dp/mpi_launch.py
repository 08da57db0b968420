"""Started by an MPI launcher: who this process is, and the variables of torch.distributed made from it.

    mpiexec -n 4 python -m commfuse_dp.run train.py        calls export_environment() before the script runs

Foundation: imports neither torch nor, until it is asked for, mpi4py.

[Note: How an MPI job ends]
`MPI_Finalize` is collective. mpi4py calls it when the interpreter ends, and so a rank that ends by an exception would wait
there, spinning, for peers that compute, or that wait for it somewhere where nobody tells them. Once MPI is in use here, an
uncaught exception therefore ends the whole job: the traceback is printed, the transports say goodbye (so that peers that wait
in them raise an error that names this rank), peers get LINGER_S seconds to print theirs, then `MPI_Abort` is called. `python
-m mpi4py` does the same, but for the goodbye. MPICH removes its shared memory in MPI_Finalize alone, so this process removes
that of its host before it aborts. A clean end is left to mpi4py.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import importlib
import importlib.util
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Any, NamedTuple

from commfuse_dp.errors import ConfigError, TransportError
from commfuse_dp.ports import free_port

LINGER_S = 2.0
PROBE_S = 3.0  # longest wait for one address of rank 0 to answer
INSTALL = "pip install mpi4py (built for the MPI whose mpiexec you use)"

_TORCHRUN = "TORCHELASTIC_RUN_ID"
_ADDRESS, _INTERFACE, _TRANSPORT = "COMMFUSE_TCP_ADDRESS", "GLOO_SOCKET_IFNAME", "COMMFUSE_TRANSPORT"
_SIOCGIFADDR = 0x8915
_TOKEN_BYTES = 16


class Launcher(NamedTuple):
    """What the environment says of the launcher that started this process."""

    name: str
    rank: int | None  # None: it does not say
    world_size: int | None


# The variables (rank, world size) by which each family of launchers is known, the most telling first.
_KNOWN = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    ("MVAPICH2", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",)),
    ("PMI (MPICH, Intel MPI or SLURM)", "PMI_RANK", ("PMI_SIZE",)),
    ("PMIx (SLURM or PRRTE)", "PMIX_RANK", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
)
_LOCAL_ONLY = ("MPI_LOCALNRANKS", "MPI_LOCALRANKID")  # Hydra: numbers within the host


def launcher() -> Launcher | None:
    """The MPI launcher that started this process, from the environment alone; None: there is no sign of one."""
    for name, rank, sizes in _KNOWN:
        found = [size for size in map(_integer, sizes) if size is not None]
        if _integer(rank) is not None or (found and not name.startswith("PMIx")):
            return Launcher(name, _integer(rank), found[0] if found else None)
    if all(_integer(variable) is not None for variable in _LOCAL_ONLY):
        return Launcher("Hydra", None, None)
    return None


def under_mpi() -> bool:
    """True if an MPI launcher started this process directly. False for a child of torchrun, wherever torchrun itself runs."""
    return launcher() is not None and _TORCHRUN not in os.environ


def load() -> Any:
    """`mpi4py.MPI`, initialised and usable from more than one thread.

    Raises TransportError, with the fix: mpi4py or its MPI library is missing, MPI has been finalised, threads are not allowed,
    or the library is not the one of the launcher (each process would be alone in a world of its own).
    """
    if importlib.util.find_spec("mpi4py") is None:
        raise TransportError(f"MPI was asked for, but mpi4py is not installed: {INSTALL}")
    try:
        MPI = importlib.import_module("mpi4py.MPI")  # initialises MPI, unless the program said mpi4py.rc.initialize = False
    except (ImportError, RuntimeError) as error:
        raise TransportError(f"mpi4py is installed, but cannot load an MPI library ({error}): {INSTALL}") from error
    if MPI.Is_finalized():
        raise TransportError("MPI has been finalised: it cannot be used any more in this process. Call MPI.Finalize later.")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    level = MPI.Query_thread()
    if level < MPI.THREAD_SERIALIZED:
        name = {MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE", MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED"}.get(level, level)
        raise TransportError(
            f"MPI was initialised with thread level {name}; CommFuse moves data in a thread of its own and needs "
            "MPI_THREAD_MULTIPLE (or SERIALIZED, if nothing else in the program calls MPI). Set mpi4py.rc.thread_level = "
            "'multiple' (mpi4py's default) before anything imports mpi4py.MPI, and use an MPI library built with threads."
        )
    if (problem := _mismatch(launcher(), MPI.COMM_WORLD.Get_size(), _first_line(MPI.Get_library_version()))) is not None:
        raise TransportError(problem)
    _end_job_on_error(os.getpid())
    return MPI


def obstacle() -> str | None:
    """Why MPI cannot be used in this installation; None: it can, in processes that an MPI launcher starts.

    MPI is not initialised in this process; a process of its own tries whether the library can be loaded (about 0.2 s).
    """
    if importlib.util.find_spec("mpi4py") is None:
        return f"mpi4py is not installed: {INSTALL}"
    loaded = sys.modules.get("mpi4py.MPI")
    version = None if loaded is None else _first_line(loaded.Get_library_version())
    if version is None:
        answer = library()
        if not answer.startswith("="):
            return f"mpi4py cannot load an MPI library ({answer}): {INSTALL}"
        version = answer[1:]
    found = launcher()
    if found is not None and (family := _family(version)) is not None and family not in found.name and found.rank is not None:
        return _wrong_library(f"the launcher's variables are those of {found.name}", version)
    return None


def export_environment() -> dict[str, str]:
    """Collective over all processes of the MPI job: set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT, and COMMFUSE_TRANSPORT=mpi unless it is set. MASTER_ADDR and MASTER_PORT of rank 0's environment are kept.

    Returns what was set. Raises ConfigError, on all ranks, if variables that are set already contradict MPI's numbers;
    TransportError from `load`, or if no address of rank 0 can be reached from the other hosts.
    """
    if _TORCHRUN in os.environ:
        raise ConfigError(
            "this process was started by torchrun, so its rank comes from torchrun and not from MPI. Leave out torchrun "
            "(mpiexec -n N python -m commfuse_dp.run train.py) or mpiexec (torchrun ... -m commfuse_dp.run train.py)."
        )
    MPI = load()
    world = MPI.COMM_WORLD
    rank, world_size = world.Get_rank(), world.Get_size()
    local = world.Split_type(MPI.COMM_TYPE_SHARED, key=rank)
    local_rank, local_size = local.Get_rank(), local.Get_size()
    local.Free()
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    # What the shared-memory split says of the host must not contradict what a user or another launcher has set; the first two
    # are the program's identity, the local ones may differ on purpose (one container per process).
    wrong = [
        f"{name}={os.environ[name]!r} in the environment, {numbers[name]} by MPI"
        for name in ("RANK", "WORLD_SIZE")
        if os.environ.get(name) not in (None, "", str(numbers[name]))
    ]
    everyone = world.allgather("; ".join(wrong))
    failures = [f"rank {other}: {text}" for other, text in enumerate(everyone) if text]
    if failures:
        raise ConfigError(
            f"the environment contradicts the MPI launcher ({failures[0]}; {len(failures)} of {world_size} ranks). "
            "Unset RANK and WORLD_SIZE where mpiexec starts the job, or start it without mpiexec."
        )
    address, port = _rendezvous(world, host_leader=local_rank == 0, one_host=local_size == world_size)
    made = {name: str(value) for name, value in numbers.items()}
    made |= {"MASTER_ADDR": address, "MASTER_PORT": port, _TRANSPORT: os.environ.get(_TRANSPORT) or "mpi"}
    os.environ.update(made)
    return made


def mark_failed() -> None:
    """This process ends with an error that `sys.excepthook` does not see, for example `sys.exit(1)`: end the job as if it had
    raised. Without MPI in use it does nothing."""
    global _failed
    _failed = True


def has_failed() -> bool:
    """True once this process is known to end with an error: its peers are not waited for any more than the end needs."""
    return _failed


# ---- which library -----------------------------------------------------------------------------------------------------
def _mismatch(found: Launcher | None, world_size: int, version: str) -> str | None:
    if found is None or found.world_size is None or found.world_size == world_size:
        return None
    return _wrong_library(
        f"the launcher ({found.name}) started {found.world_size} processes, but mpi4py sees a world of {world_size}", version
    )


def _wrong_library(symptom: str, version: str) -> str:
    return (
        f"{symptom}: mpi4py was built for another MPI than the launcher's. mpi4py uses {version}. Start the job with the "
        "mpiexec of that MPI (check `which mpiexec`), or build mpi4py for the launcher's MPI: "
        "pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py, with its mpicc first in PATH."
    )


def _family(version: str) -> str | None:
    """A word of Launcher.name that belongs to this library; None: unknown, or started by several kinds of launchers."""
    return "Open MPI" if version.startswith("Open MPI") else None


def _first_line(version: str) -> str:
    return " ".join(version.split("\n", 1)[0].split()).strip("\0 ,")


@functools.cache
def library() -> str:
    """ "=" and the version of the MPI library that mpi4py loads, or the error. Asked in a process of its own, which an MPI that
    does not fit may end."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print('=' + MPI.Get_library_version())"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI_", "MPI_LOCAL"))}
    clean["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=clean, capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return "=" + _first_line(done.stdout.lstrip("="))
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _integer(variable: str) -> int | None:
    try:
        return int(os.environ[variable])
    except (KeyError, ValueError):
        return None


# ---- where rank 0 is ---------------------------------------------------------------------------------------------------
def _rendezvous(world: Any, *, host_leader: bool, one_host: bool) -> tuple[str, str]:
    """Collective. Address and port of rank 0 for all ranks: what its environment says, else one that was tried."""
    rank = world.Get_rank()
    given = world.bcast((os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")), root=0)
    if given[0]:
        address = given[0]
    elif world.allreduce(int(one_host)) == world.Get_size():
        address = "127.0.0.1"
    else:
        address = _reachable_address(world, tries=host_leader)
    port = given[1] or world.bcast(str(free_port()) if rank == 0 else None, root=0)
    return address, port


def _reachable_address(world: Any, *, tries: bool) -> str:
    """Collective. The first address of rank 0 at which all other hosts really reach it: every candidate is tried."""
    rank = world.Get_rank()
    token = secrets.token_bytes(_TOKEN_BYTES)
    listener = None
    if rank == 0:
        listener = socket.create_server(("", 0), backlog=1024)
        threading.Thread(target=_answer, args=(listener, token), name="commfuse-mpi-address", daemon=True).start()
    card = (own_addresses(), listener.getsockname()[1], token) if listener is not None else None
    candidates, port, token = world.bcast(card, root=0)
    reached = [host for host in candidates if _answers(host, port, token)] if tries and rank else None
    answers = [answer for answer in world.allgather(reached) if answer is not None]
    if listener is not None:
        listener.close()
    for host in candidates:
        if all(host in answer for answer in answers):
            return str(host)
    raise TransportError(
        f"no address of rank 0 can be reached from all hosts of the MPI job; tried {', '.join(candidates) or 'none'}, "
        f"reached: {answers}. Is there a firewall? Set MASTER_ADDR (on rank 0) to an address that all hosts reach, or "
        f"{_INTERFACE} to the interface to use."
    )


def own_addresses() -> list[str]:
    """IPv4 addresses of this host that other hosts may reach, the most likely first: what the environment names, else that of
    the host's name, else those of all interfaces but loopback."""
    if os.environ.get(_ADDRESS):
        return [os.environ[_ADDRESS]]
    interfaces = [name for _, name in socket.if_nameindex()]
    if os.environ.get(_INTERFACE):
        wanted = os.environ[_INTERFACE].split(",")
        return [address for name in wanted if (address := address_of(name)) is not None]
    found = []
    with contextlib.suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    found += [address for name in interfaces if (address := address_of(name)) is not None]
    return [address for address in dict.fromkeys(found) if not address.startswith("127.")]


def address_of(interface: str) -> str | None:
    """Its IPv4 address; None: it has none, or there is no such interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _answer(listener: socket.socket, token: bytes) -> None:
    with contextlib.suppress(OSError):  # ends when the listener is closed
        while True:
            caller, _ = listener.accept()
            with caller, contextlib.suppress(OSError):
                caller.sendall(token)


def _answers(host: str, port: int, token: bytes) -> bool:
    """True if it is rank 0 that answers there: a private address may belong to another host in another place."""
    text = b""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=PROBE_S) as call:
        while len(text) < len(token) and (piece := call.recv(len(token) - len(text))):
            text += piece
    return text == token


# ---- the end of a job --------------------------------------------------------------------------------------------------
_failed = False


@functools.cache
def _end_job_on_error(pid: int) -> None:
    """See [Note: How an MPI job ends]. Once per process."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        mark_failed()
        previous(kind, error, trace)

    sys.excepthook = hook
    atexit.register(_abort_if_failed, pid)  # before the transports register: functions run in reverse order, so after them


def _abort_if_failed(pid: int) -> None:
    MPI = sys.modules.get("mpi4py.MPI")
    if not _failed or os.getpid() != pid or MPI is None or MPI.Is_finalized() or not MPI.Is_initialized():
        return
    if MPI.COMM_WORLD.Get_size() > 1:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        time.sleep(LINGER_S)
        for segment in mpich_segments():
            with contextlib.suppress(OSError):  # a peer of this host that aborts, too, was first
                os.unlink(segment)
        MPI.COMM_WORLD.Abort(1)


def mpich_segments() -> list[str]:
    """The files in /dev/shm by which MPICH shares memory between this process and its peers on this host."""
    with open("/proc/self/maps") as file:
        return sorted({line.split(maxsplit=5)[5].strip() for line in file if "/dev/shm/mpich_shm_" in line})
