"""Parts of the daemon that all its jobs share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bagua.base.retention import Keep
from bagua.daemon.node.jobs.code import CodeCache
from bagua.daemon.node.jobs.engine_host import CoreHost, RefusedFrames, WireSettings
from bagua.daemon.node.jobs.journal import Journal
from bagua.daemon.node.keeper.link import KeeperLink
from bagua.daemon.node.logs.echo import Echo
from bagua.daemon.node.logs.file import LogLimits
from bagua.daemon.node.processes.groups import JobGroups
from bagua.daemon.node.ranks.places import Places
from bagua.daemon.node.ranks.user import RunAs
from bagua.otel.tracing import Span

if TYPE_CHECKING:
    import grpc.aio
    from structlog.typing import FilteringBoundLogger


@dataclass(frozen=True)
class NodeContext:
    """Made once by the daemon. ``environment``: of which ranks get what the job does not say otherwise. ``keep``: of
    ended jobs and their logs. ``serve_ranks(socket, job, uid)``: serves the ranks of one job, for processes of that
    user alone; raises OSError."""

    node_id: str
    data_host: str
    wire: WireSettings
    jobs_folder: Path
    logs_folder: Path
    places: Places
    groups: JobGroups
    serve_ranks: Callable[[Path, str, int], Awaitable[grpc.aio.Server]]
    cache: Path
    journal: Journal
    code: CodeCache
    ask_secrets: Callable[[str], Awaitable[dict[str, str]]]
    core: CoreHost
    refused_frames: RefusedFrames
    keeper: KeeperLink
    lease_over: Callable[[], bool]
    log: FilteringBoundLogger
    log_limits: LogLimits
    environment: Mapping[str, str]
    keep: Keep
    echo: Echo | None = None  # None: the output of ranks goes to their logs alone
    send_span: Callable[[Span], None] | None = None  # None: nobody asks for traces
    run_as: RunAs | None = None  # None: ranks run as the daemon's user
