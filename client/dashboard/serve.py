"""Serves the page until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from bagua.base.address import join_address, split_address
from bagua.base.errors import ConfigError
from bagua.base.security import TlsFiles, check_listen_address, follow_files
from bagua.base.system_limits import raise_descriptor_limit
from bagua.client import Client, find_reach
from bagua.dashboard.access import Access
from bagua.dashboard.app import Dashboard
from bagua.dashboard.guests import Guests

HANDSHAKE_S = 5.0  # limit of TLS's


def serve(
    listen: str,
    coordinator: str | None = None,
    token: str | None = None,
    tls: Path | None = None,
    names: Iterable[str] = (),
    client_certificates: bool = False,
    on_ready: Callable[[str, str], None] = lambda url, code: None,
) -> None:
    """Blocks. ``on_ready`` gets the page's address and a code that opens it once. Raises ConfigError."""
    reach = find_reach(coordinator, token, tls)
    if reach.tls is None:
        check_listen_address(listen, None)
    with Client(reach.address, reach.token, reach.tls):  # wrong settings are told before anything is served
        pass
    host, port = split_address(listen)
    access, guests = Access(reach.token, (*names, host), secure=reach.tls is not None), Guests()
    app = Dashboard(lambda: Client(reach.address, reach.token, reach.tls), access, guests).app()
    raise_descriptor_limit()
    with _listener(host, port) as listener:
        config = uvicorn.Config(
            app,
            http=guests.protocol(),
            loop="asyncio",
            log_level="error",  # what is no HTTP would be a line each
            access_log=False,  # addresses hold proofs of sessions
            server_header=False,
            proxy_headers=False,  # guesses of tokens are counted by address, and local processes could name any
            timeout_graceful_shutdown=2,
            timeout_keep_alive=20,
            h11_max_incomplete_event_size=32 << 10,
            ws="none",
            **_tls(reach.tls, client_certificates),
        )
        config.load()
        if reach.tls is not None and config.ssl is not None:
            follow_files(config.ssl, reach.tls)
        scheme = "http" if reach.tls is None else "https"
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # browsers can't open the address that means all
        on_ready(f"{scheme}://{join_address(shown, listener.getsockname()[1])}", access.code)
        asyncio.run(_serve(uvicorn.Server(config), listener))


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    if server.config.ssl is not None:  # asyncio waits a minute
        loop.create_server = partial(loop.create_server, ssl_handshake_timeout=HANDSHAKE_S)  # type: ignore[method-assign]
    await server.serve([listener])


def _tls(files: TlsFiles | None, client_certificates: bool) -> dict[str, Any]:
    if files is None:
        return {}
    files.read()  # says which file is missing
    return {
        "ssl_certfile": str(files.cert),
        "ssl_keyfile": str(files.key),
        "ssl_ca_certs": str(files.ca),
        "ssl_cert_reqs": ssl.CERT_REQUIRED if client_certificates else ssl.CERT_NONE,
    }


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(256)  # from now on browsers may come, before anything answers
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"The dashboard can't listen on {join_address(host, port)}: {error.strerror}. Choose another address with "
            "--listen (port 0: any free one). [BG111]"
        ) from error
    return listener
