from __future__ import annotations

from bagua.cli.command import Client, command
from bagua.cli.options import Output


@command()
def list_nodes(output: Output, client: Client) -> None:
    """Lists the node daemons that the coordinator knows."""
    from bagua.cli.display.tables import print_nodes
    from bagua.client.describe import node_document

    found = client.nodes()
    output.show({"nodes": [node_document(node) for node in found]}, lambda: print_nodes(found))
