"""The coordinators of ``bagua chaos``: one over SQLite, or two over one PostgreSQL behind an address that moves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bagua.chaos.relay import Relay
from bagua.cli.cluster.local_cluster import START_DEADLINE_S, ServiceProcess
from bagua.cli.faults.postgres import Postgres

Launch = Callable[[str, str, list[str]], ServiceProcess]

# A newcomer that is killed on purpose says nothing about the next one.
REJOIN_S = 1.0
# Coordinators come and go here all the time: one that comes back need not wait long before it gives a lost node up.
OUTAGE_S = 10.0


class Coordinators:
    """``address``: at which daemons and clients reach the one that leads; constant once they run. The first one leads
    until another takes over."""

    def __init__(self, state: Path, launch: Launch, postgresql: bool) -> None:
        """Raises ServiceError if there is no PostgreSQL."""
        os.environ["BAGUA_COORDINATOR_REJOIN_S"] = f"{REJOIN_S:g}"
        os.environ["BAGUA_COORDINATOR_OUTAGE_S"] = f"{OUTAGE_S:g}"
        self.database = Postgres() if postgresql else None
        self.file = state / "coordinator" / "bagua.db"
        self.token = state / "token"
        self._relay = Relay() if postgresql else None
        self._launch = launch
        self._folders: Sequence[Path] = [state / "one", state / "two"] if postgresql else [state]
        self._addresses = ["127.0.0.1:0"] * len(self._folders)
        self._processes: list[ServiceProcess] = []
        self._leads = 0

    def close(self) -> None:
        """Ends the database after the coordinators have ended."""
        if self._relay is not None:
            self._relay.close()
        if self.database is not None:
            self.database.close()

    def start(self) -> None:
        """Starts all coordinators. Raises ServiceError."""
        self._processes = [self._start(index) for index in range(len(self._folders))]
        self._point()

    @property
    def address(self) -> str:
        return self._addresses[0] if self._relay is None else self._relay.address

    @property
    def leader(self) -> ServiceProcess:
        return self._processes[self._leads]

    def restart(self, dead: ServiceProcess) -> None:
        """Starts it again where it was."""
        index = self._processes.index(dead)
        self._processes[index] = self._start(index)

    def move(self) -> None:
        """Daemons and clients find the other coordinator from now on: it will lead."""
        self._leads = 1 - self._leads
        self._point()

    def _point(self) -> None:
        if self._relay is not None:
            self._relay.move(self._addresses[self._leads])

    def _start(self, index: int) -> ServiceProcess:
        folder = self._folders[index]
        url = f"sqlite:///{self.file}" if self.database is None else self.database.url
        arguments = ["--listen", self._addresses[index], "--state-dir", str(folder), "--database-url", url]
        label = "coordinator" if len(self._folders) == 1 else f"coordinator {folder.name}"
        service = self._launch(
            label,
            "bagua.daemon.coordinator",
            [*arguments, "--token-file", str(self.token), "--fence-after", "10"],
        )
        self._addresses[index] = service.wait_ready(time.monotonic() + START_DEADLINE_S)["address"]
        return service
