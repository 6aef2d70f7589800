"""A tar of texts, bounded in size, from which secrets were removed: known values, and all that looks like one."""

from __future__ import annotations

import io
import os
import re
import tarfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from bagua.base.errors import BaguaError
from bagua.base.paths import write_private
from bagua.base.secrets import HIDDEN, looks_secret
from bagua.base.text import json_text

ENTRY_BYTES = 512 << 10
NAME = "bagua-support"


class Bundle:
    """Collects entries in memory. ``known``: secrets that must not be in any; ``most``: bytes of all entries."""

    def __init__(self, known: Iterable[str], most: int) -> None:
        self._known = tuple(known)
        self._left = most
        self._entries: dict[str, bytes] = {}
        self.notes: dict[str, str] = {}  # entry -> why it is cut or missing

    def add(self, name: str, text: str) -> None:
        """Adds one entry. Of a long one the end is kept."""
        data = scrub(text, self._known).encode(errors="replace")
        room = min(ENTRY_BYTES, self._left)
        if len(data) > room:
            self.notes[name] = f"the last {room} of {len(data)} bytes" if room else "no room was left"
            data = data[len(data) - room :]
        self._left -= len(data)
        if room:
            self._entries[name] = data

    def collect(self, name: str, make: Callable[[], str]) -> None:
        """An entry that may fail: then the manifest says why, and the others go on."""
        try:
            text = make()
        except (BaguaError, OSError, ValueError) as error:
            self.notes[name] = scrub(f"missing: {_words(error)}", self._known)
            return
        self.add(name, text)

    def write(self, path: Path) -> int:
        """Writes ``path`` (.tar.gz, mode 0600), all or nothing; returns its size. Raises OSError."""
        manifest = {"made_at": time.time(), "entries": sorted(self._entries), "notes": self.notes}
        entries = {"manifest.json": json_text(manifest, 1).encode(), **self._entries}
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for name, data in entries.items():
                info = tarfile.TarInfo(f"{NAME}/{name}")
                info.size, info.mode, info.mtime = len(data), 0o600, int(time.time())
                tar.addfile(info, io.BytesIO(data))
        write_private(path, packed.getvalue())
        return packed.tell()


def _words(error: Exception) -> str:
    """Returns the words of an error, without the numbers and brackets of the system's errors."""
    cause = getattr(error, "reason", error)  # of urllib
    return str(getattr(cause, "strerror", None) or cause)


def tail_of(path: Path, most: int = ENTRY_BYTES) -> str:
    """The last bytes of a file, as text. Raises OSError."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        return file.read(most).decode(errors="replace")


# Known secrets of fewer characters are not looked for: "1" or "true" would tear every text apart. Where such a value
# stands beside its name it is removed all the same.
SHORTEST = 6

_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
# {0,200}: without a bound a long line takes quadratic time.
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
    # The longest first: a secret may contain another one.
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
    if not looks_secret(name.replace("-", "_")) or value.startswith("--"):  # the next option is no value
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{match[0][: match.start(4) - match.start()]}{quote}{HIDDEN}{quote}"
