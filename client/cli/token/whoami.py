from __future__ import annotations

from bagua.cli.command import Client, command
from bagua.cli.display.documents import account_document
from bagua.cli.options import Output


@command()
def whoami(output: Output, client: Client) -> None:
    """Shows the account behind your credential."""
    found = client.accounts.whoami()
    where = "all namespaces" if found.namespace == "*" else f"namespace {found.namespace}"
    runs_as = f", Unix user {found.unix_user}" if found.unix_user else ""
    output.show(account_document(found), f"{found.name}: role {found.role}, {where}{runs_as}")
