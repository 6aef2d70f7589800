from __future__ import annotations

from bagua.cli.command import Client, command
from bagua.cli.job.scale import show_change
from bagua.cli.options import JobId, Output


@command()
def pause(job_id: JobId, output: Output, client: Client) -> None:
    """Lets an elastic job wait after its present step, with its state in memory. It keeps its slots."""
    show_change(output, client.pause(client.find(job_id)))
