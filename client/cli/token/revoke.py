from __future__ import annotations

from typing import Annotated

import typer

from bagua.cli.command import Client, command
from bagua.cli.display.documents import token_document
from bagua.cli.options import Output


@command()
def revoke(
    token: Annotated[str, typer.Argument(metavar="ID|NAME", help="An id, or a name: then all tokens of that name.")],
    output: Output,
    client: Client,
) -> None:
    """Makes a token good no more, and ends calls that run with it. Jobs that were submitted with it go on."""
    found = client.accounts.revoke(token)
    words = "\n".join(f"{one.id} of {one.account.name} is revoked" for one in found)
    output.show({"tokens": [token_document(one) for one in found]}, words)
