"""``bagua job scale``: a wish, which returns at once. The change happens after the same training step everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from bagua.base.job_options import MAX_NODES
from bagua.cli.command import Client, command
from bagua.cli.options import JobId, Output

if TYPE_CHECKING:
    from bagua.proto import job_pb2


@command()
def scale(
    *,
    job_id: JobId,
    count: int = typer.Argument(metavar="NODES", min=1, max=MAX_NODES, help="Number of nodes that it should have."),
    output: Output,
    client: Client,
) -> None:
    """Lets an elastic job grow or shrink, within --min-nodes and --max-nodes of its submission."""
    job = client.scale(client.find(job_id), count)
    nodes = len({rank.node_id for rank in job.ranks})
    show_change(output, job, f"has {'1 node' if nodes == 1 else f'{nodes} nodes'}, and should have {count}")


def show_change(output: Output, job: job_pb2.Job, words: str = "") -> None:
    """Shows an elastic job after a planned change was asked for. ``words``: empty: its state."""
    from bagua.client.describe import job_document, job_state

    words = words or f"is {job_state(job.state)}{', and will wait after this step' if job.paused else ''}"
    output.show(job_document(job), f"{job.job_id} {words}{f' ({job.growth})' if job.growth else ''}")
