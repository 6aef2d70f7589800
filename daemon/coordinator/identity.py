"""Finds the identity behind the credential of a call."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from bagua.base.scope import Scope, read_scope
from bagua.base.security import METADATA_KEY

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True)
class Identity:
    """The bearer of a token that this coordinator knows. ``scope``: what it is good for; None: everything."""

    scope: Scope | None = None


Authenticate: TypeAlias = Callable[[Metadata], Identity | None]
"""The identity that the metadata of a call shows; None: a stranger."""


def bearer_of(token: str) -> Authenticate:
    """Knows the cluster's token, and those for one job that were made from it."""
    expected = f"Bearer {token}".encode()

    def authenticate(metadata: Metadata) -> Identity | None:
        shown = shown_credential(metadata)
        if shown is None:
            return None
        if hmac.compare_digest(shown, expected):
            return Identity()
        scope = read_scope(token, shown.decode(errors="replace").removeprefix("Bearer "))
        return None if scope is None else Identity(scope)

    return authenticate


def shown_credential(metadata: Metadata) -> bytes | None:
    """The one value under the key of credentials. Two are as good as none: nobody says which of them counts."""
    shown = [value for key, value in metadata if key == METADATA_KEY]
    if len(shown) != 1:
        return None
    return shown[0].encode() if isinstance(shown[0], str) else shown[0]
