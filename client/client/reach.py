"""The coordinator's address and the credentials for it, from arguments, the environment, and the state folder."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from bagua.base.paths import state_dir
from bagua.base.security import TlsFiles, checked_token, read_token

DEFAULT_ADDRESS = "127.0.0.1:7670"


@dataclass(frozen=True)
class Reach:
    """Address, token and TLS files: all that is needed to call a coordinator."""

    address: str
    token: str
    tls: TlsFiles | None


def find_reach(address: str | None = None, token: str | None = None, tls: TlsFiles | Path | None = None) -> Reach:
    """Missing arguments come from the environment (BAGUA_COORDINATOR; BAGUA_TOKEN or BAGUA_TOKEN_FILE; BAGUA_TLS, a
    folder), then from what the coordinator wrote into the state folder of this user. Raises ConfigError if there is no
    credential."""
    published = _published()
    explicit = address or os.environ.get("BAGUA_COORDINATOR")
    if tls is None:
        # A published folder is for the published address alone.
        folder = os.environ.get("BAGUA_TLS") or ("" if explicit else published.get("tls", ""))
        tls = Path(folder) if folder else None
    return Reach(
        address=explicit or published.get("address") or DEFAULT_ADDRESS,
        token=_given(token) or read_token(_token_file(published, bool(explicit))),
        tls=TlsFiles.in_folder(tls) if isinstance(tls, Path) else tls,
    )


def _given(token: str | None) -> str:
    if token:
        return checked_token(token, "The token")
    return checked_token(os.environ.get("BAGUA_TOKEN", "").strip(), "BAGUA_TOKEN")


def _token_file(published: dict[str, str], explicit: bool) -> Path:
    # No other coordinator gets this one's token.
    given = os.environ.get("BAGUA_TOKEN_FILE") or ("" if explicit else published.get("token_file", ""))
    return Path(given) if given else state_dir() / "token"


def _published() -> dict[str, str]:
    """The published document of this machine's coordinator; empty if none runs."""
    try:
        found = json.loads((state_dir() / "coordinator" / "coordinator.json").read_text())
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}
