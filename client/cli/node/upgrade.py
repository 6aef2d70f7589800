from __future__ import annotations

from bagua.cli.command import Client, command
from bagua.cli.options import NodeId, Output


@command()
def upgrade(node_id: NodeId, output: Output, client: Client) -> None:
    """Lets the installed daemon take over from the one that runs there; ranks of elastic jobs wait for it."""

    from bagua.client.describe import node_document

    reply = client.upgrade(node_id)
    words = f"{node_id} has a new daemon, of version {reply.node.version}; the last one had {reply.former_version}"
    output.show({**node_document(reply.node), "former_version": reply.former_version}, words)
