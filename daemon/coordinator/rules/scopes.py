"""Checks what a daemon with a token for one job says in its session: see ``base/job_token.py``. Requests of other calls
are checked by ``access``."""

from __future__ import annotations

from bagua.base.errors import ForbiddenError
from bagua.daemon.coordinator.rules.identity import CURRENT


def check_job(job_id: str) -> None:
    """Raises ForbiddenError if this call may say or ask nothing of that job."""
    scope = CURRENT.get().scope
    if scope is not None and not scope.covers(job_id):
        raise ForbiddenError(f"This token is good for job {scope.job_id} alone, not for {job_id[:64]!r}. [BG805]")


def check_node(node_id: str) -> None:
    """Raises ForbiddenError if this call may not come from a daemon of that id."""
    scope = CURRENT.get().scope
    if scope is not None and scope.node_id != node_id:
        raise ForbiddenError(f"This token is good for node {scope.node_id} alone, not for {node_id[:64]!r}. [BG805]")
