from __future__ import annotations

from typing import Annotated

import typer

from bagua.base.errors import UsageError
from bagua.cli.command import Connect, command
from bagua.cli.options import Output


@command()
def forget(
    *,
    id: Annotated[str, typer.Argument(metavar="[ID]", help="Id, or the beginning of one.")] = "",
    all: bool = typer.Option(False, "--all", help="Everything that was tuned."),
    output: Output,
    connect: Connect,
) -> None:
    """Forgets what was found: the next job begins with the defaults."""
    if bool(id) == all:
        raise UsageError("Give an ID, or --all. [BG103]")
    with connect() as client:
        forgotten = list(client.forget_tuning(id, all))
    output.show({"forgotten": forgotten}, "\n".join(f"forgotten: {one}" for one in forgotten))
