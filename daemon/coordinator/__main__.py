"""``python -m bagua.daemon.coordinator``: the coordinator as a process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

# Before gRPC is imported: its own log has a line for each handshake of TLS that fails, as many as a stranger likes.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from bagua.base.disk import disk_words, ending_words
from bagua.base.errors import ConfigError, ServiceError, UnavailableError
from bagua.base.notify import Notifier
from bagua.base.option_names import COMMAND_SETTINGS
from bagua.base.parent_process import die_with_parent, send_ready_line
from bagua.daemon.coordinator.admin.settings import Settings, make_settings
from bagua.daemon.coordinator.host.event_loop import EventLoop, collect_seldom
from bagua.daemon.coordinator.host.server import Coordinator
from bagua.daemon.log_lines import LogFormat, configure_logging

_LONG_S = 3600.0
# The root of usage errors in whatever click this typer brings along.
USAGE_ERROR: Any = typer.BadParameter.__mro__[2]
MAINTENANCE = ("backup", "restore", "check")
_EPILOG = "`bagua coordinator backup | restore | check --help`: the database of a coordinator."


def run(
    ctx: typer.Context,  # its parameters that have the name of a setting are settings
    listen: Annotated[
        str | None, typer.Option(help="host:port; port 0: any free one. [default: 127.0.0.1:7670]")
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Folder for database, token, certificates.")] = None,
    database_url: Annotated[
        str | None, typer.Option(help="postgresql://…; default: SQLite in the state folder.")
    ] = None,
    tls: Annotated[Path | None, typer.Option(help="Folder with ca.pem, cert.pem, key.pem: mutual TLS.")] = None,
    auto_tls: Annotated[str | None, typer.Option(help="Make such a folder, with a certificate for this host.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Serve Prometheus metrics there; 0: any free port.")] = None,
    metrics_plain: Annotated[
        bool | None, typer.Option("--metrics-plain", help="Serve metrics without TLS: protect the port otherwise.")
    ] = None,
    dashboard: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve the dashboard there; port 0: any free one.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="The credential; made if there is none.")] = None,
    ready_fd: Annotated[int | None, typer.Option(help="Write one line of JSON there when serving.")] = None,
    death_signal: Annotated[bool, typer.Option("--death-signal", help="End when the parent process dies.")] = False,
    exit_when_idle: Annotated[
        float | None, typer.Option(help="End after so many seconds without nodes and jobs.")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(help="Ended jobs that stay: 30d, 10000, 10G, several of these, forever. [default: 30d,10000]"),
    ] = None,
    keep_audit: Annotated[
        str | None, typer.Option(help="Entries of the audit log that stay, in the same words. [default: 90d,1000000]")
    ] = None,
    oidc_issuer: Annotated[
        str | None, typer.Option(metavar="URL", help="Take signed tokens of this OpenID Connect provider, too.")
    ] = None,
    oidc_audience: Annotated[str | None, typer.Option(help="Whom its tokens must be for (aud).")] = None,
    oidc_grant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLAIM=VALUE:ROLE[:NAMESPACE]",
            help="A role for those with this value in a claim: groups=ml:submit:vision. Again for more; the first that "
            "fits counts.",
        ),
    ] = None,
    oidc_unix_user: Annotated[
        str | None,
        typer.Option(
            metavar="CLAIM",
            help="The claim with the Unix user of an account, for nodes that run ranks as their submitter. Default: "
            "accounts have none.",
        ),
    ] = None,
    fence_after: Annotated[
        float | None,
        typer.Option(
            help="Daemons end their ranks after so many seconds in which they can't know whether a coordinator has "
            "given them up: its host is silent, say, not only the coordinator down. Ranks of an elastic job whose "
            "eight steps take more than 5 s have that much longer. 0: never. [default: 60]"
        ),
    ] = None,
    log_json: Annotated[bool | None, typer.Option("--log-json", help="The same as --log-format json.")] = None,
    log_format: Annotated[
        LogFormat,
        typer.Option(help="How log lines are written; json: one document a line.", envvar="BAGUA_LOG_FORMAT"),
    ] = LogFormat.text,
) -> None:
    """Decides which nodes run which job. One per cluster; nodes and users dial it."""
    try:
        if death_signal and not die_with_parent(signal.SIGTERM):
            raise ConfigError("The process that started this one is gone already. [BG910]")
        given = {name: value for name, value in ctx.params.items() if name in Settings.model_fields}
        settings = make_settings(**given, oidc_grants=tuple(oidc_grant) if oidc_grant else None)
        configure_logging(settings.log_json or log_format is LogFormat.json)
        with asyncio.Runner(loop_factory=EventLoop) as runner:
            runner.run(serve(settings, ready_fd, death_signal))
    except (ConfigError, ServiceError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None:
            raise  # nothing of a user's making
        words = disk_words(error) if isinstance(error, OSError) else str(error)
        send_ready_line(ready_fd, {"error": words})
        fail(words, error)


async def serve(settings: Settings, ready_fd: int | None, needs_parent: bool) -> None:
    """Runs a coordinator until SIGTERM or SIGINT. Raises ConfigError if it can't start."""
    notifier = Notifier()
    coordinator = Coordinator(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, coordinator.stop)
    await coordinator.start()
    collect_seldom()
    tls = settings.tls_folder
    heard = send_ready_line(
        ready_fd,
        {
            "address": coordinator.address,
            "token_file": str(settings.token_path),
            "state_dir": str(settings.state_dir),
            "tls": "" if tls is None else str(tls.absolute()),
            "dashboard": coordinator.dashboard_url,
        },
    )
    notifier.ready(f"serving at {coordinator.address}")
    beats = asyncio.create_task(_beat(notifier), name="watchdog")
    if heard or not needs_parent:  # a parent that died before the kernel was asked to watch it does not hear
        await coordinator.serve()
    notifier.stopping()
    await coordinator.close()
    beats.cancel()


async def _beat(notifier: Notifier) -> None:
    """Shows systemd's watchdog that this event loop lives."""
    while True:
        await asyncio.sleep(min(notifier.beat(), _LONG_S))


def fail(message: str, error: Exception | None = None) -> None:
    """Writes one line to stderr and exits. Code 1 stands for what may pass, such as a database that does not answer
    yet. After code 2 systemd makes no other start.
    """
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(1 if isinstance(error, UnavailableError) else 2)


def main() -> None:
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    if len(sys.argv) > 1 and sys.argv[1] in MAINTENANCE:
        # Imported here: a coordinator that serves needs neither these commands nor migrations.
        from bagua.daemon.coordinator.admin import maintenance

        maintenance.add_commands(app)
    else:
        app.command(context_settings=COMMAND_SETTINGS, epilog=_EPILOG)(run)
    try:
        code = app(standalone_mode=False, prog_name="bagua coordinator")
    except USAGE_ERROR as error:
        fail(error.format_message())
    except (ConfigError, ServiceError) as error:
        fail(str(error), error)
    except OSError as error:
        if not (words := ending_words(error)):
            raise
        fail(words, error)
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
