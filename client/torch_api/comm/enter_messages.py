"""Messages that members of an elastic job tell each other on entering a generation."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import NamedTuple

from bagua.torch_api.comm.gather_bytes import gather_texts
from bagua.torch_api.comm.state_holders import Standing
from bagua.torch_api.comm.step_state import Told
from bagua.torch_api.job.session import Session


class Row(NamedTuple):
    """Words of one member: where it stands, how far its units are (``Ledger.tell``), its followers, the batches that it
    was given for them, and the offer of its companion (``Companion``). Most parts are those of many others, too."""

    standing: Standing
    units: bytes
    followers: Told
    given: Mapping[str, int]
    offer: str


def call_the_roll(session: Session, mine: Row) -> dict[int, Row]:
    """The rows of all members of the present generation, by member number. All call it at the same time."""
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
