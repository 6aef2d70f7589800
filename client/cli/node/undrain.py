"""``bagua node undrain``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagua.cli.command import command
from bagua.cli.options import NodeId, Output

if TYPE_CHECKING:
    from bagua.client import Client


@command()
def undrain(node_id: NodeId, output: Output, client: Client) -> None:
    """Lets jobs begin on the node again."""

    from bagua.client.describe import node_document

    node = client.undrain(node_id)
    words = "drains as its daemon will end" if node.draining else "takes jobs"
    output.show(node_document(node), f"{node_id} {words}")
