"""``bagua job resume``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagua.cli.command import command
from bagua.cli.job.scale import show_change
from bagua.cli.options import JobId, Output

if TYPE_CHECKING:
    from bagua.client import Client


@command()
def resume(job_id: JobId, output: Output, client: Client) -> None:
    """Lets a paused job go on."""
    show_change(output, client.resume(client.find(job_id)))
