"""``bagua job show``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagua.cli.command import command
from bagua.cli.options import JobId, Output

if TYPE_CHECKING:
    from bagua.client import Client


@command()
def show(job_id: JobId, output: Output, client: Client) -> None:
    """Shows one job: state and reason, its ranks, its events, and who waits for whom."""
    from bagua.cli.display.tables import print_job
    from bagua.client.describe import event_document, job_document

    found = client.find(job_id)
    job, events = client.get(found), list(client.events(found))
    document = {**job_document(job), "events": [event_document(event) for event in events]}
    output.show(document, lambda: print_job(job, events))
