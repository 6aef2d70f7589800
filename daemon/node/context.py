"""Parts of the daemon that all its jobs share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bagua.daemon.node.code import CodeCache
from bagua.daemon.node.engine_host import CoreHost
from bagua.daemon.node.journal import Journal
from bagua.daemon.node.keeper_link import KeeperLink
from bagua.daemon.node.log_file import LogLimits
from bagua.daemon.node.settings import WireSettings

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


@dataclass(frozen=True)
class NodeContext:
    """Made once by the daemon. ``environment``: of which ranks get what the job does not say otherwise."""

    node_id: str
    data_host: str
    wire: WireSettings
    jobs_folder: Path
    logs_folder: Path
    socket_folder: Path
    rank_socket: Path
    cache: Path
    journal: Journal
    code: CodeCache
    core: CoreHost
    keeper: KeeperLink
    lease_over: Callable[[], bool]
    log: FilteringBoundLogger
    log_limits: LogLimits
    environment: Mapping[str, str]
