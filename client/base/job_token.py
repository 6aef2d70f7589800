"""Tokens that are good for one job, and those that follow it in its cluster, made from the coordinator's token by
whoever holds that.

The coordinator need not know them beforehand: they carry their scope, and a code that only holders of the coordinator's
token can make.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

_PREFIX = "job"
_SEPARATOR = "~"  # neither in ids of jobs and nodes, nor in the code
_FOLLOWING = "."  # in no id that a coordinator gives by itself


@dataclass(frozen=True)
class Scope:
    """A node daemon that serves one job: it may open a session as this node, and look at the job or end it."""

    job_id: str
    node_id: str

    def covers(self, job_id: str) -> bool:
        """True for that job, and for one that followed it in the same cluster (``following``)."""
        return job_id == self.job_id or job_id.startswith(f"{self.job_id}{_FOLLOWING}")


def make_token(token: str, scope: Scope) -> str:
    """The token for ``scope`` that a coordinator with ``token`` accepts. Raises ValueError for an id that can't be
    one."""
    if not all(part and part.isascii() and part.isprintable() and _SEPARATOR not in part for part in _parts(scope)):
        raise ValueError(f"{scope} can't be written into a token")
    return _SEPARATOR.join((_PREFIX, *_parts(scope), _code(token, scope)))


def following(job_id: str, number: int) -> str:
    """The id of the job that is so many jobs after the first one of its cluster, ``job_id``."""
    return f"{job_id}{_FOLLOWING}{number}"


def first_of(job_id: str) -> str:
    """The id of the first job of that cluster."""
    return job_id.partition(_FOLLOWING)[0]


def read_scope(token: str, shown: str) -> Scope | None:
    """The scope of a token made with ``make_token`` from ``token``; None if ``shown`` is not one."""
    parts = shown.split(_SEPARATOR)
    if len(parts) != 4 or parts[0] != _PREFIX:
        return None
    scope = Scope(parts[1], parts[2])
    # Takes the same time wherever they differ.
    return scope if hmac.compare_digest(parts[3].encode(), _code(token, scope).encode()) else None


def _parts(scope: Scope) -> tuple[str, str]:
    return scope.job_id, scope.node_id


def _code(token: str, scope: Scope) -> str:
    text = _SEPARATOR.join((_PREFIX, *_parts(scope)))
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()
