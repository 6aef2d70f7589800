"""``bagua run``: a job on an embedded cluster, from nothing to nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from bagua.base import checkpoint_folder, islands, launchers
from bagua.base.errors import ServiceError, UsageError
from bagua.base.job_options import MAX_RANKS, JobOptions, Nodes
from bagua.base.text import json_text
from bagua.cli import config_file, options
from bagua.cli.cluster.interrupts import Interrupts
from bagua.cli.command import command
from bagua.cli.config_file import ConfigOption, PrintConfigOption
from bagua.cli.job_options import Given, spec_nodes, specification
from bagua.cli.options import Output

if TYPE_CHECKING:
    from bagua.cli.cluster.hosts import Way
    from bagua.cli.cluster.local_cluster import EmbeddedCluster
    from bagua.cli.cluster.slurm import Announcements
    from bagua.cli.display.terminal import Terminal
    from bagua.client import Client, Packed
    from bagua.proto import common_pb2, job_pb2

NPROC_WORDS = ("auto", "gpu", "cpu")

STOP_GRACE_S = 2.0  # between SIGTERM and SIGKILL of ranks: all must be gone within 5 s of a Ctrl-C

INTERRUPT_PATIENCE_S = 3.5  # how long a cancelled job may take before the cluster is stopped under it

# Tells ranks how often the job was started again; scripts for torchrun read it.
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True)
class Ended:
    """The end of a job. ``interrupted``: by Ctrl-C or another signal to this process. ``job``: None if it never began.
    ``announcements``: of Slurm."""

    code: int
    interrupted: bool
    job: job_pb2.Job | None = None
    announcements: Announcements | None = None


@dataclass(frozen=True)
class RunOptions:
    """Options of the command line, checked."""

    spec: common_pb2.JobSpec
    log_dir: Path | None = None
    keep_state: bool = False
    output: Output = Output.text
    quiet: bool = False
    aside: bool = False  # the ranks' output goes to standard error
    shown: options.Shown = options.ALL_SHOWN
    packed: Packed | None = None
    way: Way | None = None  # to the hosts; None: all runs on this machine
    cluster: Callable[[Path], EmbeddedCluster] | None = None  # makes it, by its state folder; None: as ``way`` says
    reported: bool = True  # the end is told, on the terminal or as a document
    requeue: bool = False
    secrets: dict[str, str] = field(default_factory=dict, repr=False)  # values, for memory alone


def local_options() -> JobOptions:
    """Options of every job whose cluster is started for it."""
    return {"python": sys.executable, "placement_timeout_s": 30.0, "stop_grace_s": STOP_GRACE_S}


def local_spec(script: str, **options: Unpack[JobOptions]) -> common_pb2.JobSpec:
    """The specification of such a job. Raises ConfigError."""
    from bagua.client import job_spec

    found: JobOptions = {**local_options(), **options}
    return job_spec(script, **found)


def run_with_restarts(options: RunOptions, most: int) -> int:
    """Runs the job, again up to ``most`` times while it fails; returns the last exit code. Raises BaguaError."""
    for count in range(most + 1):
        if most:
            options.spec.env[RESTART_COUNT] = str(count)
        ended = run_embedded(options, restarts_left=most - count)
        if not ended.code or ended.interrupted:
            break
    if options.requeue and ended.announcements is not None:
        ended.announcements.start_again()  # Slurm kills this process: daemons and files are gone already
    return ended.code


def run_embedded(options: RunOptions, restarts_left: int) -> Ended:
    """Starts the cluster, runs the job, stops everything. Raises BaguaError."""
    from bagua.cli.cluster.local_cluster import RunFolder, forget_other_service
    from bagua.cli.cluster.native import NativeBuild
    from bagua.cli.display.terminal import open_terminal
    from bagua.client.describe import exit_code

    started = time.monotonic()
    forget_other_service()
    failed, announcements = True, None
    terminal = open_terminal(options.quiet, aside=options.aside or options.output is Output.json)
    state = RunFolder()
    try:
        with _cluster(options, state.path) as cluster, NativeBuild() as build:
            interrupts = Interrupts(cluster, state)
            announcements = _announcements(options, interrupts, terminal)
            try:
                terminal.status("starting the daemons")
                cluster.start_coordinator()
                names = [f"node-{i}" for i in range(options.spec.nnodes)]
                cluster.start_nodes(names, options.spec.nproc_per_node)
                build.wait(terminal.advance)  # it has gone on while the daemons started
                if options.way is not None:
                    terminal.note(_reach(state.path))
                job = follow_job(
                    options.spec, cluster, interrupts, terminal, options.shown, options.packed, options.secrets
                )
            except KeyboardInterrupt:
                terminal.close()
                terminal.note("Stopped before the job began.")
                return Ended(interrupts.exit_code, interrupted=True)
            except ServiceError:
                if announcements is None or not announcements.has_come():
                    raise
                terminal.close()  # Slurm may end the coordinator first
                terminal.error(announcements.words())
                return Ended(128 + announcements.number, interrupted=True, announcements=announcements)
            terminal.close()
            failed = bool(exit_code(job)) and not interrupts.signal
            if options.log_dir is not None:
                _copy_logs(job, options.log_dir)
            elif not (failed and options.keep_state):
                _forget_logs(job)
        logs = str(options.log_dir or (state.path if failed and options.keep_state else ""))
        code = interrupts.exit_code if interrupts.signal else exit_code(job)
        again = restarts_left if failed else 0
        if options.reported:
            _report(options, terminal, job, code, time.monotonic() - started, logs, again)
        return Ended(code, interrupted=bool(interrupts.signal), job=job, announcements=announcements)
    finally:
        terminal.close()
        if failed and options.keep_state:
            state.keep()
            terminal.note(f"The state of the run is in {state.path}")
        else:
            state.remove()


def _cluster(options: RunOptions, state: Path) -> EmbeddedCluster:
    """Makes the cluster; nothing of it is started."""
    from bagua.cli.cluster.local_cluster import EmbeddedCluster

    if options.way is None:
        return (options.cluster or EmbeddedCluster)(state)
    from bagua.cli.cluster.hosts import HostCluster

    return HostCluster(state, options.way)


def _reach(state: Path) -> str:
    """Says how other commands find the coordinator of a job on several hosts, whose output may be in a file
    elsewhere.
    """
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return f"Other commands for this job, on {host}: export BAGUA_STATE_DIR={state}"


def _announcements(options: RunOptions, interrupts: Interrupts, terminal: Terminal) -> Announcements | None:
    """Under Slurm: answers to its signals."""
    if options.way is None or not options.way.ends_by_signal:
        return None
    from bagua.cli.cluster.slurm import Announcements

    return Announcements(options.way, interrupts, terminal, options.spec.env.get(checkpoint_folder.VARIABLE, ""))


def follow_job(
    spec: common_pb2.JobSpec,
    cluster: EmbeddedCluster,
    interrupts: Interrupts,
    terminal: Terminal,
    shown: options.Shown = options.ALL_SHOWN,
    packed: Packed | None = None,
    secrets: Mapping[str, str] | None = None,
) -> job_pb2.Job:
    """Submits the job, which runs in ``packed`` if that is given, and shows it until it has ended. ``secrets``:
    variables of the ranks, name -> value, that go by memory alone."""
    from threading import Thread

    from bagua.base.security import TlsFiles, read_token
    from bagua.cli.display.follow import Follower, NodeDied, ServiceDied
    from bagua.client import Client

    tls = TlsFiles.in_folder(Path(cluster.tls)) if cluster.tls else None
    with Client(cluster.address, token=read_token(cluster.token_file), tls=tls) as client:

        def cancel() -> float:
            # In a thread: a coordinator that hangs must not delay the second Ctrl-C or the deadline.
            Thread(target=_cancel_quietly, args=(client, job.job_id, interrupts.reason), daemon=True).start()
            return INTERRUPT_PATIENCE_S

        if packed is not None:
            spec.code.CopyFrom(client.put_code(packed))
        job = client.submit(spec, secrets=secrets)
        follower = Follower(client, job, terminal, cancel, shown, interrupts.excuse)
        goes_on = (lambda words: follower.post(NodeDied(words))) if spec.elastic else None
        cluster.on_unexpected_end(lambda words: follower.post(ServiceDied(words)), goes_on)
        interrupts.follower = follower
        return follower.run()


def _cancel_quietly(client: Client, job_id: str, reason: str) -> None:
    from bagua.base.errors import BaguaError

    with contextlib.suppress(BaguaError):  # the cluster is stopped anyway
        client.cancel(job_id, reason=reason)


def _copy_logs(job: job_pb2.Job, folder: Path) -> None:
    """Copies the ranks' logs (also their rotated parts) to ``folder``/rank-R.log, and names those in ``job``."""
    import shutil

    folder.mkdir(parents=True, exist_ok=True)
    for rank in (*job.ranks, *job.gone):
        source = Path(rank.log_path)
        for path in source.parent.glob(source.name + "*") if rank.log_path else ():
            shutil.copy(path, folder / path.name)
        if rank.log_path:
            rank.log_path = str(folder / source.name)


def _forget_logs(job: job_pb2.Job) -> None:
    """Leaves the paths of logs out of a job: they go with the state folder."""
    for rank in (*job.ranks, *job.gone):
        rank.log_path = ""


def _report(
    options: RunOptions, terminal: Terminal, job: job_pb2.Job, code: int, seconds: float, logs: str, again: int
) -> None:
    """The end of a run: the failed rank's last words, one line of summary, and the JSON document if asked for. A job
    that is started ``again`` so many times yet has no document."""
    from bagua.client.describe import FAILED, job_document, summary

    show_first_error(terminal, job, options.shown)
    if job.state == FAILED:
        terminal.error(summary(job, seconds, logs))
    else:
        terminal.note(summary(job, seconds, logs))
    if again:
        terminal.note(f"The job starts again; restarts left: {again}.")
    elif options.output is Output.json:
        document: dict[str, Any] = {**job_document(job), "exit_code": code, "duration_s": round(seconds, 3)}
        print(json_text({**document, "log_dir": logs or None}), flush=True)


def show_first_error(terminal: Terminal, job: job_pb2.Job, shown: options.Shown) -> None:
    """The last words of the rank that failed first, unless they were just seen in its output."""
    from bagua.client.describe import FAILED, first_failed_rank

    rank = first_failed_rank(job) if job.state == FAILED else None
    if rank is not None and rank.error_tail.strip() and not shown.shows(rank.rank):
        terminal.error(f"\nThe first error, from rank {rank.rank} on {rank.node_id}:\n{rank.error_tail.rstrip()}\n")


def check_script(script: str, workdir: Path) -> None:
    """Refuses, before anything is started, a script that does not exist, or a folder that Python can't run."""
    path = workdir / script
    if not path.exists():
        raise UsageError(
            f"The script {path} does not exist. A module is run with -m, a program with --no-python. [BG104]"
        )
    if path.is_dir() and not (path / "__main__.py").exists():
        raise UsageError(f"The script {path} is a folder without a __main__.py. [BG104]")


def count_ranks(text: str) -> int:
    """``4`` -> 4; ``cpu``: the processors that this process may use; ``gpu``: the GPUs that it sees; ``auto``: these if
    there are any, else those. Raises typer.BadParameter."""
    if str(text).isdecimal() and 1 <= int(text) <= MAX_RANKS:
        return int(text)
    if text not in NPROC_WORDS:
        raise typer.BadParameter(f"{text!r} is neither a number from 1 to {MAX_RANKS} nor auto, gpu or cpu. [BG102]")
    from bagua.cli.checks.gpu_checks import probe

    gpus = 0 if text == "cpu" else len(probe().gpus)
    if text == "gpu" and not gpus:
        raise typer.BadParameter(
            "gpu: no GPU is seen here. `bagua doctor` says why; auto takes the processors then. [BG102]"
        )
    return min(gpus or len(os.sched_getaffinity(0)), MAX_RANKS)


LocalNprocOption = Annotated[
    int,
    typer.Option(
        "--nproc-per-node",
        "--ntasks-per-node",
        parser=count_ranks,
        metavar="N|auto|gpu|cpu",
        help="Ranks on every node. auto: one for each GPU, or processor where there is no GPU.",
    ),
]


@command("run", **options.TAKES_SCRIPT)
def run(
    context: typer.Context,
    *,
    script: options.ScriptArgument = "",
    args: options.ArgsArgument = None,
    job: Given,
    nproc_per_node: LocalNprocOption = 1,
    secret: options.SecretOption = None,
    working_dir: options.WorkingDirOption = None,
    max_restarts: int = typer.Option(
        0, min=0, max=1000, metavar="N", help="A job that fails is started again, so many times, all ranks together."
    ),
    log_dir: Path | None = typer.Option(None, help="Copy the ranks' logs there."),
    keep_state: bool = typer.Option(False, "--keep-state", help="Keep logs and database of a run that failed."),
    output: Output,
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Only the ranks' output and errors."),
    only_rank: options.OnlyRankOption = None,
    prefix: options.PrefixOption = None,
    hosts: Annotated[
        str,
        typer.Option(
            "--hosts",
            metavar="HOST,USER@HOST:PORT",
            help="Run on these hosts: a node daemon on each, started by ssh. They have this Python environment and the "
            "folder at the same paths.",
        ),
    ] = "",
    ssh: Annotated[
        str,
        typer.Option(
            "--ssh",
            metavar="COMMAND",
            help='With --hosts: the ssh client, such as "ssh -F my.config". Default: BAGUA_SSH, else ssh.',
        ),
    ] = "",
    address: Annotated[
        str,
        typer.Option(
            "--address",
            metavar="ADDRESS",
            help="With several hosts: by which address of this machine the others reach it. Default: found out.",
        ),
    ] = "",
    requeue: Annotated[
        bool,
        typer.Option(
            "--requeue", help="With `bagua slurm run`: SIGUSR1, the sign of the time limit, queues the job again."
        ),
    ] = False,
    config: ConfigOption = None,
    print_config: PrintConfigOption = False,
) -> None:
    """Runs a script, here or on other hosts: starts a coordinator and node daemons, runs the job, stops them all.

    Options of the script go after SCRIPT. Exit code: 0, the failed rank's, or 130 after Ctrl-C.
    """
    if print_config:
        config_file.print_config(context, context.params)
    way, job["nnodes"], job["nproc_per_node"] = _way(context, hosts, ssh, address, job["nnodes"], nproc_per_node)
    if max_restarts and spec_nodes(job)["elastic"]:
        raise UsageError("--max-restarts starts all ranks again; an elastic job replaces some: --respawn. [BG103]")
    if requeue and (way is None or not way.ends_by_signal):
        raise UsageError(
            "--requeue is for `bagua slurm run`: Slurm starts its job again. Here: --max-restarts. [BG103]"
        )
    if log_dir and way is not None:
        raise UsageError("--log-dir copies logs of this machine: with several hosts, redirect the output. [BG103]")
    folder = options.resolve_workdir(job["workdir"])
    shipped = working_dir is not None
    own: JobOptions = {**local_options(), "workdir": None if shipped else folder}
    if islands.VARIABLE in os.environ:  # as under other starters; first: --env and --island-size override it
        job["env"] = [f"{islands.VARIABLE}={os.environ[islands.VARIABLE]}", *(job["env"] or ())]
    spec = specification(script, {**job, "args": config_file.arguments(context, args)}, shipped=shipped, **own)
    if way is not None and way.ends_by_signal and checkpoint_folder.ON_REQUEST not in spec.env:
        spec.env[checkpoint_folder.ON_REQUEST] = "1"
    secrets = options.read_secrets(secret, {*spec.env, *spec.secret_env})
    is_script = not spec.is_module and not spec.no_python
    packed = options.pack_code(working_dir, job["workdir"], script, is_script)
    if is_script and packed is None:
        check_script(script, folder)
    if is_script and not quiet:
        options.warn_of_newcomers(folder / script, spec.respawn)
    checked = RunOptions(
        spec=spec,
        secrets=secrets,
        log_dir=log_dir.absolute() if log_dir else None,
        keep_state=keep_state,
        output=output,
        quiet=quiet,
        packed=packed,
        way=way,
        requeue=requeue,
        shown=options.shown(only_rank, prefix, spec.nnodes * spec.nproc_per_node, spec.elastic),
    )
    raise typer.Exit(run_with_restarts(checked, max_restarts))


def _way(
    context: typer.Context,
    hosts: str,
    ssh: str,
    address: str,
    nodes: Nodes | None,
    nproc: int,
) -> tuple[Way | None, Nodes | None, int]:
    """Returns the way of daemons to other hosts (None: there are none), and how many nodes and ranks there are then.
    Raises UsageError for options that contradict each other.
    """
    in_slurm = context.parent is not None and context.parent.info_name == "slurm"
    if not (in_slurm or hosts):
        if ssh or address:
            raise UsageError("--ssh and --address go with --hosts. [BG103]")
        if words := launchers.on_one_host(os.environ):
            print(f"note: {words}.", file=sys.stderr)
        return None, nodes, nproc
    if in_slurm:
        if hosts or ssh:
            raise UsageError("Slurm names the hosts here: leave --hosts and --ssh out, or call `bagua run`. [BG103]")
        from bagua.cli.cluster import slurm

        source = context.get_parameter_source("nproc_per_node")
        if source is not None and source.name == "DEFAULT":  # by name: typer may bring its own click
            nproc = slurm.ranks_per_node()
        slurm.check_first_node(nproc)
        way: Way = slurm.srun_way(nodes.count if nodes else None, address)
    else:
        from bagua.cli.cluster.hosts import ssh_way

        way = ssh_way(hosts, ssh, address)
        if nodes is not None and nodes.count != way.hosts:
            raise UsageError(f"--nnodes {nodes}: --hosts names {way.hosts}. [BG110]")
    return way, nodes or Nodes(way.hosts), nproc
