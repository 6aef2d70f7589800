from __future__ import annotations

from bagua.cli.command import Client, command
from bagua.cli.options import NodeId, Output


@command()
def undrain(node_id: NodeId, output: Output, client: Client) -> None:
    """Lets jobs begin on the node again."""

    from bagua.client.describe import node_document

    node = client.undrain(node_id)
    words = "drains as its daemon will end" if node.draining else "takes jobs"
    output.show(node_document(node), f"{node_id} {words}")
