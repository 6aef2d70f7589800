"""``bagua job explain``: one page on what happened to a job, and why."""

from __future__ import annotations

import time

from bagua.cli.command import connected as connect
from bagua.cli.job.submit import JobArgument, print_json
from bagua.cli.options import CoordinatorOption, Output, OutputOption, TlsOption, TokenFileOption


def explain(
    job_id: str = JobArgument,
    output: OutputOption = Output.text,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Tells on one page what happened to a job and why: its end, losses, waits and changes, from its events alone."""
    from bagua.cli.display.explanation import explain as told
    from bagua.cli.display.explanation import marks_of
    from bagua.client.describe import event_document

    with connect(coordinator, token_file, tls) as client:
        found = client.find(job_id)
        events = list(client.events(found))
    text = told(found, events, time.time())
    if output is Output.json:
        marks = marks_of(events)
        marked = [{**event_document(event), "mark": mark} for event, mark in zip(events, marks, strict=True)]
        print_json({"job_id": found, "text": text, "events": marked})
    else:
        print(text, end="")
