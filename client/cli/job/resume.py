from __future__ import annotations

from bagua.cli.command import Client, command
from bagua.cli.job.scale import show_change
from bagua.cli.options import JobId, Output


@command()
def resume(job_id: JobId, output: Output, client: Client) -> None:
    """Lets a paused job go on."""
    show_change(output, client.resume(client.find(job_id)))
