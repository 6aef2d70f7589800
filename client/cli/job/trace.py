"""``bagua job trace``: some steps of a job that runs, as a file for Perfetto and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bagua.base.text import printable
from bagua.cli.command import Connect, command
from bagua.cli.options import JobId, Output, check_new_file

if TYPE_CHECKING:
    from bagua.timeline.trace import Trace


@command()
def trace(
    *,
    job_id: JobId,
    file: Path = typer.Option(Path("trace.json"), "--file", "-o", help="Where the trace goes."),
    steps: int = typer.Option(5, min=1, max=1_000, help="Training steps of each rank."),
    timeout: float = typer.Option(60.0, min=0.1, max=600.0, help="Seconds; then the trace has what has come."),
    plot: Path | None = typer.Option(None, help="Also a picture of one step, PNG or SVG (needs matplotlib)."),
    output: Output,
    connect: Connect,
) -> None:
    """Records the next steps of a job that runs: computation, buckets, hosts and wire, on one clock. Open the file in
    https://ui.perfetto.dev."""
    from bagua.timeline.chrome import to_chrome

    check_new_file(file)
    if plot is not None:
        from bagua.bench import plots

        plots.check(plot)
    with connect() as client:
        found = client.trace(client.find(job_id), steps, timeout)
    document = to_chrome(found)
    file.write_text(json.dumps(document))
    if plot is not None and not found.empty:
        from bagua.bench.plots import plot_step

        plot_step(document, plot)
    events = len(document["traceEvents"])
    output.show({**document["otherData"], "file": str(file), "events": events}, lambda: _say(found, file, events))
    if found.empty:
        raise typer.Exit(1)


def _say(found: Trace, file: Path, events: int) -> None:
    ranks = sum(source.rank >= 0 and bool(source.spans) for source in found.sources)
    for words in found.missing():
        print(f"missing: {printable(words)}")
    bound = max(found.bounds().values(), default=0)
    if any(clock.missing for clock in found.clocks.values()):
        clocks = "clocks of some hosts are unknown"
    elif bound:
        clocks = f"clocks of hosts are within {bound / 1e3:.0f} µs of the coordinator's"
    else:
        clocks = "all hosts share one clock"
    print(f"{file}: {events} events of {ranks} {'rank' if ranks == 1 else 'ranks'}; {clocks}")
    if found.empty:
        print("Nothing was recorded.")
