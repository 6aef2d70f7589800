from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from bagua.base.text import json_text, printable, printable_output
from bagua.cli import options
from bagua.cli.command import Client, command
from bagua.cli.options import JobId, Output

if TYPE_CHECKING:
    from bagua.proto import common_pb2


@command()
def logs(
    *,
    job_id: JobId,
    follow: bool = typer.Option(False, "--follow", "-f", help="Go on until the job has ended."),
    rank: list[int] | None = typer.Option(
        None,
        "--rank",
        "--only-rank",
        min=0,
        max=options.MAX_RANK,
        help="Only this rank; may be repeated.",
    ),
    prefix: options.PrefixOption = None,
    tail: int = typer.Option(0, min=0, max=1_000_000, help="Only the last N lines of each rank.", metavar="N"),
    output: Output,
    client: Client,
) -> None:
    """Prints what the ranks of a job printed. With --output json: one document {"lines": [{"rank", "text"}]}; with -f
    one document per line instead."""
    from bagua.cli.display.terminal import Terminal

    job = client.get(client.find(job_id))
    several, begins = job.spec.nnodes * job.spec.nproc_per_node > 1, options.Shown(prefix=prefix)
    lines = _lines(client.logs(job.job_id, ranks=rank or (), follow=follow, tail=tail, on_away=Terminal().away))
    if output is Output.json and not follow:
        output.show({"job_id": job.job_id, "lines": [{"rank": number, "text": text} for number, text in lines]})
        return
    for number, text in lines:
        if output is Output.json:
            print(json_text({"rank": number, "text": text}), flush=True)
        else:
            shown = printable_output(text) if sys.stdout.isatty() else text  # files get what the rank printed
            print(begins.line_prefix(number, several) + shown, flush=True)


def _lines(chunks: Iterator[common_pb2.LogChunk]) -> Iterator[tuple[int, str]]:
    """Yields (rank, line) of log chunks. What can't be read is told on standard error."""
    from bagua.client.lines import LineAssembler, missing_text

    assemblers: dict[int, LineAssembler] = {}
    for chunk in chunks:
        if chunk.error:
            print(f"The output of rank {chunk.rank} can't be read: {printable(chunk.error)}", file=sys.stderr)
        assembler = assemblers.setdefault(chunk.rank, LineAssembler())
        if chunk.missing:
            yield from ((chunk.rank, text) for text in assembler.finish())
            print(missing_text(chunk.rank, chunk.missing), file=sys.stderr)
        for text in assembler.feed(chunk.data, time.monotonic()) + (assembler.finish() if chunk.eof else []):
            yield chunk.rank, text
    for number, assembler in assemblers.items():
        for text in assembler.finish():
            yield number, text
