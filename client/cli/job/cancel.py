from __future__ import annotations

import typer

from bagua.cli.command import Client, command
from bagua.cli.options import JobId, Output


@command()
def cancel(
    *,
    job_id: JobId,
    reason: str = typer.Option("cancelled by the user", help="Kept with the job."),
    output: Output,
    client: Client,
) -> None:
    """Cancels a job. One that has ended stays as it is."""
    from bagua.client.describe import job_document, job_state

    job = client.cancel(client.find(job_id), reason=reason)
    output.show(job_document(job), f"{job.job_id} {job_state(job.state)}")
