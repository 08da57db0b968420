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
    pairwise = "pairwise"
    ring = "ring"


class Device(str, Enum):
    cpu = "cpu"
    cuda = "cuda"


@app.callback()
def commfuse() -> None:
    """CommFuse: sharded data parallelism with communication fused into the compute of each layer."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each variant.")] = 48,
    world_size: Annotated[int, typer.Option(min=1, max=64, help="Ranks; each is a process of this host.")] = 2,
    transport: Annotated[Transport, typer.Option(help="How CommFuse moves bytes.")] = Transport.auto,
    order: Annotated[Order, typer.Option(help="Order of a collective.")] = Order.pairwise,
    link: Annotated[
        str, typer.Option(metavar="RATE", help="Join the ranks by a shaped link, e.g. 1gbit (needs root); none: one host.")
    ] = "none",
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and the batches.")] = 1,
    device: Annotated[Device, typer.Option(help="cpu, or cuda (NCCL; not yet run on a GPU).")] = Device.cpu,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for summary.json, timeline.png and trace.json.")] = Path(
        "runs/demo"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the ranks' rendezvous; 0: a free one.")] = 0,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Training ends early, after a round of all variants, to keep to this.")
    ] = 2.75,
) -> None:
    """Train a byte-level GPT with stock FSDP2 and with CommFuse, side by side, and compare them."""
    from commfuse_dp.cli.demo import run_demo

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 110)  # in a log nobody is served by narrow columns
    try:
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


if __name__ == "__main__":
    app()
