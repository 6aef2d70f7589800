"""A look whether the server of a database refuses connections. If it does, no coordinator uses it."""

from __future__ import annotations

import os
from pathlib import Path

import sqlalchemy as sa

from bagua.base.address import join_address
from bagua.base.port_probe import refuses, socket_refuses

_PORT = 5432
_SOCKET_FOLDERS = ("/var/run/postgresql", "/tmp")  # where drivers look unless told otherwise


async def database_refuses(url: sa.URL) -> bool:
    """True if nobody listens at the one address of the server. False with SQLite, which has none, and where the URL
    names several servers, or none that can be asked."""
    if url.get_backend_name() == "sqlite":
        return False
    host = url.query.get("host") or url.host or os.environ.get("PGHOST", "")
    port = str(url.query.get("port") or url.port or os.environ.get("PGPORT", _PORT))
    if not isinstance(host, str) or "," in host or ("host" in url.query and ":" in host):
        return False  # several
    if not port.isdigit() or not {"hostaddr", "service"}.isdisjoint(url.query):
        return False
    if not host or host.startswith("/"):
        folders = (host,) if host else _SOCKET_FOLDERS
        return all(socket_refuses(Path(folder) / f".s.PGSQL.{port}") for folder in folders)
    return await refuses(join_address(host, int(port)))
