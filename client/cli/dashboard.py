"""``bagua dashboard``: what a service does, in a browser."""

from __future__ import annotations

import importlib.util
import signal
from typing import Annotated

import typer

from bagua.base.errors import ConfigError
from bagua.base.parent_process import die_with_parent, send_ready_line
from bagua.cli.command import command
from bagua.cli.options import CoordinatorOption, TlsOption, TokenFileOption

DEFAULT_LISTEN = "127.0.0.1:7680"


def require(command: str, *modules: str) -> None:
    """Raises ConfigError with advice if a library of the extra is missing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{command} needs {' and '.join(missing)}: pip install 'bagua[dashboard]'. [BG209]")


@command()
def dashboard(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where browsers find it; port 0: any free one.")
    ] = DEFAULT_LISTEN,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Another name by which browsers call this machine; may be repeated."),
    ] = None,
    client_certificates: Annotated[
        bool, typer.Option("--client-certificates", help="With --tls: browsers must show a certificate, too.")
    ] = False,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
    death_signal: Annotated[bool, typer.Option("--death-signal", hidden=True)] = False,
) -> None:
    """Serves a page that shows nodes, jobs, live charts and logs. The address that it prints opens without a token,
    once."""
    require("bagua dashboard", "starlette", "uvicorn")
    from bagua.base.security import read_token
    from bagua.dashboard.serve import serve

    def ready(url: str, code: str) -> None:
        if ready_fd is None:
            print(f"{url}/#code={code}", flush=True)
        if not send_ready_line(ready_fd, {"url": url, "code": code}) and death_signal:
            raise gone

    gone = ConfigError("The process that started this one is gone already. [BG910]")
    if death_signal and not die_with_parent(signal.SIGTERM):
        raise gone

    signal.signal(signal.SIGINT, signal.default_int_handler)
    token = read_token(token_file) if token_file else None
    serve(listen, coordinator, token, tls, host or (), client_certificates, ready)
