from __future__ import annotations

import typer

from bagua.cli.command import Client, command
from bagua.cli.options import Output


@command()
def list_jobs(
    *,
    limit: int = typer.Option(50, min=1, help="The newest so many."),
    namespace: str = typer.Option("", help="Jobs of this namespace alone."),
    output: Output,
    client: Client,
) -> None:
    """Lists jobs, newest first. Without arguments, ranks, and what a job waits for: `bagua job show` tells them."""
    from bagua.cli.display.tables import print_jobs
    from bagua.client.describe import summary_document

    found = client.list(limit=limit, namespace=namespace)
    output.show({"jobs": [summary_document(job) for job in found]}, lambda: print_jobs(found))
