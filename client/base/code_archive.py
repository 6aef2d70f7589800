"""Archives of a user's code, which ``--working-dir`` ships to the nodes: limits, and names that may be in one.

An archive is a tar file compressed by gzip, named by the SHA-256 of its bytes. It travels, and is stored, in pieces.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

MAX_BYTES = 64 << 20  # of an archive
MAX_UNPACKED_BYTES = 256 << 20
MAX_FILES = 10_000  # with folders
MAX_DEPTH = 64  # of folders in each other
MAX_NAME = 1_000  # bytes of a path in an archive
PIECE_BYTES = 256 << 10

_DIGEST = re.compile(r"[0-9a-f]{64}")


def problem(digest: str, size: int) -> str:
    """Says why there is no such archive, in words; empty: there may be."""
    if _DIGEST.fullmatch(digest) is None:
        return f"the digest {digest[:80]!r} is no SHA-256 in lower-case hex"
    if not 0 < size <= MAX_BYTES:
        return f"an archive has 1 to {MAX_BYTES} bytes, not {size}"
    return ""


def pieces_of(size: int) -> int:
    """Returns the number of pieces of an archive of ``size`` bytes."""
    return -(-size // PIECE_BYTES)


def unsafe(name: str) -> str:
    """Says why ``name`` can't be a path below the root of an archive, in words; empty: it can."""
    path = PurePosixPath(name)
    if not name or not path.parts:
        return "an empty name"
    if len(name.encode("utf-8", "surrogateescape")) > MAX_NAME:
        return f"a name of more than {MAX_NAME} bytes"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "a name that is not UTF-8"
    if len(path.parts) > MAX_DEPTH:
        return f"more than {MAX_DEPTH} folders in each other"
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        return "a name that leads out of the folder"
    return ""


def link_leads_out(name: str, target: str) -> bool:
    """True if a symbolic link at ``name`` to ``target`` leads out of the archive's root."""
    if target.startswith("/") or "\0" in target:
        return True
    depth = len(PurePosixPath(name).parts) - 1  # the link stands in its folder: names in it count from there
    for part in PurePosixPath(target).parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return True
    return False
