from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from bagua.cli.command import Client, command
from bagua.cli.display.documents import token_document
from bagua.cli.options import Output

if TYPE_CHECKING:
    from bagua.proto import account_pb2


@command()
def list_tokens(
    *,
    all: Annotated[bool, typer.Option("--all", help="Tokens that are good no more, too.")] = False,
    output: Output,
    client: Client,
) -> None:
    """Lists tokens, never their secrets."""
    found = client.accounts.list(revoked=all)
    output.show({"tokens": [token_document(one) for one in found]}, lambda: _print(found))


def _print(found: Sequence[account_pb2.Token]) -> None:
    from bagua.cli.display.tables import clock, table

    headings = ("ID", "NAME", "ROLE", "NAMESPACE", "UNIX USER", "CREATED", "BY", "EXPIRES", "REVOKED")
    rows = []
    for one in found:
        who, ends = one.account, clock(one.expires_at) or "never"
        made = (clock(one.created_at), one.created_by, ends, clock(one.revoked_at))
        rows.append((one.id, who.name, who.role, who.namespace, who.unix_user, *made))
    table(headings, rows)
