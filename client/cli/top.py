"""``bagua top``: what a service does, in this terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from bagua.base.errors import UsageError
from bagua.cli.command import command
from bagua.cli.dashboard import require
from bagua.cli.options import CoordinatorOption, TlsOption, TokenFileOption


@command()
def top(
    job_id: Annotated[str | None, typer.Argument(metavar="ID", help="Begins with this job.")] = None,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Nodes, jobs, figures and logs in this terminal, as they change."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):  # it reads keys from the one, and draws on the other
        raise UsageError(
            "bagua top needs a terminal. Without one, `bagua job list`, `bagua node list` and `bagua job show ID` "
            "print what is so now. [BG112]"
        )
    require("bagua top", "textual")
    from bagua.base.security import read_token
    from bagua.client import Client, find_reach
    from bagua.dashboard.top import Top

    reach = find_reach(coordinator, read_token(token_file) if token_file else None, tls)
    with Client(reach.address, reach.token, reach.tls) as client:
        client.nodes()  # says at once if nobody answers
        chosen = client.find(job_id) if job_id else ""
    Top(lambda: Client(reach.address, reach.token, reach.tls), chosen).run()
