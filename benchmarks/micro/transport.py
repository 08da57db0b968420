"""What a transport costs: time of an exchange between two ranks, and CPU seconds per GB.

    python -m benchmarks.micro.transport                            two ranks of this host
    python -m benchmarks.micro.transport --link 2gbit --rounds 5    the same over a shaped link (needs root; no shm)
    python -m benchmarks.micro.transport --variants gloo,tcp,mpi    started by the mpiexec of PATH or beside this Python

An exchange: both ranks fetch `size` bytes from each other at the same time. `pull` fetches a published slice (shm: sums it in
place, so that its bytes are really read), `message` sends a gradient slice. Variants:
    shm       shared memory                         tcp            sockets
    p2p       torch.distributed, one-sided
    mpi       MPI (not among the defaults: it changes how the ranks are started)
    gloo      bare isend + irecv + wait of torch.distributed: the price of the stock path, without any protocol

All variants alternate within one launch, size by size and round by round. CPU seconds are those of both processes with all
their threads; what the kernel's network stack does outside of them is the `softirq` column (whole machine, ticks of 10 ms: only
meaningful while nothing else uses the network). A card does in hardware what the virtual link does there.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commfuse_dp import mpi_launch
from commfuse_dp.transport.base import CHANNEL_GRAD, PullRequest, Sending, Tag, Transport
from commfuse_dp.transport.exchange import exchange_of

WORLD_SIZE = 2
SIZES = (64 << 10, 1 << 20, 5 << 20, 16 << 20)
DEFAULT_VARIANTS = ("shm", "tcp", "p2p", "gloo")
VARIANTS = (*DEFAULT_VARIANTS, "mpi")
# Of MPICH and UCX; other MPIs do not know them. Without them, ranks in two namespaces of one machine would share memory.
MPI_OVER_THE_LINK = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self"}
DEADLINE_S = 60.0
GB = 1e9
_RESULT = "RESULT "


# ---- in the ranks ----------------------------------------------------------------------------------------------------
def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _softirq_s() -> float:
    with open("/proc/stat") as file:
        fields = file.readline().split()
    return (int(fields[6]) + int(fields[7])) / os.sysconf("SC_CLK_TCK")


def _exchanges(name: str, pattern: str, largest: int) -> Iterator[Callable[[int, int], None] | None]:
    """Yields a function exchange(size, count), then (resumed) closes what it needs."""
    rank = dist.get_rank()
    peer = 1 - rank
    if name == "gloo":
        out, mine = torch.empty(largest, dtype=torch.uint8), torch.full((largest,), rank, dtype=torch.uint8)

        def bare(size: int, count: int) -> None:
            for _ in range(count):
                works = [dist.irecv(out[:size], peer), dist.isend(mine[:size], peer)]
                for work in works:
                    assert work is not None
                    work.wait()

        yield bare
        return
    transport = _open(name, largest)
    try:
        transport.expose([[largest, largest]])
        transport.segments[0].fill_(rank)
        transport.publish((0,), 1)
        window = None if transport.in_place else torch.zeros(largest, dtype=torch.uint8)
        number = 0

        def pull(size: int, count: int) -> None:
            for _ in range(count):
                out = None if window is None else window[:size]
                got = transport.pull(1, (PullRequest(peer, 0, 0, size, out),))[0].wait()
                if window is None:
                    got.view(torch.int64).sum()
                assert got[0] == peer and got[-1] == peer

        def message(size: int, count: int) -> None:
            nonlocal number
            for _ in range(count):
                number += 1
                tag = Tag(CHANNEL_GRAD, seq=number)
                while not (room := transport.reserve((peer,), (size,))):
                    transport.progress(0.01)
                transport.send((Sending(peer, tag, room[0]),))
                got = transport.receive((peer,), tag)[0]
                if window is None:
                    got.view(torch.int64).sum()
                transport.release((peer,), tag)

        yield pull if pattern == "pull" else message
    finally:
        transport.close()


def _open(name: str, largest: int) -> Transport:
    settings: dict[str, Any] = {"inbox_bytes": 2 * largest, "deadline_s": DEADLINE_S}
    exchange = exchange_of(None)
    if name == "shm":
        from commfuse_dp.transport.shm.transport import ShmTransport

        return ShmTransport(dist.get_rank(), WORLD_SIZE, exchange, **settings)
    if name == "p2p":
        from commfuse_dp.transport.two_sided.paired import open_p2p

        return open_p2p(None, **settings)
    if name == "mpi":
        from commfuse_dp.transport.two_sided.mpi import MpiTransport

        return MpiTransport(dist.get_rank(), WORLD_SIZE, exchange, **settings)
    from commfuse_dp.transport.tcp.transport import TcpTransport

    return TcpTransport(dist.get_rank(), WORLD_SIZE, exchange, **settings)


def worker(options: argparse.Namespace) -> None:
    """One rank. Rank 0 prints the samples of both."""
    torch.set_num_threads(1)
    if mpi_launch.under_mpi():
        mpi_launch.export_environment()
    dist.init_process_group("gloo")
    exchange = exchange_of(None)
    samples: dict[str, list[tuple[float, float, float]]] = {}
    opened = {name: _exchanges(name, options.pattern, max(options.sizes)) for name in options.variants}
    run = {name: next(generator) for name, generator in opened.items()}
    for size in options.sizes:
        count = max(3, options.block_bytes // size)
        for turn in range(options.rounds + 1):
            for name in options.variants:
                dist.barrier()
                softirq, cpu, start = _softirq_s(), _cpu_s(), time.perf_counter()
                run[name](size, count)
                seconds, used = (time.perf_counter() - start) / count, _cpu_s() - cpu
                both = exchange((seconds, used, _softirq_s() - softirq))
                if turn and dist.get_rank() == 0:  # the first turn warms up buffers and congestion windows
                    gigabytes = WORLD_SIZE * count * size / GB
                    samples.setdefault(f"{name} {size}", []).append(
                        (
                            statistics.mean(s for s, _, _ in both),
                            sum(c for _, c, _ in both) / gigabytes,
                            statistics.mean(i for _, _, i in both) / gigabytes,
                        )
                    )
    for generator in opened.values():
        next(generator, None)
    dist.destroy_process_group()
    if samples:
        print(_RESULT + json.dumps(samples), flush=True)


# ---- outside ---------------------------------------------------------------------------------------------------------
def launch(options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Run both ranks, here or in a shaped world, which is removed whatever happens."""
    from commfuse_dp.launch.netns import shaped_world
    from commfuse_dp.launch.ranks import Ranks
    from commfuse_dp.ports import free_port

    root = str(Path(__file__).resolve().parents[2])
    common = {"WORLD_SIZE": str(WORLD_SIZE), "OMP_NUM_THREADS": "1"}
    common["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "benchmarks.micro.transport", "--worker", *sys.argv[1:]]

    def collect(prefixes: list[list[str]], extra: list[dict[str, str]]) -> dict[str, list[list[float]]]:
        environments = [{**common, **extra[rank], "RANK": str(rank)} for rank in range(WORLD_SIZE)]
        commands = [[*prefix, *command] for prefix in prefixes]
        if "mpi" in options.variants:
            commands, environments = [_mpi_job(commands, environments)], [{}]
        with Ranks(commands, environments) as ranks:
            for line in ranks.lines():
                if line.text.startswith(_RESULT):
                    found = json.loads(line.text[len(_RESULT) :])
        return found

    if options.link is None:
        local = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        return collect([[]] * WORLD_SIZE, [local] * WORLD_SIZE)
    with shaped_world(WORLD_SIZE, options.link, mtu=options.mtu) as world:
        shaped = [{**world.environment(rank), **MPI_OVER_THE_LINK, "MASTER_PORT": "29500"} for rank in range(WORLD_SIZE)]
        return collect([world.command_prefix(rank) for rank in range(WORLD_SIZE)], shaped)


def _mpi_job(commands: list[list[str]], environments: list[dict[str, str]]) -> list[str]:
    """One mpiexec for both ranks, each with its own command and variables."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    launcher = shutil.which("mpiexec", path=path)
    if launcher is None:
        raise SystemExit(
            "--variants mpi needs mpiexec in PATH, of the MPI that mpi4py was built for (pip install mpi4py mpich)"
        )
    job = [launcher]
    for rank, (command, environment) in enumerate(zip(commands, environments, strict=True)):
        settings = [f"{name}={value}" for name, value in environment.items()]
        job += [":"] if rank else []
        job += ["-n", "1", "env", *settings, *command]
    return job


def show(found: dict[str, list[list[float]]]) -> None:
    print(f"{'variant':14}{'size':>10}{'median ms':>11}{'p20':>9}{'p80':>9}{'MB/s each way':>15}{'CPU s/GB':>10}{'softirq':>9}")
    for label in sorted(found, key=lambda text: (int(text.split()[1]), text)):
        name, size = label.split()
        times = sorted(sample[0] for sample in found[label])
        median, p20, p80 = statistics.median(times), times[len(times) // 5], times[-1 - len(times) // 5]
        cpu = statistics.median(sample[1] for sample in found[label])
        softirq = statistics.mean(sample[2] for sample in found[label])
        print(
            f"{name:14}{int(size) >> 10:>7} KB{median * 1e3:>11.3f}{p20 * 1e3:>9.3f}{p80 * 1e3:>9.3f}"
            f"{int(size) / median / 1e6:>15.0f}{cpu:>10.3f}{softirq:>9.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--link", help="rate of a shaped link between the ranks, e.g. 2gbit, or 'none' for an unshaped one")
    parser.add_argument("--mtu", type=int, default=65000, help="of the shaped link, in bytes (default 65000)")
    parser.add_argument("--pattern", choices=("pull", "message"), default="pull")
    parser.add_argument(
        "--variants", type=lambda text: text.split(","), help=f"default: {','.join(DEFAULT_VARIANTS)} (no shm on a link)"
    )
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")], default=list(SIZES), help="bytes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--block-bytes", type=int, default=64 << 20, help="bytes that a rank fetches per variant and round")
    parser.add_argument("--json", type=Path, help="store the samples: [seconds, CPU s/GB, softirq s/GB] per variant and size")
    options = parser.parse_args()
    if options.variants is None:
        options.variants = [name for name in DEFAULT_VARIANTS if name != "shm" or options.link is None]
    unknown = set(options.variants) - set(VARIANTS)
    if unknown:
        parser.error(f"--variants {','.join(sorted(unknown))}: {', '.join(VARIANTS)} are allowed")
    if options.worker:
        worker(options)
        return
    found = launch(options)
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
