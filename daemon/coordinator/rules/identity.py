"""Identities: the account behind the credential of a call, and the call's own, which handlers read here."""

from __future__ import annotations

import enum
import math
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias

from bagua.base.job_token import Scope
from bagua.base.security import METADATA_KEY

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]
EVERYWHERE = "*"
DEFAULT_NAMESPACE = "default"


class Role(enum.StrEnum):
    """Role of an account; ``access.TABLE`` says which calls it may make."""

    ADMIN = "admin"  # everything, in all namespaces
    SUBMIT = "submit"  # jobs of its namespace
    READ = "read"  # sees its namespace, or all
    NODE = "node"  # a daemon of the cluster
    JOB = "job"  # a daemon that serves one job alone: see ``base/job_token.py``


@dataclass(frozen=True)
class Identity:
    """``token_id``: of a token of the database, empty for others. ``expires_at``: seconds since the epoch.
    ``unix_user``: of its jobs; empty: none."""

    name: str
    role: Role
    namespace: str = EVERYWHERE
    scope: Scope | None = None
    token_id: str = ""
    expires_at: float = math.inf
    unix_user: str = ""


ADMINISTRATOR = Identity("administrator", Role.ADMIN)  # the bearer of the token in the state folder

# The caller, once the interceptor has let it in. Work of the coordinator's own has the default.
CURRENT: ContextVar[Identity] = ContextVar("identity", default=ADMINISTRATOR)

# The identity that the metadata of a call shows; None: a stranger. Raises UnauthenticatedError if its time is over.
Authenticate: TypeAlias = Callable[[Metadata], Awaitable[Identity | None]]


def shown_credential(metadata: Metadata) -> bytes | None:
    """The one value under the key of credentials. Two are as good as none: nobody says which of them counts."""
    shown = [value for key, value in metadata if key == METADATA_KEY]
    if len(shown) != 1:
        return None
    return shown[0].encode() if isinstance(shown[0], str) else shown[0]
