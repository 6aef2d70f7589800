"""``bagua job …`` and ``bagua node …``: control of a service that runs."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bagua.base.text import json_text, printable, printable_output
from bagua.cli import config_file, options
from bagua.cli.command import Connect, command
from bagua.cli.command import connected as connect
from bagua.cli.config_file import ConfigOption, PrintConfigOption, reads_config
from bagua.cli.job_options import Given, specification
from bagua.cli.options import CoordinatorOption, Output, OutputOption, TlsOption, TokenFileOption

if TYPE_CHECKING:
    from bagua.client import Client
    from bagua.proto import common_pb2, job_pb2

jobs = typer.Typer(help="Submit, show, change and cancel jobs of a service.", no_args_is_help=True)
nodes = typer.Typer(help="The node daemons of a service.", no_args_is_help=True)

JobArgument = typer.Argument(metavar="ID", help="The job's id, or the beginning of it.")


def print_json(document: Any) -> None:
    print(json_text(document), flush=True)


@jobs.command(context_settings=options.PASS_ON, no_args_is_help=True)
@reads_config("job submit")
@command("job submit")
def submit(
    context: typer.Context,
    *,
    script: options.ScriptArgument = "",
    args: options.ArgsArgument = None,
    job: Given,
    secret: options.SecretOption = None,
    namespace: options.NamespaceOption = "",
    as_user: options.AsUserOption = "",
    working_dir: options.WorkingDirOption = None,
    key: str = typer.Option("", help="Submitting the same key again returns the first job.", show_default=False),
    watch: bool = typer.Option(False, "--watch", "-w", help="Show the job until it has ended; its exit code is ours."),
    only_rank: options.OnlyRankOption = None,
    prefix: options.PrefixOption = None,
    output: Output,
    connect: Connect,
    config: ConfigOption = None,
    print_config: PrintConfigOption = False,
) -> None:
    """Submits a job and prints its id. Options of the script go after SCRIPT."""
    if print_config:
        config_file.print_config(context, context.params)
    # The folder may be one of another machine, where the ranks run: it is not looked for here.
    shipped = working_dir is not None
    spec = specification(script, {**job, "args": config_file.arguments(context, args)}, shipped=shipped)
    secrets = options.read_secrets(secret, {*spec.env, *spec.secret_env})
    options.warn_of_secrets(spec.env)
    shown = options.shown(only_rank, prefix, spec.nnodes * spec.nproc_per_node, spec.elastic)
    is_script = not spec.is_module and not spec.no_python
    packed = options.pack_code(working_dir, job["workdir"], script, is_script)
    if is_script:
        options.warn_of_newcomers((working_dir or job["workdir"] or Path.cwd()) / script, spec.respawn)
    with connect() as client:
        if packed is not None:
            spec.code.CopyFrom(client.put_code(packed))
        made = client.submit(spec, idempotency_key=key, namespace=namespace, secrets=secrets, unix_user=as_user)
        if watch:
            raise typer.Exit(_watch(client, made, output, shown))
    if output is Output.json:
        from bagua.client.describe import job_document

        print_json(job_document(made))
    else:
        print(made.job_id)


def _watch(client: Client, job: job_pb2.Job, output: Output, shown: options.Shown) -> int:
    """Follows the job to its end; returns the exit code. Ctrl-C stops watching, not the job."""
    from bagua.cli.display.follow import Detached, Follower, Interrupted
    from bagua.cli.display.terminal import open_terminal
    from bagua.cli.run import show_first_error
    from bagua.client.describe import FAILED, exit_code, job_document, summary

    def detach() -> float:
        raise Detached(f"Job {job.job_id} goes on. `bagua job logs -f {job.job_id}`, `bagua job cancel {job.job_id}`.")

    terminal = open_terminal(quiet=False, aside=output is Output.json)
    terminal.note(f"Job {job.job_id}")
    follower = Follower(client, job, terminal, detach, shown)
    signal.signal(signal.SIGINT, lambda *_: follower.post(Interrupted()))
    try:
        job = follower.run()
    except Detached as goes_on:
        terminal.close()
        terminal.note(str(goes_on))
        return 130
    finally:
        terminal.close()
    show_first_error(terminal, job, shown)
    seconds = (job.finished_at or time.time()) - job.created_at
    (terminal.error if job.state == FAILED else terminal.note)(summary(job, seconds))
    if output is Output.json:
        print_json({**job_document(job), "exit_code": exit_code(job)})
    return exit_code(job)


@jobs.command("list")
def list_jobs(
    limit: int = typer.Option(50, min=1, help="The newest so many."),
    namespace: str = typer.Option("", help="Of this namespace alone.", show_default=False),
    output: OutputOption = Output.text,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Lists jobs, newest first. Without arguments, ranks, and what a job waits for: `bagua job show` tells them."""
    from bagua.cli.display.tables import print_jobs
    from bagua.client.describe import summary_document

    with connect(coordinator, token_file, tls) as client:
        found = client.list(limit=limit, namespace=namespace)
    if output is Output.json:
        print_json({"jobs": [summary_document(job) for job in found]})
    else:
        print_jobs(found)


@jobs.command()
def show(
    job_id: str = JobArgument,
    output: OutputOption = Output.text,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Shows one job: state and reason, its ranks, its events, and who waits for whom."""
    from bagua.cli.display.tables import print_job
    from bagua.client.describe import event_document, job_document

    with connect(coordinator, token_file, tls) as client:
        found = client.find(job_id)
        job, events = client.get(found), list(client.events(found))
    if output is Output.json:
        print_json({**job_document(job), "events": [event_document(event) for event in events]})
    else:
        print_job(job, events)


@jobs.command()
def logs(
    job_id: str = JobArgument,
    follow: bool = typer.Option(False, "--follow", "-f", help="Go on until the job has ended."),
    rank: list[int] | None = typer.Option(
        None,
        "--rank",
        "--only-rank",
        min=0,
        max=options.MAX_RANK,
        help="Only this rank; may be repeated.",
        show_default=False,
    ),
    prefix: options.PrefixOption = None,
    tail: int = typer.Option(0, min=0, max=1_000_000, help="Only the last N lines of each rank.", metavar="N"),
    output: OutputOption = Output.text,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Prints what the ranks of a job printed. With --output json: one document {"lines": [{"rank", "text"}]}; with -f
    one document per line instead."""
    from bagua.cli.display.terminal import Terminal

    with connect(coordinator, token_file, tls) as client:
        job = client.get(client.find(job_id))
        aside = Terminal()
        several, begins = job.spec.nnodes * job.spec.nproc_per_node > 1, options.Shown(prefix=prefix)
        chunks = client.logs(job.job_id, ranks=rank or (), follow=follow, tail=tail, on_away=aside.away)
        lines = _lines(chunks)
        if output is Output.json and not follow:
            print_json({"job_id": job.job_id, "lines": [{"rank": number, "text": text} for number, text in lines]})
            return
        for number, text in lines:
            if output is Output.json:
                print_json({"rank": number, "text": text})
            else:
                shown = printable_output(text) if sys.stdout.isatty() else text  # files get what the rank printed
                print(begins.begin(number, several) + shown, flush=True)


def _lines(chunks: Iterator[common_pb2.LogChunk]) -> Iterator[tuple[int, str]]:
    """(rank, line) of log chunks. What can't be read is told on standard error."""
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


@jobs.command()
def cancel(
    job_id: str = JobArgument,
    reason: str = typer.Option("cancelled by the user", help="Kept with the job."),
    output: OutputOption = Output.text,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Cancels a job. One that has ended stays as it is."""
    from bagua.client.describe import job_document, job_state

    with connect(coordinator, token_file, tls) as client:
        job = client.cancel(client.find(job_id), reason=reason)
    if output is Output.json:
        print_json(job_document(job))
    else:
        print(f"{job.job_id} {job_state(job.state)}")


@nodes.command("list")
def list_nodes(
    output: OutputOption = Output.text,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Lists the node daemons that the coordinator knows."""
    from bagua.cli.display.tables import print_nodes
    from bagua.client.describe import node_document

    with connect(coordinator, token_file, tls) as client:
        found = client.nodes()
    if output is Output.json:
        print_json({"nodes": [node_document(node) for node in found]})
    else:
        print_nodes(found)
