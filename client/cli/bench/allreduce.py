"""``bagua bench allreduce``: all-reduce over sizes, beside its floor, Gloo and OpenMPI."""

from __future__ import annotations

from typing import Annotated

import typer

from bagua.base.algorithm_choice import CODECS
from bagua.base.errors import UsageError
from bagua.bench import plots
from bagua.bench.ranks import openmpi
from bagua.bench.report import ALLREDUCE, Row, allreduce_rows
from bagua.bench.units import choose, parse_sizes
from bagua.cli.bench import common
from bagua.cli.command import command
from bagua.cli.job_options import option
from bagua.cli.options import checked

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
GLOO, OPENMPI = "gloo", "openmpi"


@command()
def allreduce(
    *,
    sizes: str = typer.Option("4K,64K,1M,16M,64M", help="Bytes of the vector, with commas."),
    nnodes: int | None = typer.Option(None, "--nnodes", min=1, max=64, help="Node daemons. Default: 1."),
    nproc_per_node: Annotated[int, option("nproc_per_node")] = 2,
    dtype: str = typer.Option("float32", help=f"One of {', '.join(DTYPES)}."),
    codec: str = typer.Option(
        "none", help=f"How vectors cross between hosts, with commas: {', '.join(CODECS)}. One system for each."
    ),
    memory: str = typer.Option(
        "bucket", help="bucket (of bagua.empty, as gradients are), ordinary, or both with commas."
    ),
    peers: str = typer.Option(
        GLOO, help="gloo, openmpi (inside one host), or both with commas; x peer is against the first. Or none."
    ),
    seconds: common.SecondsOption = 3.0,
    rounds: common.RoundsOption = 3,
    threads: common.ThreadsOption = 1,
    emulate: common.EmulateOption = None,
    report: common.Report,
) -> None:
    """All-reduce over sizes: Bagua and Gloo in the same processes, OpenMPI in
    others, turn by turn; medians, of the slowest rank.

    GB/s is algorithm bandwidth: bytes of one rank's vector / time. bus GB/s is
    that times 2(n-1)/n for n ranks, as in nccl-tests: what crosses each rank's
    boundary at the least.

    floor, on one host: a native loop measured in the same run, one pass over
    memory (every rank sums its slice of all vectors into all results). Between
    emulated hosts: 2(h-1)/h of the (encoded) bytes at the rate, as TCP payload
    in Ethernet frames, less what fits into the shaper's bucket, plus one delay.
    "of floor" is floor / time.
    """
    from bagua.cli.bench.tasks import Task, measure

    systems = [
        {"name": _system_name(place, name), "memory": place, "codec": name}
        for place in checked(choose, memory, ("bucket", "ordinary"), "--memory")
        for name in checked(choose, codec, CODECS, "--codec")
    ]
    chosen = [one for one in checked(choose, peers, (GLOO, OPENMPI, "none"), "--peers") if one != "none"]
    systems += [{"name": one, "memory": one, "codec": "none"} for one in chosen]
    checked(choose, dtype, DTYPES, "--dtype")
    if dtype != "float32" and codec != "none":
        raise UsageError(f"--codec {codec} encodes float32: leave --dtype {dtype} out. [BG102]")
    networks, nodes = common.networks_of(emulate, nnodes)
    if OPENMPI in chosen:
        _check_openmpi(nodes, dtype)
    settings = {
        "nnodes": nodes,
        "nproc_per_node": nproc_per_node,
        "dtype": dtype,
        "seconds": seconds,
        "rounds": rounds,
        "threads": threads,
    }
    rows: list[Row] = []
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
        task = Task("bagua.bench.ranks.allreduce", config, nodes, nproc_per_node, quiet=report.quiet)
        found = measure(task, network)["rows"]
        peer = chosen[0] if chosen else ""
        rows += allreduce_rows(found, network.name if network else None, nodes * nproc_per_node, peer)
    report.show_table("allreduce", settings, rows, ALLREDUCE, plots.plot_allreduce)


def _check_openmpi(nodes: int, dtype: str) -> None:
    """Raises UsageError where the peer can't be measured."""
    if nodes > 1:
        raise UsageError("--peers openmpi is measured inside one host: leave --nnodes and --emulate out. [BG102]")
    if dtype not in openmpi.DATATYPES:
        raise UsageError(f"--peers openmpi has no {dtype}: choose from {', '.join(openmpi.DATATYPES)}. [BG102]")
    if lacks := openmpi.missing():
        raise UsageError(f"--peers openmpi can't be measured: {lacks}. [BG102]")


def _system_name(memory: str, codec: str) -> str:
    parts = ["bagua", *(["ordinary"] if memory == "ordinary" else []), *([codec] if codec != "none" else [])]
    return " ".join(parts)
