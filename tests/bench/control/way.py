"""A real coordinator process, and the parts between its callers and its memory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
from rig.coordinator.fleet import FleetProcess

from bagua.base.child_service import ServiceProcess
from bagua.base.paths import write_private
from bagua.base.rpc import CHANNEL_OPTIONS
from bagua.base.security import TlsFiles, channel_credentials
from bagua.client import Client

READY_S = 120.0
SLOTS = 8


@dataclass(frozen=True)
class Way:
    """``accounts``: callers and daemons show tokens of accounts, not the administrator's; some token is always there.
    ``postgres``: a URL of a database of this program's own, which each coordinator finds empty; empty: SQLite.
    ``operator``: jobs are BaguaJobs on Kubernetes, where that makes a difference."""

    accounts: bool = False
    tls: bool = False
    postgres: str = ""
    operator: bool = False

    @property
    def name(self):
        """As titles of tables have it."""
        parts = [
            *(["accounts"] if self.accounts else []),
            *(["TLS"] if self.tls else []),
            "PostgreSQL" if self.postgres else "SQLite",
            *(["operator"] if self.operator else []),
        ]
        return ", ".join(parts)

    def arguments(self):
        if self.postgres:
            empty(self.postgres)
        database = ["--database-url", self.postgres] if self.postgres else []
        return [*(["--auto-tls", "localhost"] if self.tls else []), *database]


def empty(url):
    """Drops all tables."""
    import sqlalchemy as sa

    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE")
        connection.exec_driver_sql("CREATE SCHEMA public")
    engine.dispose()


class Coordinator:
    """``python -m bagua.daemon.coordinator`` with its usual settings, on loopback. ``token`` is what callers show,
    ``node_token`` (in ``node_token_file``) what daemons do."""

    def __init__(self, state_dir, *arguments, way=Way()):
        place = ["--listen", "127.0.0.1:0", "--state-dir", str(state_dir), *arguments, *way.arguments()]
        log = state_dir.parent / "coordinator.log"
        self._service = ServiceProcess("coordinator", "bagua.daemon.coordinator", place, log)
        line = self._service.wait_ready(time.monotonic() + READY_S)
        self.address = line["address"]
        self.tls_folder = line["tls"]
        self.tls = TlsFiles.in_folder(Path(self.tls_folder)) if self.tls_folder else None
        self.node_token_file = Path(line["token_file"])
        self.token = self.node_token = self.node_token_file.read_text()
        if way.accounts:
            self._take_accounts(state_dir.parent)

    def _take_accounts(self, folder):
        with self.client() as client:
            token = client.accounts.create("bench", "submit", "bench").secret
            self.node_token = client.accounts.create("bench-hosts", "node").secret
        self.token = token
        self.node_token_file = folder / "node-token"
        write_private(self.node_token_file, self.node_token.encode())

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self._service.wait(0.0)

    def client(self):
        """With the callers' token."""
        return Client(self.address, token=self.token, tls=self.tls, timeout_s=300.0)

    def channel(self):
        """For calls that the client does not make by many at once."""
        if self.tls is None:
            return grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        return grpc.secure_channel(self.address, channel_credentials(self.tls), options=CHANNEL_OPTIONS)

    def fleet(self, hosts):
        """Simulated daemons that dial it."""
        return FleetProcess(self.address, self.node_token, hosts, SLOTS, self.tls_folder)

    def cpu_s(self):
        """Processor time so far."""
        times = psutil.Process(self._service.process.pid).cpu_times()
        return float(times.user + times.system)

    def memory(self):
        """Resident bytes."""
        return int(psutil.Process(self._service.process.pid).memory_info().rss)
