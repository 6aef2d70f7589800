"""Accounts of an OpenID Connect provider: a signed token (JWT) instead of one of ours.

PyJWT checks signature, issuer, audience and times; the keys come from the issuer's JWKS. A provider that is away harms
nobody whose key is known. Strangers can't make this process ask the provider more often than every ``REFRESH_S``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from bagua.base.address import is_loopback
from bagua.base.errors import ConfigError, UnauthenticatedError
from bagua.daemon.coordinator.rules.identity import EVERYWHERE, Identity, Role
from bagua.daemon.coordinator.use.accounts import NAMESPACE, UNIX_USER

REFRESH_S = 30.0
FETCH_S = 10.0
CACHE_S = 60.0  # a token that was found good is not checked again for so long, nor beyond its own end
_MOST = 10_000  # tokens that are kept so
_MAX_BYTES = 1 << 20
_MOST_NAME = 200
_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_LEEWAY_S = 30.0

log = structlog.get_logger("coordinator.oidc")


@dataclass(frozen=True)
class Grant:
    """A role for everybody who has ``value`` in ``claim`` (a text, or a list of them)."""

    claim: str
    value: str
    role: Role
    namespace: str


def parse_grants(texts: Sequence[str]) -> tuple[Grant, ...]:
    """``groups=ml:submit:vision``, ``groups=ops:admin``, ``email=eve@x.org:read``. Raises ConfigError."""
    return tuple(_parse_grant(text) for text in texts)


def _parse_grant(text: str) -> Grant:
    claim, _, rest = text.partition("=")
    parts = rest.rsplit(":", 2)
    if len(parts) == 3 and parts[1] not in list(Role):  # a value with a colon, and no namespace
        parts = rest.rsplit(":", 1)
    value, role, namespace = (*parts, EVERYWHERE)[:3] if len(parts) >= 2 else ("", "", "")
    good = claim and value and role in (Role.ADMIN, Role.SUBMIT, Role.READ)
    if good and role == Role.ADMIN:
        good = namespace == EVERYWHERE
    if good and role == Role.SUBMIT:
        good = namespace != EVERYWHERE
    if not good or (namespace != EVERYWHERE and not NAMESPACE.fullmatch(namespace)):
        raise ConfigError(
            f"--oidc-grant {text!r}: write CLAIM=VALUE:admin, CLAIM=VALUE:submit:NAMESPACE, CLAIM=VALUE:read or "
            "CLAIM=VALUE:read:NAMESPACE. [BG809]"
        )
    return Grant(claim, value, Role(role), namespace)


class Provider:
    """Use from the event loop; the network is used in threads. Raises ConfigError for what can't be used."""

    def __init__(
        self,
        issuer: str,
        audience: str,
        grants: Sequence[Grant],
        wall: Callable[[], float] = time.time,
        unix_user_claim: str = "",
    ) -> None:
        import jwt  # heavy, and few need it

        self._jwt = jwt
        self._issuer, self._audience, self._grants, self._wall = issuer, audience, grants, wall
        self._unix_user_claim = unix_user_claim
        check_url(issuer)
        if not audience:
            raise ConfigError(
                "--oidc-audience is missing: without it a token for any program of the issuer would do. [BG809]"
            )
        self._keys: dict[str, Any] = {}
        self._fetched = float("-inf")
        self._fetching = asyncio.Lock()
        self._good: dict[str, tuple[Identity, float]] = {}

    async def identity(self, token: str) -> Identity | None:
        """The account of a token; None if it is not good, or nothing is granted to it. Raises UnauthenticatedError for
        one that has expired."""
        if token.count(".") != 2:  # a JWT has three parts: others cost no more
            return None
        digest, now = hashlib.sha256(token.encode()).hexdigest(), self._wall()
        known = self._good.get(digest)
        if known is not None and now < known[1]:
            return known[0]
        found = await self._check(token)
        if found is not None:
            if len(self._good) >= _MOST:
                self._good.clear()
            self._good[digest] = (found, min(now + CACHE_S, found.expires_at))
        return found

    async def refresh(self) -> None:
        """Reads the issuer's keys; not again within ``REFRESH_S``. A failure is logged, and old keys stay."""
        async with self._fetching:
            if time.monotonic() - self._fetched < REFRESH_S:
                return
            self._fetched = time.monotonic()  # before the try: one in vain counts, too
            try:
                self._keys = await asyncio.to_thread(self._fetch)
            except (OSError, ValueError, KeyError, ConfigError, self._jwt.PyJWTError) as error:
                log.warning("oidc_keys_not_read", issuer=self._issuer, error=str(error))

    async def _check(self, token: str) -> Identity | None:
        try:
            number = str(self._jwt.get_unverified_header(token).get("kid", ""))
            if number not in self._keys:
                await self.refresh()
            key = self._keys.get(number)
            if key is None:
                return None
            claims = self._jwt.decode(
                token,
                key.key,
                # The key's own: a token must not choose how it is checked.
                algorithms=[one for one in _ALGORITHMS if one == (key.algorithm_name or one)],
                audience=self._audience,
                issuer=self._issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except (self._jwt.PyJWTError, ValueError) as error:
            log.info("oidc_token_refused", error=str(error)[:200], once_a_minute=type(error).__name__)
            if isinstance(error, self._jwt.ExpiredSignatureError):  # its signature was good
                raise UnauthenticatedError("The provider's token has expired: get another one. [BG804]") from error
            return None
        return self._granted(claims)

    def _granted(self, claims: dict[str, Any]) -> Identity | None:
        """The first grant that fits counts."""
        name = f"oidc:{claims['sub']}"
        if len(name) > _MOST_NAME:  # two may begin alike
            name = f"oidc:{hashlib.sha256(name.encode()).hexdigest()}"
        unverified = "email" in claims and claims.get("email_verified") not in (True, "true")  # text at some providers
        if unverified:  # whoever has typed it: it leads neither to a grant nor to a Unix user
            claims = {claim: value for claim, value in claims.items() if claim != "email"}
        for grant in self._grants:
            has = claims.get(grant.claim)
            if has == grant.value or (isinstance(has, list) and grant.value in has):
                ends = float(claims["exp"]) + _LEEWAY_S
                return Identity(name, grant.role, grant.namespace, expires_at=ends, unix_user=self._unix_user(claims))
        log.info("oidc_nothing_granted", who=name, email_is_verified=not unverified, once_a_minute="")
        return None

    def _unix_user(self, claims: dict[str, Any]) -> str:
        """Empty where the claim has no name of one: jobs are refused then by nodes that need it."""
        found = claims.get(self._unix_user_claim) if self._unix_user_claim else None
        return found if isinstance(found, str) and UNIX_USER.fullmatch(found) else ""

    # ---- in a thread

    def _fetch(self) -> dict[str, Any]:
        about = _get(self._issuer.rstrip("/") + "/.well-known/openid-configuration")
        if about["issuer"] != self._issuer:
            raise ConfigError(f"the provider calls itself {about['issuer']!r}, not {self._issuer!r} [BG809]")
        check_url(about["jwks_uri"])
        keys = self._jwt.PyJWKSet.from_dict(_get(about["jwks_uri"])).keys
        return {str(key.key_id or ""): key for key in keys if key.public_key_use in (None, "sig")}


def check_url(url: str) -> None:
    """Raises ConfigError for what is neither https nor on this machine."""
    parts = urllib.parse.urlsplit(url)
    safe = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))
    if not safe or not parts.hostname:
        raise ConfigError(f"The OIDC issuer {url[:200]!r} can't be used: it must begin with https://. [BG809]")


def _get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=FETCH_S) as answer:
        found = json.loads(answer.read(_MAX_BYTES))
    if not isinstance(found, dict):
        raise ValueError(f"{url} has no JSON object [BG809]")
    return found
