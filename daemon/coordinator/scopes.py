"""Checks which calls a token for one job allows: see ``base/scope.py``. Other tokens allow all calls.

The interceptor sets the scope of a call before its handler runs; ``NodeServicer``, whose requests come in a stream,
asks here for each of them.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from bagua.base.errors import ForbiddenError
from bagua.base.scope import Scope

CURRENT: ContextVar[Scope | None] = ContextVar("scope", default=None)

_SESSION = "/bagua.v1.NodeService/Session"
_OF_ONE_JOB = frozenset(
    f"/bagua.v1.JobService/{name}" for name in ("GetJob", "WatchJob", "ListEvents", "ReadLogs", "TraceJob", "CancelJob")
)


def check_method(scope: Scope, method: str) -> None:
    """Raises ForbiddenError if no request of this method is within ``scope``."""
    if method != _SESSION and method not in _OF_ONE_JOB:
        name = method.rpartition("/")[2]
        raise ForbiddenError(f"This token is good for job {scope.job_id} alone: it does not allow {name}.")


def check_request(request: Any) -> None:
    """Raises ForbiddenError if a request about one job is about another than this call's scope."""
    job_id = getattr(request, "job_id", None)
    if job_id is not None:
        check_job(job_id)


def check_job(job_id: str) -> None:
    """Raises ForbiddenError if this call may say or ask nothing of that job."""
    scope = CURRENT.get()
    if scope is not None and scope.job_id != job_id:
        raise ForbiddenError(f"This token is good for job {scope.job_id} alone, not for {job_id[:64]!r}.")


def check_node(node_id: str) -> None:
    """Raises ForbiddenError if this call may not come from a daemon of that id."""
    scope = CURRENT.get()
    if scope is not None and scope.node_id != node_id:
        raise ForbiddenError(f"This token is good for node {scope.node_id} alone, not for {node_id[:64]!r}.")
