"""``bagua bench net``: NCCL's messages through Bagua-Net, beside plain sockets and iperf3."""

from __future__ import annotations

import shutil
import sys

import typer

from bagua.base.errors import UsageError
from bagua.bench import net
from bagua.bench.emulation import SEARCH_PATH
from bagua.bench.report import Row
from bagua.bench.units import choose, parse_sizes
from bagua.cli.bench import common
from bagua.cli.command import command
from bagua.cli.options import checked

SYSTEMS = ("bagua", "nccl", "single", "polling", "multiple", "iperf3")


def _names(systems: str, streams: int) -> list[str]:
    """The systems to measure; iperf3 only where it is installed, unless it was asked for by name."""
    names = (net.BAGUA, net.NCCL, net.SINGLE, net.POLLING, net.multiple(streams), net.IPERF)
    known = dict(zip(SYSTEMS, names, strict=True))
    installed = shutil.which(net.IPERF, path=SEARCH_PATH) is not None
    chosen = checked(choose, systems, SYSTEMS, "--systems") if systems else [*SYSTEMS[:-1], *(["iperf3"] * installed)]
    if "iperf3" in chosen and not installed:
        raise UsageError("--systems iperf3: the program iperf3 is not installed (apt-get install iperf3). [BG210]")
    return list(dict.fromkeys(known[name] for name in chosen))


@command()
def bench_net(
    *,
    sizes: str = typer.Option("1K,4K,16K,64K,256K,1M,4M,16M,64M", help="Bytes of a message, with commas."),
    systems: str = typer.Option(
        "", help=f"With commas: {', '.join(SYSTEMS)}. Default: all; iperf3 if it is installed."
    ),
    streams: int = typer.Option(4, min=2, max=64, help="Sockets of the program with several, and of iperf3."),
    seconds: common.SecondsOption = 3.0,
    rounds: common.RoundsOption = 5,
    emulate: common.EmulateOption = None,
    report: common.Report,
) -> None:
    """Messages between two processes as NCCL sends them, up to 8 in flight:
    Bagua-Net through its function table, and plain sockets; turn by turn,
    medians. Each end has half of the cores, as hosts have their own. No GPU is
    needed, and none is used.

    as NCCL: what NCCL's own sockets do, call by call: the length of a message in
    4 bytes, then the message; x NCCL compares with that. 1 socket: a blocking
    program, a header and the message, nothing else. 1 socket, polling: the same
    without ever blocking, header and message in one call: less than NCCL does.
    N sockets: N threads, each carries its share of every message. one way: half
    a round trip of messages of that size. of wire: of what TCP's payload can
    have at the rate; what fits into the shaper's bucket passes at once, so a
    short run may show more. BAGUA_NET_* settings hold for Bagua-Net.
    """
    from bagua.cli.bench.tasks import ending_signals

    networks, _ = common.networks_of(emulate, None)
    settings = {
        "sizes": checked(parse_sizes, sizes),
        "systems": _names(systems, streams),
        "streams": streams,
        "seconds": seconds,
        "rounds": rounds,
    }
    rows: list[Row] = []
    with ending_signals():
        for network in networks:
            found = net.measure(settings, network, lambda text: None if report.quiet else print(text, file=sys.stderr))
            rows += net.rows_of(found, network)
    report.show_table("net", settings, rows, net.COLUMNS, net.plot)
