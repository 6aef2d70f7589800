"""The command line of the node daemon, which its keeper calls."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bagua.base.disk import disk_words
from bagua.base.errors import ConfigError
from bagua.base.option_names import COMMAND_SETTINGS
from bagua.base.parent_process import die_with_parent, send_ready_line
from bagua.base.parent_socket import receive
from bagua.base.paths import state_dir as default_state_dir
from bagua.base.retention import parse_keep
from bagua.base.security import TlsFiles
from bagua.daemon.log_lines import LogFormat, configure_logging
from bagua.daemon.node.host.daemon import run
from bagua.daemon.node.host.settings import Settings
from bagua.daemon.node.jobs.engine_host import WireSettings
from bagua.daemon.node.ranks.environment import parse_patterns
from bagua.daemon.node.ranks.user import RunAs, parse_limits, parse_umask

DEFAULT_RANK_DIR = Path("/var/lib/bagua-ranks")
# For ``--coordinator``: the process at the other end of ``--leash`` tells it later. It starts its coordinator while
# this daemon starts.
FROM_LEASH = "-"


class RunAsName(StrEnum):
    """User whose processes ranks are."""

    daemon = "daemon"
    submitter = "submitter"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings=COMMAND_SETTINGS)
def node(
    coordinator: Annotated[
        str, typer.Option(help="Address of the coordinator.", envvar="BAGUA_COORDINATOR")
    ] = "127.0.0.1:7670",
    name: Annotated[str, typer.Option(help="Name of the node and of its folder; the host's name.")] = "",
    node_id: Annotated[str, typer.Option(help="Id towards the coordinator; else made once and kept.")] = "",
    slots: Annotated[int, typer.Option(help="Ranks that may run here at once; 0: one for each core.")] = 0,
    data_host: Annotated[str, typer.Option(help="Address where other hosts reach this one.")] = "127.0.0.1",
    state_dir: Annotated[Path | None, typer.Option(help="Folder of the state; BAGUA_STATE_DIR.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="The coordinator's token; <state>/token.", envvar="BAGUA_TOKEN_FILE")
    ] = None,
    tls: Annotated[
        Path | None, typer.Option(help="Folder with ca.pem, cert.pem and key.pem (`bagua certs`).", envvar="BAGUA_TLS")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve Prometheus metrics on this port of 127.0.0.1.")
    ] = None,
    ready_fd: Annotated[
        int | None, typer.Option(help="Descriptor for one line of JSON when the node is ready.")
    ] = None,
    death_signal: Annotated[bool, typer.Option("--death-signal", help="End when the parent process dies.")] = False,
    exit_when_idle: Annotated[
        float | None, typer.Option(help="End so many seconds after the last job.", metavar="SECONDS")
    ] = None,
    drain_grace: Annotated[
        float,
        typer.Option(
            help="After SIGTERM: let elastic jobs leave this node after a step, and others end, for so long. A second "
            "SIGTERM ends the daemon at once.",
            metavar="SECONDS",
            envvar="BAGUA_DRAIN_GRACE",
        ),
    ] = 0.0,
    keeper_fd: Annotated[
        int | None, typer.Option(hidden=True, help="Socket of the keeper that has started this process.")
    ] = None,
    leash: Annotated[
        int | None, typer.Option(hidden=True, help="Socket of the process that starts this daemon for its own job.")
    ] = None,
    pass_env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,PATTERN",
            help="Variables of the daemon's environment that ranks get besides the usual ones (PATH, HOME, CUDA_*; see "
            "daemon/README.md). Again for more; '*': all.",
            envvar="BAGUA_PASS_ENV",
        ),
    ] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="The same as --log-format json.")] = False,
    log_format: Annotated[
        LogFormat,
        typer.Option(help="How log lines are written; json: one document a line.", envvar="BAGUA_LOG_FORMAT"),
    ] = LogFormat.text,
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder of the ranks' logs; in the state folder.", envvar="BAGUA_LOG_DIR")
    ] = None,
    echo: Annotated[
        bool,
        typer.Option(
            "--echo", help="Write the output of ranks to stdout, too, each line with its rank.", envvar="BAGUA_ECHO"
        ),
    ] = False,
    log_max_bytes: Annotated[int, typer.Option(help="Size at which the log of a rank is rotated.")] = 64 << 20,
    log_files: Annotated[int, typer.Option(help="Files that are kept of a rank's log.")] = 3,
    keep_logs: Annotated[
        str,
        typer.Option(
            help="Logs of ended jobs that stay: 30d, 100 (jobs), a size (10G), several (30d,100), forever.",
            envvar="BAGUA_KEEP_LOGS",
        ),
    ] = "30d,100",
    run_as: Annotated[
        RunAsName,
        typer.Option(
            help="Unix user of the ranks: daemon, for this daemon's, or submitter (as root alone), for that of the "
            "account that submits the job.",
            metavar="WHOSE",
            envvar="BAGUA_RUN_AS",
        ),
    ] = RunAsName.daemon,
    allow_root: Annotated[
        bool, typer.Option("--allow-root", help="With --run-as submitter: also as root.", envvar="BAGUA_ALLOW_ROOT")
    ] = False,
    rank_dir: Annotated[
        Path,
        typer.Option(
            help="With --run-as submitter: folder where each job has a place for its sockets and code. All users "
            "must be able to pass through the folders above it.",
            readable=False,
            envvar="BAGUA_RANK_DIR",
        ),
    ] = DEFAULT_RANK_DIR,
    rank_umask: Annotated[
        str, typer.Option(help="With --run-as submitter: umask of ranks.", metavar="OCTAL", envvar="BAGUA_RANK_UMASK")
    ] = "022",
    rank_limits: Annotated[
        str,
        typer.Option(
            help="With --run-as submitter: limits of ranks, such as nofile=65536,memlock=unlimited,core=0. Others are "
            "this daemon's.",
            metavar="LIMITS",
            envvar="BAGUA_RANK_LIMITS",
        ),
    ] = "core=0",
    measure_ring: Annotated[
        bool,
        typer.Option(
            help="Jobs of four hosts and more: measure the bandwidths between them first, and order the ring by them. "
            "Without it the last bits of sums are the same in every run, whatever was measured.",
            envvar="BAGUA_MEASURE_RING",
        ),
    ] = True,
    plain_data: Annotated[
        bool,
        typer.Option(
            "--plain-data",
            help="Don't encrypt connections between hosts: for networks that are protected otherwise. Whoever can "
            "change what passes there can run code in the ranks. All hosts of a job need it, or none.",
            envvar="BAGUA_PLAIN_DATA",
        ),
    ] = False,
) -> None:
    """Runs ranks of jobs on this host for the coordinator, and the native engine behind them."""
    assert keeper_fd is not None, "main() is the way in"
    if not die_with_parent(signal.SIGKILL):
        raise typer.Exit(0)
    state = state_dir or default_state_dir()
    if coordinator == FROM_LEASH:
        coordinator = _told_coordinator(leash)
    try:
        settings = Settings(
            coordinator=coordinator,
            name=name or node_id or socket.gethostname(),
            node_id=node_id,
            slots=slots or os.cpu_count() or 1,
            data_host=data_host,
            state_dir=state,
            token_file=token_file or state / "token",
            tls=TlsFiles.in_folder(tls) if tls else None,
            metrics_port=metrics_port,
            exit_when_idle_s=exit_when_idle,
            leash=leash,
            keeper_fd=keeper_fd,
            log_dir=log_dir,
            log_max_bytes=log_max_bytes,
            log_files=log_files,
            keep_logs=parse_keep(keep_logs, "--keep-logs"),
            wire=WireSettings(measure_ring=measure_ring, plain_data=plain_data),
            pass_env=parse_patterns(pass_env or ()),
            drain_grace_s=drain_grace,
            echo=echo,
            run_as=RunAs(rank_dir, allow_root, parse_umask(rank_umask), parse_limits(rank_limits))
            if run_as is RunAsName.submitter
            else None,
        )
        code = asyncio.run(
            run(
                settings,
                configure_logging(log_json or log_format is LogFormat.json),
                lambda line: send_ready_line(ready_fd, line),
            )
        )
    except (ConfigError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None:
            raise  # nothing of a user's making
        words = disk_words(error) if isinstance(error, OSError) else str(error)
        send_ready_line(ready_fd, {"error": words})
        print(f"error: {words}", file=sys.stderr)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


def _told_coordinator(leash: int | None) -> str:
    """Ends this process if the other one has gone."""
    # A copy: the daemon goes on with the leash itself.
    with socket.socket(fileno=os.dup(leash if leash is not None else -1)) as end:
        told = receive(end)
    if told is None:
        raise typer.Exit(0)
    return str(told["coordinator"])
