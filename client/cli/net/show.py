from __future__ import annotations

from bagua.cli.command import command
from bagua.cli.net.plugin import built_plugin, devices
from bagua.cli.options import Output

HEADINGS = ("device", "interface", "Mbit/s", "PCI device")


@command()
def show(output: Output) -> None:
    """Shows the network interfaces that the plugin offers to NCCL here, by
    NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY. What is wrong with a BAGUA_NET_*
    setting is told on standard error."""
    from bagua.cli.display.tables import table

    library = built_plugin()
    found = devices(library)
    rows = [(str(row["device"]), row["interface"], f"{row['mbits']}", row["pci"] or "-") for row in found]
    output.show({"path": str(library), "devices": found}, lambda: table(HEADINGS, rows))
