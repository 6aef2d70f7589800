"""``bagua job scale | pause | resume`` and ``bagua node drain | undrain``: planned changes of elastic jobs.

Each states a wish and returns at once; the change happens after the same training step everywhere. ``bagua node
upgrade`` waits for its end.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bagua.base.job_options import MAX_NODES
from bagua.cli.command import connected as connect
from bagua.cli.job.submit import JobArgument, print_json
from bagua.cli.options import CoordinatorOption, Output, OutputOption, TlsOption, TokenFileOption

if TYPE_CHECKING:
    from bagua.client import Client
    from bagua.proto import job_pb2

NodeArgument = typer.Argument(metavar="NODE", help="The node's id, as `bagua node list` shows it.")


def scale(
    job_id: str = JobArgument,
    count: int = typer.Argument(metavar="NODES", min=1, max=MAX_NODES, help="So many nodes it should have."),
    output: OutputOption = Output.text,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Lets an elastic job grow or shrink, within --min-nodes and --max-nodes of its submission."""
    with connect(coordinator, token_file, tls) as client:
        job = client.scale(client.find(job_id), count)
    _print(job, output, f"has {_nodes(len({rank.node_id for rank in job.ranks}))}, and should have {count}")


def pause(
    job_id: str = JobArgument,
    output: OutputOption = Output.text,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Lets an elastic job wait after its present step, with its state in memory. It keeps its slots."""
    _ask(lambda client: client.pause(client.find(job_id)), output, coordinator, token_file, tls)


def resume(
    job_id: str = JobArgument,
    output: OutputOption = Output.text,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Lets a paused job go on."""
    _ask(lambda client: client.resume(client.find(job_id)), output, coordinator, token_file, tls)


def drain(
    node_id: str = NodeArgument,
    output: OutputOption = Output.text,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Begins nothing on the node any more, and lets elastic jobs leave it. Others run there to their end."""
    from bagua.client.describe import node_document

    with connect(coordinator, token_file, tls) as client:
        reply = client.drain(node_id)
    if output is Output.json:
        print_json({**node_document(reply.node), "jobs": list(reply.jobs)})
    else:
        left = f"still there: {', '.join(reply.jobs)}" if reply.jobs else "it is empty"
        print(f"{node_id} drains; {left}")


def undrain(
    node_id: str = NodeArgument,
    output: OutputOption = Output.text,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Lets jobs begin on the node again."""
    from bagua.client.describe import node_document

    with connect(coordinator, token_file, tls) as client:
        node = client.undrain(node_id)
    if output is Output.json:
        print_json(node_document(node))
    else:
        print(f"{node_id} {'drains as its daemon will end' if node.draining else 'takes jobs'}")


def upgrade(
    node_id: str = NodeArgument,
    output: OutputOption = Output.text,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Lets the installed daemon take over from the one that runs there; ranks of elastic jobs wait for it."""
    from bagua.client.describe import node_document

    with connect(coordinator, token_file, tls) as client:
        reply = client.upgrade(node_id)
    if output is Output.json:
        print_json({**node_document(reply.node), "former_version": reply.former_version})
    else:
        print(f"{node_id} has a new daemon, of version {reply.node.version}; the last one had {reply.former_version}")


def _ask(
    call: Callable[[Client], job_pb2.Job],
    output: Output,
    coordinator: str | None,
    token_file: Path | None,
    tls: Path | None,
) -> None:
    from bagua.client.describe import job_state

    with connect(coordinator, token_file, tls) as client:
        job = call(client)
    _print(job, output, f"is {job_state(job.state)}{', and will wait after this step' if job.paused else ''}")


def _print(job: job_pb2.Job, output: Output, words: str) -> None:
    from bagua.client.describe import job_document

    if output is Output.json:
        print_json(job_document(job))
    else:
        why = f" ({job.growth})" if job.growth else ""
        print(f"{job.job_id} {words}{why}")


def _nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number} nodes"
