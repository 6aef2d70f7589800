"""Messages that members of an elastic job tell each other on entering a generation."""

from __future__ import annotations

import json
from typing import NamedTuple

from bagua.torch_api.comm.conversation import gather_texts
from bagua.torch_api.comm.followers import Told
from bagua.torch_api.comm.standing import Standing
from bagua.torch_api.join.session import Session


class Row(NamedTuple):
    """Words of one member: where it stands, how far its units are (``Ledger.tell``), its followers, and the offer of
    its companion (``Companion``)."""

    standing: Standing
    units: bytes
    followers: Told
    offer: str


def call_the_roll(session: Session, mine: Row) -> dict[int, Row]:
    """The rows of all members of the present generation, by member number. All call it at the same time."""
    document = {"standing": mine.standing, "units": mine.units.hex(), "followers": mine.followers, "offer": mine.offer}
    texts = gather_texts(session, json.dumps(document).encode())
    found = {}
    for member, text in zip(session.membership.members, texts, strict=True):
        row = json.loads(text)
        found[member] = Row(Standing(*row["standing"]), bytes.fromhex(row["units"]), row["followers"], row["offer"])
    return found
