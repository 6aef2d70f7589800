"""``bagua job explain``: one page on what happened to a job, and why."""

from __future__ import annotations

import time

from bagua.cli.command import Client, command
from bagua.cli.options import JobId, Output


@command()
def explain(job_id: JobId, output: Output, client: Client) -> None:
    """Tells on one page what happened to a job and why: its end, losses, waits and changes, from its events alone."""
    from bagua.cli.display.explanation import explain as told
    from bagua.cli.display.explanation import marks_of
    from bagua.client.describe import event_document

    found = client.find(job_id)
    events = list(client.events(found))
    text = told(found, events, time.time())
    marks = marks_of(events)
    marked = [{**event_document(event), "mark": mark} for event, mark in zip(events, marks, strict=True)]
    output.show({"job_id": found, "text": text, "events": marked}, lambda: print(text, end=""))
