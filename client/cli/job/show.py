from __future__ import annotations

from bagua.cli.command import Client, command
from bagua.cli.options import JobId, Output


@command()
def show(job_id: JobId, output: Output, client: Client) -> None:
    """Shows one job: state and reason, its ranks, its events, and who waits for whom."""
    from bagua.cli.display.tables import print_job
    from bagua.client.describe import event_document, job_document

    found = client.find(job_id)
    job, events = client.get(found), list(client.events(found))
    document = {**job_document(job), "events": [event_document(event) for event in events]}
    output.show(document, lambda: print_job(job, events))
