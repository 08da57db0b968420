"""The `commfuse` command. Each subcommand imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from commfuse_dp.errors import CommFuseError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class Transport(str, Enum):
    auto = "auto"
    shm = "shm"
    tcp = "tcp"
    p2p = "p2p"


class Order(str, Enum):
    auto = "auto"
    pairwise = "pairwise"
    ring = "ring"
    hierarchical = "hierarchical"


class Device(str, Enum):
    cpu = "cpu"
    cuda = "cuda"


@app.callback()
def commfuse() -> None:
    """CommFuse: sharded data parallelism with communication fused into the compute of each layer."""


# Not a docstring: its line breaks would be kept on terminals of any width.
_DEMO_HELP = (
    "Train a byte-level GPT with stock FSDP2 and with CommFuse, side by side, and compare them.\n\n"
    "Both start from the same weights, see the same text (the source of Python's standard library) and take turns on the same "
    "ranks; a third model computes without communication: the floor. Shows loss, time a step, exposed communication and bytes "
    "moved, and draws the timeline of one step of each.\n\n"
    "Examples: `commfuse demo`, `commfuse demo --link 1gbit`, `commfuse demo --world-size 3 --steps 12`"
)


@app.command(help=_DEMO_HELP, short_help="Train with stock FSDP2 and with CommFuse, side by side, and compare them.")
def demo(
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Training steps of each variant, at most.")] = 32,
    world_size: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Ranks; each is a process of this host.")] = 2,
    transport: Annotated[
        Transport,
        typer.Option(help="How CommFuse moves bytes. auto: shm if all ranks share a host, else tcp; cuda: symmetric or p2p."),
    ] = Transport.auto,
    order: Annotated[
        Order,
        typer.Option(
            help="Which peer comes first: r+1, r+2, ... (pairwise) or r-1, r-2, ... (ring); hierarchical is for several hosts."
        ),
    ] = Order.auto,
    link: Annotated[
        str,
        typer.Option(
            metavar="RATE",
            help="Join the ranks by a shaped network link instead, e.g. 1gbit, 2.5gbit, 800mbit. Linux, needs root.",
        ),
    ] = "none",
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the weights and the batches.")] = 1,
    device: Annotated[Device, typer.Option(help="cuda (with NCCL) needs a GPU for each rank.")] = Device.cpu,
    out: Annotated[
        Path, typer.Option(file_okay=False, metavar="FOLDER", help="For summary.json, timeline.png and trace.json.")
    ] = Path("runs/demo"),
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Of the ranks' rendezvous; 0: a free one is found.")
    ] = 0,
    minutes: Annotated[
        float,
        typer.Option(
            min=0.1, metavar="M", help="Time for the whole run: on a slow machine both variants train fewer steps instead."
        ),
    ] = 3.5,
) -> None:
    """Train a byte-level GPT with stock FSDP2 and with CommFuse, side by side, and compare them."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 110)  # in a log nobody is served by narrow columns
    try:
        from commfuse_dp.examples.demo.run import run_demo  # imports torch: within reach of Ctrl-C

        run_demo(
            steps=steps,
            world_size=world_size,
            transport=transport.value,
            order=order.value,
            link=link,
            seed=seed,
            device=device.value,
            out=out,
            port=port,
            minutes=minutes,
            console=console,
        )
    except CommFuseError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; all ranks have been ended.", style="yellow")
        raise typer.Exit(130) from None
    except SystemExit as error:  # SIGTERM, by way of the clean-up
        Console(stderr=True).print("ended by a signal; all ranks have been ended.", style="yellow")
        raise typer.Exit(error.code if isinstance(error.code, int) else 1) from None


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """Versions, devices, transports and integrations that work here, and why the others do not: for bug reports."""
    from commfuse_dp.cli.env import run_env

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 128)
    run_env(as_json=as_json, console=console)


if __name__ == "__main__":
    app()
