"""Tokens that are good for one job alone, made from the coordinator's token by whoever holds that.

The coordinator need not know them beforehand: they carry their scope, and a code that only holders of the coordinator's
token can make.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

_PREFIX = "job"
_SEPARATOR = "~"  # neither in ids of jobs and nodes, nor in the code


@dataclass(frozen=True)
class Scope:
    """A node daemon that serves one job: it may open a session as this node, and look at the job or end it."""

    job_id: str
    node_id: str


def make_token(token: str, scope: Scope) -> str:
    """The token for ``scope`` that a coordinator with ``token`` accepts. Raises ValueError for an id that can't be
    one."""
    if not all(part and part.isascii() and part.isprintable() and _SEPARATOR not in part for part in _parts(scope)):
        raise ValueError(f"{scope} can't be written into a token")
    return _SEPARATOR.join((_PREFIX, *_parts(scope), _code(token, scope)))


def read_scope(token: str, shown: str) -> Scope | None:
    """The scope of a token made with ``make_token`` from ``token``; None if ``shown`` is not one."""
    parts = shown.split(_SEPARATOR)
    if len(parts) != 4 or parts[0] != _PREFIX:
        return None
    scope = Scope(parts[1], parts[2])
    return scope if hmac.compare_digest(parts[3].encode(), _code(token, scope).encode()) else None


def _parts(scope: Scope) -> tuple[str, str]:
    return scope.job_id, scope.node_id


def _code(token: str, scope: Scope) -> str:
    text = _SEPARATOR.join((_PREFIX, *_parts(scope)))
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()
