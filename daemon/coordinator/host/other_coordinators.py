"""Finds what coordinators over one database tell each other: where this one is reached, and how their database fares.

One that reaches the database no more can't know whether others do, and may give its nodes up. If all of them say that
they don't, or its port refuses connections, nobody has counted anything meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import sqlalchemy as sa
import structlog

from bagua.base.address import join_address, split_address
from bagua.base.errors import ConfigError
from bagua.base.port_probe import refuses, socket_refuses
from bagua.base.security import TlsFiles, call_metadata, channel_credentials, read_token
from bagua.proto import node_pb2
from bagua.proto.node_pb2_grpc import NodeServiceStub

_PORT = 5432  # of PostgreSQL
_SOCKET_FOLDERS = ("/var/run/postgresql", "/tmp")  # where drivers look unless told otherwise
_ANSWER_S = 2.0
# A pool of its own: a shared connection that failed waits before its next try.
_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]

log = structlog.get_logger("coordinator")


class DatabaseSilence:
    """Asks the others. Shows them the token in the file, and the certificate in the folder ``tls`` (None: none)."""

    def __init__(self, token_file: Path, tls: Path | None) -> None:
        self._token_file = token_file
        self._tls = tls
        self._told: dict[str, str] = {}  # why one was not asked with success, as was logged

    async def ask(self, others: Mapping[str, str]) -> dict[str, float]:
        """Returns the seconds that each has said; who gives no answer is left out. ``others``: addresses by name."""
        try:
            metadata = call_metadata(await asyncio.to_thread(read_token, self._token_file))
            channel = await asyncio.to_thread(self._channels)
        except ConfigError as error:
            self._warn("", str(error))
            return {}
        try:
            answers = await asyncio.gather(*(self._ask(name, channel(at), metadata) for name, at in others.items()))
        except Exception:  # a question is a help in an outage: its failure must not end this coordinator in one
            log.exception("others_not_asked")
            return {}
        return {name: silent_s for name, silent_s in zip(others, answers, strict=True) if silent_s is not None}

    def _channels(self) -> Callable[[str], grpc.aio.Channel]:
        if self._tls is None:
            return lambda address: grpc.aio.insecure_channel(address, options=_OPTIONS)
        credentials = channel_credentials(TlsFiles.in_folder(self._tls))
        return lambda address: grpc.aio.secure_channel(address, credentials, options=_OPTIONS)

    async def _ask(self, name: str, channel: grpc.aio.Channel, metadata: Any) -> float | None:
        async with channel:
            stub: Any = NodeServiceStub(channel)  # its types are those of a blocking stub
            call = stub.DatabaseSilence(node_pb2.DatabaseSilenceRequest(), metadata=metadata, timeout=_ANSWER_S)
            try:
                reply = await call
            except grpc.aio.AioRpcError as error:
                self._warn(name, error.details() or error.code().name)
                return None
        if reply.coordinator != name:  # its address belongs to another one by now
            self._warn(name, f"{reply.coordinator[:64]!r} is there")
            return None
        self._told.pop(name, None)
        return float(reply.silent_s)

    def _warn(self, name: str, reason: str) -> None:
        if self._told.get(name) != reason:
            self._told[name] = reason
            log.warning("another_coordinator_not_asked", coordinator=name, reason=reason)


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


def told_address(address: str, listen: str) -> str:
    """The address, as a number, that others may be told of a coordinator that listens there; empty: it is not known at
    which of its addresses they reach it."""
    host, _ = split_address(listen)
    if host in ("0.0.0.0", "::"):
        return ""
    _, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    return join_address(str(found[0][4][0]), port)


def this_machine() -> str:
    """Equal for all processes that share one loopback: same kernel, same boot, same network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return f"unknown {secrets.token_hex(8)}"
