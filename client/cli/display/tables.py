"""Jobs and nodes as tables for people."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bagua.base import islands
from bagua.base.text import printable
from bagua.cli.display.terminal import metrics_text
from bagua.client.describe import ENDED, duration, island_size, job_state, rank_state, step_lines

if TYPE_CHECKING:
    from bagua.proto import common_pb2, job_pb2

PLAIN_WIDTH = 10_000  # columns where nobody looks: into a file or a pipe, lines are not cut
MAX_COMMAND = 1_000  # characters; --output json has all
COLOURS = {"succeeded": "green", "failed": "bold red", "cancelled": "yellow", "running": "cyan", "waiting": "yellow"}


def console() -> Console:
    """Writes to stdout, in lines as wide as the terminal; unbroken where there is none."""
    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=PLAIN_WIDTH)


def table(headings: Sequence[str], rows: Sequence[Sequence[Text | str]]) -> None:
    """Prints rows below headings. Control characters and markup in cells are printed as text."""
    made = Table(box=None, pad_edge=False)
    for heading in headings:
        made.add_column(heading, overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row))
    console().print(made)


def coloured(state: str) -> Text:
    return Text(state, style=COLOURS.get(state, ""))


def clock(seconds: float) -> str:
    """Local date and time of seconds since the epoch."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S") if seconds else ""


def age(job: job_pb2.Job) -> str:
    """Returns how long a job has existed, or existed until its end."""
    return duration(max(0.0, (job.finished_at or time.time()) - job.created_at))


def shape(job: job_pb2.Job) -> str:
    return f"{job.spec.nnodes} x {job.spec.nproc_per_node}"


def print_jobs(jobs: Sequence[job_pb2.Job]) -> None:
    rows = [
        (
            job.job_id,
            job.spec.name,
            coloured(job_state(job.state)),
            shape(job),
            clock(job.created_at),
            age(job),
            job.reason,
        )
        for job in jobs
    ]
    table(("id", "name", "state", "nodes", "submitted", "time", "reason"), rows)


def _folder(spec: common_pb2.JobSpec) -> str:
    """The folder in which the ranks run: one of the nodes, or a copy of code that was shipped."""
    if not spec.HasField("code"):
        return spec.workdir
    below = f"{spec.workdir} of " if spec.workdir else ""
    return f"{below}code {spec.code.digest[:12]} with {spec.code.files} files"


def print_job(job: job_pb2.Job, events: Sequence[job_pb2.JobEvent]) -> None:
    size = island_size(job)
    _say(f"job        {job.job_id} ({job.spec.name})")
    _say(f"state      {job_state(job.state)}{f': {job.reason}' if job.reason else ''}")
    of = f", in islands of {size}" if size > 1 else ""
    _say(f"runs       {command(job.spec)}  (in {_folder(job.spec)}, {shape(job)} ranks{of})")
    by = f", by {job.submitted_by} in {job.namespace}" if job.submitted_by else ""
    by += f", as the Unix user {job.unix_user}" if job.unix_user else ""
    _say(f"submitted  {clock(job.created_at)}, {age(job)}{'' if job.state in ENDED else ' ago'}{by}")
    if job.HasField("progress"):
        steps = f"{job.progress.step}/{job.progress.total}" if job.progress.total else str(job.progress.step)
        _say(f"progress   step {steps}  {metrics_text(dict(job.progress.metrics))}  {job.progress.message}".rstrip())
    for heading, line in zip(("a step", ""), step_lines(job), strict=False):
        _say(f"{heading:<10} {line}")
    if job.waiting:
        _say(f"waits      {job.waiting}")
    if job.spec.elastic and job.ranks:
        here = _nodes(len({rank.node_id for rank in job.ranks}))
        limits = f"from {job.spec.min_nodes or 1} to {job.wanted_nodes}"
        ranks = islands.count(len(job.ranks), size)
        _say(f"elastic    generation {job.generation}, {ranks} on {here} ({limits})")
    if job.tuning:
        _say(f"tuning     {job.tuning}")
    if job.growth:
        _say(f"grows      not now: {job.growth}")
    if job.ranks:
        print()
        _print_ranks(job)
    if job.joining:
        print("\njoining:")
        newcomers = [
            (str(r.member), r.node_id, "ready" if r.ready_to_join else "prepares", r.log_path) for r in job.joining
        ]
        table(("member", "node", "state", "log"), newcomers)
    if job.gone:
        print("\ngone:")
        # Ranks of an island whose mate was lost are ended unheard.
        ended = {(_island(r, size), r.last_generation) for r in job.gone if size > 1 and _end(r)}
        rows = [
            (
                str(r.member),
                *_island(r, size),
                str(r.last_generation or "none"),
                r.node_id,
                _end(r) or ("with its island" if (_island(r, size), r.last_generation) in ended else "unknown"),
                r.log_path,
            )
            for r in job.gone
        ]
        table(("member", *_island(None, size), "last generation", "node", "exit", "log"), rows)
    for rank in job.ranks:
        if rank.error_tail.strip():
            print(f"\nlast lines of rank {rank.rank}:\n{printable(rank.error_tail.rstrip(), lines=True)}")
    if events:
        print()
        table(("time", "event", "reason"), [(clock(event.time), event.kind, event.reason) for event in events])


def _print_ranks(job: job_pb2.Job) -> None:
    """Prints ranks. After a loss ranks are renumbered; a column "member" then shows the number that a process keeps."""
    size = island_size(job)
    members = ("member",) if any(r.member != r.rank for r in job.ranks) or job.gone else ()
    rows = [
        (
            str(r.rank),
            *_island(r, size),
            *(str(r.member) for _ in members),
            *(r.node_id, rank_state(r.state), str(r.pid or ""), _end(r), r.log_path),
        )
        for r in job.ranks
    ]
    table(("rank", *_island(None, size), *members, "node", "state", "pid", "exit", "log"), rows)


def _island(rank: common_pb2.RankStatus | None, size: int) -> tuple[str, ...]:
    """The cell of a rank, or the heading, of a column that is there where islands have several ranks."""
    if size == 1:
        return ()
    return ("island" if rank is None else str(rank.rank // size),)


def _nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number} nodes"


def command(spec: common_pb2.JobSpec) -> str:
    """The entry with as many arguments as fit into some lines of a terminal."""
    text = " ".join([spec.entry, *spec.args])
    return text if len(text) <= MAX_COMMAND else f"{text[:MAX_COMMAND]}… ({len(spec.args)} arguments)"


def _say(line: str) -> None:
    print(printable(line))


def _end(rank: common_pb2.RankStatus) -> str:
    if rank_state(rank.state) != "exited":
        return ""
    return f"signal {rank.signal}" if rank.signal else str(rank.exit_code)


def _node_state(node: job_pb2.Node) -> Text:
    if not node.connected:
        return Text("away", style="red")
    return Text("draining", style="yellow") if node.draining else Text("connected", style="green")


def print_nodes(nodes: Sequence[job_pb2.Node]) -> None:
    rows = [
        (
            node.node_id,
            node.hostname,
            node.address,
            f"{node.used_slots} of {node.slots}",
            _node_state(node),
            clock(node.last_seen),
            f"{node.version} (wire {node.wire_version})",
        )
        for node in nodes
    ]
    table(("id", "host", "address", "slots used", "state", "last seen", "version"), rows)
