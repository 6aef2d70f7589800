from __future__ import annotations

from bagua.cli.command import Client, command
from bagua.cli.options import NodeId, Output


@command()
def drain(node_id: NodeId, output: Output, client: Client) -> None:
    """Begins nothing on the node any more, and lets elastic jobs leave it. Others run there to their end."""

    from bagua.client.describe import node_document

    reply = client.drain(node_id)
    left = f"still there: {', '.join(reply.jobs)}" if reply.jobs else "it is empty"
    output.show({**node_document(reply.node), "jobs": list(reply.jobs)}, f"{node_id} drains; {left}")
