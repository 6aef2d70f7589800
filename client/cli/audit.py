"""``bagua audit``: calls that changed something, read output, or were refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote

import typer

from bagua.cli.command import Client, command
from bagua.cli.display.documents import fields
from bagua.cli.options import Output

if TYPE_CHECKING:
    from bagua.proto import account_pb2


@command()
def audit(
    *,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 50,
    who: Annotated[str, typer.Option(help="Calls of this account alone.")] = "",
    target: Annotated[str, typer.Option(help="Calls about this job, node or token alone.")] = "",
    refused: Annotated[bool, typer.Option("--refused", help="Calls alone that were refused or failed.")] = False,
    output: Output,
    client: Client,
) -> None:
    """Lists calls that changed something, read output, or were refused; the newest first."""
    found = client.accounts.audit(limit, who, target, refused)
    output.show({"entries": [fields(one) for one in found]}, lambda: _print(found))


def _print(found: Sequence[account_pb2.AuditEntry]) -> None:
    from bagua.cli.display.tables import clock, table

    rows = [
        (
            clock(one.time),
            one.who,
            one.method.rpartition("/")[2],
            one.target,
            one.outcome,
            _address(one.peer),
            one.detail,
        )
        for one in found
    ]
    table(("TIME", "WHO", "CALL", "ABOUT", "OUTCOME", "FROM", "DETAIL"), rows)


def _address(peer: str) -> str:
    """``ipv4:10.0.0.1:5`` as gRPC has it -> ``10.0.0.1:5``; ``ipv6:%5B::1%5D:5`` -> ``[::1]:5``."""
    return unquote(peer.removeprefix("ipv4:").removeprefix("ipv6:"))
