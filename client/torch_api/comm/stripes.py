"""Shares out the bytes of a job's state among those who send it to newcomers. It is pure: numbers alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

ALIGNMENT = 16


class Piece(NamedTuple):
    """Bytes ``begin`` to ``end`` of one item."""

    item: int
    begin: int
    end: int


def stripes(sizes: Sequence[int], senders: int, only_first: Collection[int] = ()) -> list[list[Piece]]:
    """The part that each sender sends of items of these sizes, in bytes: as much as the others, as far as possible.

    Items of ``only_first`` are not the same at all senders: the first sends them.
    """
    first = sum(sizes[item] for item in only_first)
    share = -(-sum(sizes) // senders)  # rounded up: no byte is left over
    room = [max(0, share - first), *[share] * (senders - 1)]
    found: list[list[Piece]] = [[Piece(item, 0, sizes[item]) for item in sorted(only_first) if sizes[item]]]
    found += [[] for _ in range(senders - 1)]
    sender = 0
    for item, size in enumerate(sizes):
        begin = 0 if item not in only_first else size
        while begin < size:
            while not room[sender] and sender + 1 < senders:
                sender += 1
            end = min(size, begin + room[sender]) if room[sender] else size  # the last sender takes all that is left
            found[sender].append(Piece(item, begin, end))
            room[sender] = max(0, room[sender] - (end - begin))
            begin = end
    return found


def packs(pieces: Sequence[Piece], limit: int) -> Iterator[list[tuple[int, Piece]]]:
    """The pieces in packs of at most ``limit`` bytes, each with its place in the pack. Large ones are cut."""
    pack: list[tuple[int, Piece]] = []
    place = 0
    for piece in pieces:
        begin = piece.begin
        while begin < piece.end:
            if place >= limit:
                yield pack
                pack, place = [], 0
            end = min(piece.end, begin + limit - place)
            pack.append((place, Piece(piece.item, begin, end)))
            place += -(-(end - begin) // ALIGNMENT) * ALIGNMENT  # each piece begins where any dtype may
            begin = end
    if pack:
        yield pack


def length(pack: Sequence[tuple[int, Piece]]) -> int:
    """Bytes of a pack."""
    place, last = pack[-1]
    return place + last.end - last.begin
