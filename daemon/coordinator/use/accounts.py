"""Accounts: tokens with a role, and whom a credential belongs to.

All tokens that are good lie in memory, as digests: a call is authenticated without the database, and strangers cost
none of its time. The coordinator that revokes one forgets it at once. Others that share the database read it every
``REFRESH_S``, and trust what they have read no longer than ``STALE_S`` when they can't.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import sqlalchemy as sa
import structlog

from bagua.base.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    ServiceError,
    UnauthenticatedError,
)
from bagua.base.job_token import read_scope
from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.rules.identity import (
    ADMINISTRATOR,
    EVERYWHERE,
    Identity,
    Metadata,
    Role,
    shown_credential,
)
from bagua.daemon.coordinator.store.worker import Worker
from bagua.daemon.coordinator.use.open_calls import Calls

PREFIX = "bagua_"
REFRESH_S = 5.0
STALE_S = 60.0
_MOST = 10_000  # tokens that are good
_BEARER = b"Bearer "
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}")
UNIX_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.@+-]{0,99}")
NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_MADE = (Role.ADMIN, Role.SUBMIT, Role.READ, Role.NODE)

log = structlog.get_logger("coordinator.accounts")


@dataclass(frozen=True)
class Token:
    """A row of the table. Times are seconds since the epoch; 0: never."""

    token_id: str
    name: str
    role: str
    namespace: str
    digest: str
    created_at: float
    created_by: str
    expires_at: float
    revoked_at: float
    unix_user: str

    def identity(self) -> Identity:
        """Returns the identity of the token's bearer."""
        ends = self.expires_at or math.inf
        return Identity(self.name, Role(self.role), self.namespace, None, self.token_id, ends, self.unix_user)


class Accounts:
    """Use from the event loop. ``token``: that of the state folder, whose bearer is an administrator. ``others``: asked
    about credentials that are none of ours."""

    def __init__(
        self,
        token: str,
        worker: Worker,
        clock: ServiceClock,
        calls: Calls,
        others: Callable[[str], Awaitable[Identity | None]] | None = None,
    ) -> None:
        self._token = token
        self._shown = _BEARER + token.encode()
        self._worker = worker
        self._clock = clock
        self._calls = calls
        self._others = others
        self._known: dict[str, Identity] = {}  # digest -> whose it is
        self._read_clock = 0.0

    # ---- callers

    async def authenticate(self, metadata: Metadata) -> Identity | None:
        """The caller; None: a stranger. Raises UnauthenticatedError for the token of an account whose time is over."""
        shown = shown_credential(metadata)
        if shown is None or not shown.startswith(_BEARER):
            return None
        if hmac.compare_digest(shown, self._shown):  # in constant time: its time must not tell how much was right
            return ADMINISTRATOR
        text = shown.removeprefix(_BEARER).decode(errors="replace")
        if text.startswith(PREFIX):
            found = self._known.get(digest_of(text))
            if found is not None and self._clock.wall() >= found.expires_at:
                raise UnauthenticatedError(
                    "The token has expired: ask an administrator for another one (`bagua token create`). [BG804]"
                )
            return found if found is not None and self._counts(found) else None
        scope = read_scope(self._token, text)
        if scope is not None:
            return Identity(f"job {scope.job_id}", Role.JOB, EVERYWHERE, scope)
        return None if self._others is None else await self._others(text)

    def good(self, caller: Identity) -> bool:
        """True if a caller that was let in may go on."""
        known = not caller.token_id or any(one.token_id == caller.token_id for one in self._known.values())
        return known and self._counts(caller)

    def _counts(self, caller: Identity) -> bool:
        """True if a known caller has not expired, and was read lately if others may have revoked it."""
        fresh = not caller.token_id or not self._worker.store.shared or self._clock.now() - self._read_clock < STALE_S
        return fresh and self._clock.wall() < caller.expires_at

    # ---- administrators

    async def create(
        self, name: str, role: str, namespace: str, lasts_s: float, created_by: str, unix_user: str = ""
    ) -> tuple[Token, str]:
        """A new token, and the secret that its bearer shows. Raises InvalidRequestError, ConflictError."""
        _check(name, role, namespace, lasts_s, unix_user)
        if len(self._known) >= _MOST:
            raise ConflictError(f"There are {_MOST} tokens that are good. Revoke some: `bagua token revoke`. [BG814]")
        token_id = secrets.token_hex(4)
        secret = f"{PREFIX}{token_id}_{secrets.token_urlsafe(32)}"
        now = self._clock.wall()
        made = Token(
            token_id,
            name,
            role,
            namespace or EVERYWHERE,
            digest_of(secret),
            now,
            created_by,
            now + lasts_s if lasts_s else 0.0,
            0.0,
            unix_user,
        )
        await self._worker.write(lambda tx: tx.add_token(vars(made)))
        self._known[made.digest] = made.identity()
        return made, secret

    async def tokens(self, revoked: bool) -> list[Token]:
        """Lists all tokens that are good; with ``revoked`` the others, too."""
        now = self._clock.wall()
        found = await self._all()
        return [one for one in found if revoked or (not one.revoked_at and not 0 < one.expires_at <= now)]

    async def revoke(self, which: str) -> list[Token]:
        """The tokens of that id or name are good no more, and calls with them end. Raises NotFoundError."""
        chosen = [one for one in await self._all() if which in (one.token_id, one.name)]
        chosen = [one for one in chosen if not one.revoked_at]
        if not chosen:
            raise NotFoundError(
                f"There is no good token {which[:100]!r}. `bagua token list` shows those there are. [BG810]"
            )
        ids, now = [one.token_id for one in chosen], self._clock.wall()
        await self._worker.write(lambda tx: tx.revoke_tokens(ids, now))
        for one in chosen:
            self._known.pop(one.digest, None)
        self._calls.end_those_not(self.good)
        return chosen

    # ---- the table

    async def load(self) -> None:
        """Reads all that are good."""
        now = self._clock.now()  # before the reading, which may miss what is revoked in its course
        found = await self._all()
        self._known = {one.digest: one.identity() for one in found if not one.revoked_at}
        self._read_clock = now

    async def run(self) -> None:
        """Takes over other coordinators' changes, and ends calls whose credential is no longer good, until
        cancelled.
        """
        while True:
            await asyncio.sleep(REFRESH_S)
            if self._worker.store.shared:
                try:
                    await self.load()
                except (ServiceError, sa.exc.SQLAlchemyError) as error:
                    log.warning("tokens_not_read", error=str(error))
            self._calls.end_those_not(self.good)

    async def _all(self) -> list[Token]:
        return await self._worker.read(lambda tx: [Token(**row._mapping) for row in tx.tokens()])


def digest_of(secret: str) -> str:
    """Hashes a token as the database has it. A token is 256 random bits: a slow hash would add nothing."""
    return hashlib.sha256(secret.encode()).hexdigest()


def check_namespace(namespace: str) -> None:
    """Raises InvalidRequestError for what can't be the name of one."""
    if not NAMESPACE.fullmatch(namespace):
        raise InvalidRequestError(
            f"namespace {namespace[:100]!r}: small letters, digits and '-' alone, 63 at most, as in Kubernetes. [BG821]"
        )


def check_unix_user(name: str) -> None:
    """Raises InvalidRequestError for what can't be the name of one. Whether there is one, its nodes know."""
    if not UNIX_USER.fullmatch(name):
        raise InvalidRequestError(f"unix_user {name[:100]!r} can't be the name of a user. [BG821]")


def _check(name: str, role: str, namespace: str, lasts_s: float, unix_user: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(f"name {name[:100]!r}: letters, digits and ._@+- alone, 100 at most. [BG821]")
    if name == ADMINISTRATOR.name:
        raise InvalidRequestError(
            f"name {name!r} is that of the token in the state folder. Choose another one. [BG821]"
        )
    if role not in _MADE:
        raise InvalidRequestError(f"role {role[:100]!r}: one of {', '.join(_MADE)}. [BG821]")
    if role == Role.SUBMIT and namespace in ("", EVERYWHERE):
        raise InvalidRequestError("namespace: the role submit needs the one that its jobs belong to. [BG821]")
    if namespace not in ("", EVERYWHERE):
        if role in (Role.ADMIN, Role.NODE):
            raise InvalidRequestError(f"namespace: the role {role} is that of the whole cluster; give none. [BG821]")
        check_namespace(namespace)
    if unix_user:
        check_unix_user(unix_user)
        if role not in (Role.ADMIN, Role.SUBMIT):
            raise InvalidRequestError(f"unix_user: the role {role} submits no jobs. [BG821]")
    if not (math.isfinite(lasts_s) and 0 <= lasts_s <= 100 * 366 * 86_400):
        raise InvalidRequestError(f"lasts_s is {lasts_s}: give seconds, or 0 for ever. [BG821]")
