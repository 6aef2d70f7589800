"""Removes secrets from texts that leave the machine: known values, and all that looks like one."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bagua.base.secrets import HIDDEN, looks_secret

# Known secrets of fewer characters are not looked for: "1" or "true" would tear every text apart. Where such a value
# stands beside its name it is removed all the same.
SHORTEST = 6

_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_URL = re.compile(r"(://[^/\s:@\"']{0,200}:)[^/\s\"']+(?=@)")
_BEARER = re.compile(r"(?i)\b(bearer|basic)(\s+)[A-Za-z0-9._~+/=-]{6,}")
_KNOWN_SHAPES = re.compile(
    r"\b(?:bagua_[0-9a-f]{8}_[\w-]{30,}"  # our own: bagua token create
    r"|hf_[A-Za-z0-9]{20,}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{20,}"
    r"|xox[abpr]-[\w-]{10,}|AKIA[A-Z0-9]{16}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_VALUE = r"""(?:"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s"',;}\]]+)"""
_PAIR = re.compile(rf"""(["']?)(?<![\w.])([A-Za-z_][\w.-]{{0,99}})\1(\s{{0,9}}[=:]\s{{0,9}})({_VALUE})""")
_OPTION = re.compile(rf"""(?<![\w-])(--?)([A-Za-z][\w-]{{0,99}})(\s{{1,9}}|["'],\s*["']?)({_VALUE})""")


def scrub(text: str, known: Iterable[str] = ()) -> str:
    """``text`` with ``***`` for secrets. ``known``: values that must not be in it, such as a token."""
    for secret in sorted({value for value in known if len(value) >= SHORTEST}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = _PEM.sub(HIDDEN, text)
    text = _URL.sub(rf"\1{HIDDEN}", text)
    text = _BEARER.sub(rf"\1\2{HIDDEN}", text)
    text = _KNOWN_SHAPES.sub(HIDDEN, text)
    text = _OPTION.sub(_hide, text)
    return _PAIR.sub(_hide, text)


def _hide(match: re.Match[str]) -> str:
    """Hides the value of a pair or option whose name is a secret's."""
    name, value = match[2], match[4]
    if not looks_secret(name.replace("-", "_")) or value.startswith("--"):
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{match[0][: match.start(4) - match.start()]}{quote}{HIDDEN}{quote}"
