"""``bagua bench``: what communication costs on this machine, beside its floor and its peers."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from bagua.bench import plots, report
from bagua.bench.units import Network, choose, parse_network, parse_sizes
from bagua.cli import options
from bagua.cli.options import Output, UsageError

bench = typer.Typer(help="Measure: all-reduce, codecs, training steps, networks.", no_args_is_help=True)

CODECS = ("none", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "minmax8", "int4", "onebit", "topk")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
GLOO = "gloo"
T = TypeVar("T")

EmulateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--emulate",
        metavar="RATE[,DELAY]",
        help="Two hosts as network namespaces with such a wire between them, for example 1gbit, 100mbit,5ms (one way) "
        "or none; may be repeated. Needs root.",
        show_default=False,
    ),
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the result (needs bagua[bench]).")
]
SaveOption = Annotated[Path | None, typer.Option("--save", metavar="FILE.json", help="Write the result as JSON.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result and errors.")]
SecondsOption = Annotated[float, typer.Option("--seconds", min=0.0, help="Time for each row of systems, about.")]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, help="Rounds at the least, whatever they take.")]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, help="Computing threads of a rank.")]


def checked(parse: Callable[..., T], *arguments: Any) -> T:
    """``parse(*arguments)``; what it refuses becomes a UsageError."""
    from bagua.base.errors import ConfigError

    try:
        return parse(*arguments)
    except ConfigError as error:
        raise UsageError(str(error)) from error


def networks_of(emulate: list[str] | None, nnodes: int | None) -> tuple[list[Network | None], int]:
    """(networks to measure in, nodes): [None] is this machine as it is. Raises UsageError, also without rights."""
    from bagua.bench.emulation import check_possible

    if not emulate:
        return [None], nnodes or 1
    if nnodes not in (None, 2):
        raise UsageError(f"--emulate makes two hosts: --nnodes {nnodes} does not fit.")
    found = [checked(parse_network, text) for text in emulate]
    for network in found:
        checked(check_possible, network)
    return list(found), 2


def command_line() -> str:
    """What was called, for the report."""
    return shlex.join(["bagua", *sys.argv[1:]])


def finish(
    found: dict[str, Any],
    columns: Sequence[report.Column],
    output: Output,
    save: Path | None,
    plot: Path | None,
    draw: Callable[[dict[str, Any], Path], None],
) -> None:
    """Shows the report as it was asked for."""
    from bagua.cli.tables import table

    if save is not None:
        report.save(found, save)
    if plot is not None:
        draw(found, plot)
    if output is Output.json:
        print(json.dumps(found), flush=True)
        return
    shown = report.present(found["rows"], columns)
    table([column.heading for column in shown], report.cells(found["rows"], shown))


@bench.command()
def allreduce(
    sizes: str = typer.Option("4K,64K,1M,16M,64M", help="Bytes of the vector, with commas."),
    nnodes: int | None = typer.Option(None, "--nnodes", min=1, max=64, help="Node daemons.", show_default="1"),
    nproc_per_node: options.NprocOption = 2,
    dtype: str = typer.Option("float32", help=f"One of {', '.join(DTYPES)}."),
    codec: str = typer.Option(
        "none", help=f"How vectors cross between hosts, with commas: {', '.join(CODECS)}. One system for each."
    ),
    memory: str = typer.Option(
        "bucket", help="bucket (of bagua.empty, as gradients are), ordinary, or both with commas."
    ),
    peers: str = typer.Option(GLOO, help="gloo, or none."),
    seconds: SecondsOption = 3.0,
    rounds: RoundsOption = 3,
    threads: ThreadsOption = 1,
    emulate: EmulateOption = None,
    output: options.OutputOption = Output.text,
    plot: PlotOption = None,
    save: SaveOption = None,
    quiet: QuietOption = False,
) -> None:
    """All-reduce over sizes: Bagua and Gloo in the same processes, turn by turn; medians, of the slowest rank.

    GB/s is algorithm bandwidth: bytes of one rank's vector / time. bus GB/s is that times 2(n-1)/n for n ranks, as in
    nccl-tests: what crosses each rank's boundary at the least.

    floor, on one host: a native loop measured in the same run, one pass over memory (every rank sums its slice of all
    vectors into all results). Between emulated hosts: 2(h-1)/h of the (encoded) bytes at the rate, as TCP payload
    in Ethernet frames, less what fits into the shaper's bucket, plus one delay. "of floor" is floor / time.
    """
    from bagua.cli.bench_run import Task, measure

    systems = [
        {"name": _system_name(place, name), "memory": place, "codec": name}
        for place in checked(choose, memory, ("bucket", "ordinary"), "--memory")
        for name in checked(choose, codec, CODECS, "--codec")
    ]
    if checked(choose, peers, (GLOO, "none"), "--peers") == [GLOO]:
        systems.append({"name": GLOO, "memory": GLOO, "codec": "none"})
    checked(choose, dtype, DTYPES, "--dtype")
    if dtype != "float32" and codec != "none":
        raise UsageError(f"--codec {codec} encodes float32: leave --dtype {dtype} out.")
    if plot is not None:
        checked(plots.check, plot)
    networks, nodes = networks_of(emulate, nnodes)
    settings = {
        "nnodes": nodes,
        "nproc_per_node": nproc_per_node,
        "dtype": dtype,
        "seconds": seconds,
        "rounds": rounds,
        "threads": threads,
    }
    rows: list[report.Row] = []
    for network in networks:
        config = {
            "sizes": checked(parse_sizes, sizes),
            "systems": systems,
            "nodes": nodes,
            "emulated": network is not None,
            "rate": network.rate if network else 0.0,
            "delay_s": network.delay_s if network else 0.0,
            **settings,
        }
        task = Task(
            module="bagua.bench.ranks.allreduce",
            config=config,
            nnodes=nodes,
            nproc_per_node=nproc_per_node,
            env={"OMP_NUM_THREADS": str(threads)},
            quiet=quiet,
        )
        found = measure(task, network)["rows"]
        rows += report.allreduce_rows(found, network.name if network else None, nodes * nproc_per_node, GLOO)
    made = report.document("allreduce", command_line(), settings, rows)
    finish(made, report.ALLREDUCE, output, save, plot, plots.plot_allreduce)


def _system_name(memory: str, codec: str) -> str:
    parts = ["bagua", *(["ordinary"] if memory == "ordinary" else []), *([codec] if codec != "none" else [])]
    return " ".join(parts)
