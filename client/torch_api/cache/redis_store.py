"""A store that several hosts share: Redis servers. The client comes with ``pip install "bagua[redis]"``."""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bagua.base.errors import ConfigError
from bagua.torch_api.cache.redis_server import RedisServer, start_redis_server_cli
from bagua.torch_api.cache.store import ClusterStore, Store, StoreError
from bagua.torch_api.comm.coalesced import broadcast_object
from bagua.torch_api.job.environment import find_free_network_port, get_world_size
from bagua.torch_api.job.session import current, is_initialized

CONNECT_S = 2.0
ANSWER_S = 5.0
START_S = 30.0
PASSWORD = "BAGUA_REDIS_PASSWORD"
ONE_HOST = (
    "Bagua starts a Redis server for the ranks of one host alone, because it would be open to the network. Start "
    "servers with TLS and a password on your hosts and pass them: hosts=[{'host': …, 'port': …, 'ssl': True}, …]."
)


class RedisStore(ClusterStore):
    """Redis servers as one store: each key lies on one of them.

    Args:
        hosts: Servers that run: dictionaries with "host" and "port" and, where needed, "password", "username", "ssl"
            and other arguments of ``redis.Redis`` ("ssl_ca_certs"). None: a server is started on loopback, with a
            random password, by rank 0 of a job on one host. It ends with that rank.
        cluster_mode: Keys are spread over all servers, by the client: these are ordinary servers, not the nodes of a
            Redis Cluster. False: this rank uses one of them alone, by the number of its host.
        capacity_per_node: Bytes that a server that is started here may take. Then entries at random make room.
        password: Of all servers; by default BAGUA_REDIS_PASSWORD.
        tls: True: all connections use TLS. None: hosts elsewhere must, loopback need not. False: plain connections,
            which others in the network can read.

    All ranks make it together. Raises ConfigError where the redis package or redis-server is missing, for hosts
    elsewhere without TLS, and for a server without a password. A server that does not answer is a StoreError when it is
    used.
    """

    def __init__(
        self,
        hosts: Sequence[Mapping[str, Any]] | None = None,
        cluster_mode: bool = True,
        capacity_per_node: int = 107_374_182_400,
        *,
        password: str | None = None,
        tls: bool | None = None,
    ) -> None:
        _client_library()  # before a server is started for nothing
        self.cluster_mode = cluster_mode
        self.capacity_per_node = capacity_per_node
        self.bootstrap = hosts is None
        self._server: RedisServer | None = None
        self._pid = os.getpid()
        password = password or os.environ.get(PASSWORD)
        self.hosts = self._started() if hosts is None else [dict(host) for host in hosts]
        if not self.hosts:
            raise ConfigError("hosts is empty: pass at least one server, or None to start one. [BG706]")
        if not cluster_mode:
            self.hosts = [self.hosts[_number_of_host() % len(self.hosts)]]
        super().__init__([_OneServer(_settings(host, password, tls)) for host in self.hosts])

    def shared_secret(self) -> bytes:
        """A secret of this job alone, which rank 0 makes. All ranks call it together."""
        return str(_shared(secrets.token_hex(32))).encode()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_server": None}  # one process ends the server: the copy of a worker must not

    def _started(self) -> list[dict[str, Any]]:
        if is_initialized() and len(current().membership.hosts) > 1:
            raise ConfigError(f"{ONE_HOST} [BG706]")
        found: Any = None
        if _rank() == 0:
            try:
                self._server = start_redis_server_cli(find_free_network_port(), self.capacity_per_node)
                _wait_for(self._server)
                found = {"host": "127.0.0.1", "port": self._server.port, "password": self._server.password}
            except ConfigError as error:
                found = str(error)
        found = _shared(found)  # the error, too: the others would wait for ever
        if isinstance(found, str):
            raise ConfigError(f"{found} [BG706]")
        return [found]

    def shutdown(self) -> None:
        """Ends the server, if this process has started one; closes connections."""
        super().shutdown()
        if self._server is not None and self._pid == os.getpid():
            self._server.stop()
            self._server = None


class _OneServer(Store):
    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._client: Any = None
        self._pid = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"_settings": self._settings, "_client": None, "_pid": 0}

    @contextlib.contextmanager
    def _used(self) -> Iterator[Any]:
        library = _client_library()
        if self._pid != os.getpid():  # sockets can't be shared with a parent
            self._client = create_redis_client(**self._settings)
            self._pid = os.getpid()
        try:
            yield self._client
        except (library.RedisError, OSError) as error:
            where = f"{self._settings['host']}:{self._settings['port']}"
            raise StoreError(f"The Redis server {where} can't be used: {error}. [BG706]") from error

    def set(self, key: str, value: bytes) -> None:
        with self._used() as client:
            client.set(key, value)

    def get(self, key: str) -> bytes | None:
        with self._used() as client:
            found: bytes | None = client.get(key)
            return found

    def mset(self, dictionary: Mapping[str, bytes]) -> None:
        with self._used() as client:
            client.mset(dict(dictionary))

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._used() as client:
            return list(client.mget(list(keys)))

    def num_keys(self) -> int:
        with self._used() as client:
            return int(client.dbsize())

    def clear(self) -> None:
        with self._used() as client:
            client.flushdb()

    def shutdown(self) -> None:
        if self._client is not None and self._pid == os.getpid():  # sockets of a parent are its own
            self._client.close()


def create_redis_client(host: str, port: int, **options: Any) -> Any:
    """A ``redis.Redis`` that gives up soon: a sample can be loaded without it. ``options``: of that class."""
    library = _client_library()
    retry = library.retry.Retry(library.backoff.NoBackoff(), 1)
    limits = {"socket_connect_timeout": CONNECT_S, "socket_timeout": ANSWER_S, "retry": retry}
    return library.Redis(host=host, port=int(port), **limits | options)


def _client_library() -> Any:
    try:
        found = importlib.import_module("redis")
        importlib.import_module("redis.retry")
        importlib.import_module("redis.backoff")
    except ImportError as error:
        raise ConfigError('The package redis is not installed: pip install "bagua[redis]". [BG209]') from error
    return found


def _settings(host: Mapping[str, Any], password: str | None, tls: bool | None) -> dict[str, Any]:
    """Arguments of ``create_redis_client``. Raises ConfigError."""
    found = dict(host)
    if "host" not in found or "port" not in found:
        raise ConfigError(f"A server of hosts has {sorted(found)}: it must have 'host' and 'port'. [BG706]")
    where = f"{found['host']}:{found['port']}"
    found.setdefault("password", password)
    if not found["password"]:
        raise ConfigError(
            f"The Redis server {where} has no password here: set one (requirepass) and pass it as password=, or in the "
            f"environment as {PASSWORD}. [BG706]"
        )
    found.setdefault("ssl", bool(tls))
    if tls is None and not found["ssl"] and not _is_loopback(str(found["host"])):
        raise ConfigError(
            f"The Redis server {where} is on another host, and the connection would be plain: others could read its "
            "password and the samples. Use TLS ('ssl': True, 'ssl_ca_certs': FILE), or pass tls=False if nobody else "
            "is in this network. [BG706]"
        )
    return found


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _wait_for(server: RedisServer) -> None:
    until = time.monotonic() + START_S
    while not server.has_ended() and time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), 1.0):
            return
        time.sleep(0.02)
    words = server.log.read_text(errors="replace").strip()[-500:]
    server.stop()
    raise ConfigError(f"redis-server does not answer on port {server.port}. Its last words: {words} [BG706]")


def _rank() -> int:
    return current().membership.rank if is_initialized() else 0


def _number_of_host() -> int:
    if not is_initialized():
        return 0
    membership = current().membership
    return next(number for number, ranks in enumerate(membership.hosts) if membership.rank in ranks)


def _shared(value: Any) -> Any:
    """Returns rank 0's value on all ranks."""
    if not is_initialized() and get_world_size() > 1:
        raise ConfigError(
            "The ranks of this job don't know each other yet: call init_process_group() first, or pass hosts= and "
            "secret= (32 random bytes, the same everywhere). [BG407]"
        )
    if not is_initialized() or current().membership.world_size == 1:
        return value
    return broadcast_object(value, 0)
