"""Parses the node daemon's settings once, and reads the identity that its folder keeps."""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bagua.base.address import is_loopback, join_address
from bagua.base.disk import disk_words, replace_file
from bagua.base.errors import ConfigError
from bagua.base.paths import make_private_dir
from bagua.base.retention import Keep
from bagua.base.security import TlsFiles, check_dial_address
from bagua.daemon.node.jobs.engine_host import WireSettings
from bagua.daemon.node.ranks.user import RunAs
from bagua.daemon.node.rules.job_specification import is_safe_name

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

LOCK_S = 2.0


@dataclass(frozen=True)
class Settings:
    """Settings of the daemon, as given. ``exit_when_idle_s``, ``leash`` and ``metrics_port`` are None where they were
    not asked for. ``pass_env``: see ``environment.passed_on``. ``drain_grace_s``: how long jobs may take to leave after
    SIGTERM. ``echo``: ranks' output goes to stdout, too. ``keeper_fd``: socket of the keeper. ``log_dir``: where logs
    of ranks lie; None: in the state folder. ``run_as``: None: ranks run as the daemon's user.
    """

    coordinator: str
    name: str
    node_id: str
    slots: int
    data_host: str
    state_dir: Path
    token_file: Path
    tls: TlsFiles | None
    metrics_port: int | None
    exit_when_idle_s: float | None
    leash: int | None
    log_max_bytes: int
    log_files: int
    wire: WireSettings
    pass_env: tuple[str, ...] = ()
    drain_grace_s: float = 0.0
    echo: bool = False
    keeper_fd: int = -1
    keep_logs: Keep = field(default_factory=lambda: Keep(jobs=100))
    log_dir: Path | None = None
    run_as: RunAs | None = None

    def check(self) -> None:
        """Raises ConfigError for what can't work."""
        for option, value in (("--name", self.name), ("--node-id", self.node_id)):
            if value and not is_safe_name(value):
                raise ConfigError(
                    f"{option} {value!r} can't be used: letters, digits, '.', '_' and '-' alone, please. [BG901]"
                )
        if self.slots < 1:
            raise ConfigError(f"--slots {self.slots} makes no sense: a node offers at least one. [BG901]")
        if self.log_max_bytes < 1024 or self.log_files < 1:
            raise ConfigError(
                "Logs of ranks need at least one file (--log-files) of 1024 bytes (--log-max-bytes). [BG901]"
            )
        if not 0 <= self.drain_grace_s < math.inf:
            raise ConfigError(f"--drain-grace {self.drain_grace_s:g} makes no sense: give seconds, 0 or more. [BG901]")
        if self.exit_when_idle_s is not None and not self.exit_when_idle_s >= 0:
            raise ConfigError(
                f"--exit-when-idle {self.exit_when_idle_s:g} makes no sense: give seconds, 0 or more. [BG901]"
            )
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65_535:
            raise ConfigError(f"--metrics-port {self.metrics_port} is no port: give 0 (any free one) to 65535. [BG901]")
        if self.run_as is not None:
            self.run_as.check()
        check_dial_address(self.coordinator, self.tls)
        _check_data_host(self.data_host)
        if self.tls is not None:
            self.tls.read()


@dataclass(frozen=True)
class NodeFolder:
    """The folder of one node, locked for the life of this process."""

    path: Path
    node_id: str
    lock: int
    logs: Path  # a folder for each job, with the logs of its ranks; ``jobs`` unless somebody wants them elsewhere

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def code(self) -> Path:
        """Archives of code that jobs ran in."""
        return self.path / "code"

    @property
    def jobs(self) -> Path:
        return self.path / "jobs"


def open_node_folder(settings: Settings, log: FilteringBoundLogger) -> NodeFolder:
    """Makes and locks ``<state>/node-<name>``. Raises ConfigError if it can't be used or another daemon uses it."""
    make_private_dir(settings.state_dir)
    path = make_private_dir(settings.state_dir / f"node-{settings.name}")
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{disk_words(error)} [BG108]") from error
    try:
        _lock(lock)
    except OSError as error:
        os.close(lock)
        raise ConfigError(
            f"Another node daemon uses {path}. Stop it, or give this one a name of its own with --name. [BG819]"
        ) from error
    make_private_dir(path / "journal")
    logs = make_private_dir(path / "jobs")
    if settings.log_dir is not None:
        make_private_dir(settings.log_dir, "Give another with --log-dir.")
        logs = make_private_dir(settings.log_dir / path.name, "Give another with --log-dir.")
    return NodeFolder(path, _node_id(path / "node.json", settings, log), lock, logs)


def _lock(descriptor: int) -> None:
    """Waits for a moment: a daemon dies a little later than its keeper. Raises OSError."""
    give_up = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            if time.monotonic() >= give_up:
                raise
        time.sleep(0.02)


def _node_id(file: Path, settings: Settings, log: FilteringBoundLogger) -> str:
    """The id given, else the one of the last start, else a new one; kept in ``file``. A damaged file is put aside: a
    node of a new id serves as well, and the coordinator gives the old one up. Raises ConfigError if a new id can't be
    kept."""
    try:
        kept = _kept_id(file)
        if kept is None:
            aside = file.with_name(f"{file.name}.broken")
            os.replace(file, aside)
            log.warning("the file of the node's id is damaged and put aside", path=str(aside))
        node_id = settings.node_id or kept or f"{settings.name}-{secrets.token_hex(3)}"
        if node_id != kept:
            replace_file(file, json.dumps({"node_id": node_id}))
    except OSError as error:
        raise ConfigError(f"{disk_words(error, file)} [BG108]") from error
    return node_id


def _kept_id(file: Path) -> str | None:
    """The id in ``file``; empty if there is no such file, None if it makes no sense. Raises OSError."""
    try:
        found = json.loads(file.read_text("utf-8"))["node_id"]
    except FileNotFoundError:
        return ""
    except (IsADirectoryError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) and is_safe_name(found) else None


def _check_data_host(host: str) -> None:
    """Checks that the data plane listens on one address. It may be any of this machine: connections prove the
    job key.
    """
    if is_loopback(host):
        return
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind((address[0], 0))  # any free port: what is tried is the address
    except OSError as error:
        raise ConfigError(
            # Without the ":0" at its end: only the brackets of IPv6 are wanted.
            f"--data-host {join_address(host, 0)[:-2]} is no address of this machine: {error.strerror}. [BG919]"
        ) from error
    if str(address[0]) in ("0.0.0.0", "::"):
        raise ConfigError(
            f"--data-host {host} says nothing to other hosts: give the address by which they reach this one. [BG919]"
        )
