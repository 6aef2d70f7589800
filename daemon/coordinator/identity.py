"""Whose credential a call shows."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from bagua.base.security import METADATA_KEY

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True)
class Identity:
    """The bearer of a token that this coordinator knows."""

    name: str


Authenticate: TypeAlias = Callable[[Metadata], Identity | None]
"""Who shows the metadata of a call; None: a stranger."""

CLUSTER = Identity("cluster")
"""Whoever holds the cluster's token: may do everything."""


def bearer_of(token: str) -> Authenticate:
    """Knows one token: the cluster's."""
    expected = f"Bearer {token}".encode()

    def authenticate(metadata: Metadata) -> Identity | None:
        shown = shown_credential(metadata)
        return CLUSTER if shown is not None and hmac.compare_digest(shown, expected) else None

    return authenticate


def shown_credential(metadata: Metadata) -> bytes | None:
    """The one value under the key of credentials. Two are as good as none: nobody says which of them counts."""
    shown = [value for key, value in metadata if key == METADATA_KEY]
    if len(shown) != 1:
        return None
    return shown[0].encode() if isinstance(shown[0], str) else shown[0]
