"""The settings that a job that tunes itself may try, with their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SMALLEST_KIB, LARGEST_KIB = 256, 64 << 10
CHUNKS_KIB = ("128", "256", "512", "1024", "2048")


@dataclass(frozen=True)
class Dimension:
    """Setting, and the values that it may have. ``ordered``: neighbours are alike."""

    name: str
    choices: tuple[str, ...]
    ordered: bool = False


def space_of(model_bytes: int, hosts: int, given: Mapping[str, Sequence[str]], with_codec: bool) -> list[Dimension]:
    """The settings and values that a search tries. ``given``: values that the user lists. ``with_codec``: the algorithm
    has one."""
    sizes, most = [SMALLEST_KIB], min(LARGEST_KIB, model_bytes >> 10)
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    found = [Dimension("bucket_kib", tuple(given.get("bucket_kib", map(str, sizes))), ordered=True)]
    if hosts > 1:  # chunks travel between hosts alone
        found.append(Dimension("chunk_kib", tuple(given.get("chunk_kib", CHUNKS_KIB)), ordered=True))
    if with_codec and "codec" in given:  # codecs change results: only those that the user lists
        found.append(Dimension("codec", tuple(given["codec"])))
    return found
