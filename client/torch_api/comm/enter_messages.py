"""Messages that members of an elastic job tell each other on entering a generation."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import NamedTuple

import bagua
from bagua.torch_api.comm.admission import Unfit
from bagua.torch_api.comm.gather_bytes import gather_rows, gather_texts
from bagua.torch_api.comm.state_holders import Standing
from bagua.torch_api.comm.step_state import Told
from bagua.torch_api.job.session import Session

_VERSION_BYTES = 63


class Row(NamedTuple):
    """Words of one member: where it stands, how far its units are (``Ledger.tell``), its followers, the batches that it
    was given for them, and the offer of its companion (``Companion``). Most parts are those of many others, too."""

    standing: Standing
    units: bytes
    followers: Told
    given: Mapping[str, int]
    offer: str


def call_the_roll(session: Session, mine: Row) -> dict[int, Row]:
    """The rows of all members of the present generation, by member number. All call it at the same time.
    Raises Unfit on a newcomer of another version."""
    compare_versions(session)
    parts = [
        *(json.dumps(part).encode() for part in (mine.standing, mine.followers, mine.given, mine.offer)),
        mine.units,
    ]
    read = functools.cache(json.loads)  # equal texts once
    found = {}
    for member, texts in zip(session.membership.members, gather_texts(session, parts), strict=True):
        standing, followers, given, offer = map(read, texts[:4])
        found[member] = Row(Standing(*standing), texts[4], followers, given, offer)
    return found


def compare_versions(session: Session) -> None:
    """The first operation in each generation: its form is the same in all versions, since any other one may differ.
    Raises Unfit on a newcomer whose version is not that of the others, which wait for its end. All call it at the same
    time."""
    mine = bagua.__version__.encode()[:_VERSION_BYTES].ljust(_VERSION_BYTES, b"\0")
    rows = gather_rows(session, mine + bytes([session.newcomer]))
    wanted = next((row[:-1] for row in rows if not row[-1]), mine)
    if all(row[:-1] == wanted for row in rows):
        return
    if mine != wanted:
        other = wanted.rstrip(b"\0").decode(errors="replace")
        raise Unfit(f"It has version {bagua.__version__} of bagua, and the others {other}: install the same one.")
    gather_rows(session, b"\0")
