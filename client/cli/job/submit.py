from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bagua.cli import config_file, options
from bagua.cli.command import Client, Connect, command
from bagua.cli.config_file import ConfigOption, PrintConfigOption
from bagua.cli.job_options import Given, specification
from bagua.cli.options import Output

if TYPE_CHECKING:
    from bagua.proto import job_pb2


@command("job submit", **options.TAKES_SCRIPT)
def submit(
    context: typer.Context,
    *,
    script: options.ScriptArgument = "",
    args: options.ArgsArgument = None,
    job: Given,
    secret: options.SecretOption = None,
    namespace: Annotated[str, typer.Option("--namespace", help="Where the job goes. Default: your account's.")] = "",
    as_user: Annotated[
        str,
        typer.Option(
            "--as-user",
            help="Unix user of the ranks, on nodes whose daemon has --run-as submitter. Default: your account's; "
            "another one is for administrators.",
        ),
    ] = "",
    working_dir: options.WorkingDirOption = None,
    key: str = typer.Option("", help="Submitting the same key again returns the first job."),
    watch: bool = typer.Option(False, "--watch", "-w", help="Show the job until it has ended; its exit code is ours."),
    only_rank: options.OnlyRankOption = None,
    prefix: options.PrefixOption = None,
    output: Output,
    connect: Connect,
    config: ConfigOption = None,
    print_config: PrintConfigOption = False,
) -> None:
    """Submits a job and prints its id. Options of the script go after SCRIPT."""
    from bagua.client.describe import job_document

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
    output.show(job_document(made), made.job_id)


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
    output.show({**job_document(job), "exit_code": exit_code(job)})
    return exit_code(job)
