"""``bagua bench network``: bandwidth and latency between daemons."""

from __future__ import annotations

import typer

from bagua.base.errors import UsageError
from bagua.bench import plots
from bagua.bench.report import NETWORK, Row, matrix, network_rows
from bagua.bench.units import parse_sizes
from bagua.cli.bench import common
from bagua.cli.command import command
from bagua.cli.options import CoordinatorOption, TlsOption, TokenFileOption, checked


@command()
def network(
    *,
    nnodes: int | None = typer.Option(
        None, "--nnodes", min=2, max=256, help="Node daemons. Default: 2; of a cluster: all."
    ),
    size: str = typer.Option("16M", help="Bytes of one message that measures bandwidth."),
    seconds: common.SecondsOption = 1.0,
    rounds: common.RoundsOption = 5,
    emulate: common.EmulateOption = None,
    report: common.Report,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Bandwidth and latency from every daemon to every other, on the path that
    gradients take; pair after pair, while the others are silent.

    us one way: half a round trip of 8 bytes between ranks, so both daemons are
    on the way. Gbit/s: payload of a message over the time until its answer of 8
    bytes is back, less such a round trip. With --coordinator, on the nodes of
    that cluster; else on daemons started here.
    """
    from bagua.cli.bench.tasks import Task, measure, measure_on_cluster
    from bagua.cli.display.tables import table

    if coordinator and emulate:
        raise UsageError("--coordinator and --emulate exclude each other. [BG103]")
    sizes = checked(parse_sizes, size)
    settings = {"size": sizes[0], "seconds": seconds, "rounds": rounds}
    rows: list[Row] = []
    if coordinator:
        found, names = measure_on_cluster(
            lambda nodes: Task("bagua.bench.ranks.network", settings, nodes, 1, quiet=report.quiet, result="-"),
            nnodes,
            (coordinator, token_file, tls),
        )
        rows = network_rows(found["rows"], None, names)
    else:
        networks, nodes = common.networks_of(emulate, nnodes or 2)
        for wire in networks:
            task = Task("bagua.bench.ranks.network", settings, nodes, 1, quiet=report.quiet)
            names = {rank: f"node-{rank}" for rank in range(nodes)}
            rows += network_rows(measure(task, wire)["rows"], wire.name if wire else None, names)
    if any(row["network"] for row in rows):
        report.show_table("network", settings, rows, NETWORK, plots.plot_network)
    else:
        report.show("network", settings, rows, lambda: table(*matrix(rows)), plots.plot_network)
