from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bagua.cli.command import Client, command
from bagua.cli.display.documents import tuning_document
from bagua.cli.options import Output
from bagua.cli.tune.show import state, words

if TYPE_CHECKING:
    from bagua.proto import job_pb2


@command()
def list_tunings(output: Output, client: Client) -> None:
    """Lists models and networks that were tuned, and the best setting of each."""
    found = client.tunings()
    output.show({"tunings": [tuning_document(one) for one in found]}, lambda: _print(found))


def _print(found: Sequence[job_pb2.Tuning]) -> None:
    from bagua.cli.display.tables import clock, table

    rows = []
    for one in found:
        model, network = one.study.model_text, one.study.network_text
        tried, since = str(one.tried), clock(one.updated_at)
        rows.append((one.id, model, network, tried, state(one), words(one.best), one.job_id, since))
    table(("ID", "MODEL", "NETWORK", "TRIED", "STATE", "BEST", "JOB", "SINCE"), rows)
