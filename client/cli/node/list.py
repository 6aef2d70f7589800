"""``bagua node list``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagua.cli.command import command
from bagua.cli.options import Output

if TYPE_CHECKING:
    from bagua.client import Client


@command()
def list_nodes(output: Output, client: Client) -> None:
    """Lists the node daemons that the coordinator knows."""
    from bagua.cli.display.tables import print_nodes
    from bagua.client.describe import node_document

    found = client.nodes()
    output.show({"nodes": [node_document(node) for node in found]}, lambda: print_nodes(found))
