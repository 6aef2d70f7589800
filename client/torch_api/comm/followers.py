"""State that is the same for all members and goes on with each training step, as that of a sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Follower(Protocol):
    """``given``: batches that this member was given and has not committed."""

    given: int

    def describe(self) -> Any:
        """All that must be the same on all members, as plain data."""
        ...

    def check(self, ranks: int) -> None:
        """Raises ValueError if there can't be so many."""
        ...

    def commit(self) -> None:
        """A training step was committed."""
        ...

    def tell(self) -> dict[str, Any]:
        """State for the other members, in JSON's types."""
        ...

    def hear(self, told: Sequence[Mapping[str, Any]], members: Sequence[int], generation: int) -> None:
        """Takes in the states of all members that have one, in a generation of ``members``."""
        ...


Told = Mapping[str, Mapping[str, Any]]
"""Words of one member, by name."""


class Followers:
    """Those of one session, in the order in which all members made them."""

    def __init__(self) -> None:
        self._all: dict[str, Follower] = {}
        self._told: dict[str, list[Mapping[str, Any]]] = {}  # in the generation that was entered last
        self._where: tuple[Sequence[int], int] = (), 0  # its members and number

    def describe(self) -> dict[str, Any]:
        """All that must be the same on all members, by name."""
        return {name: one.describe() for name, one in self._all.items()}

    @property
    def given(self) -> int:
        """Batches that this member was given and has not committed."""
        return sum(one.given for one in self._all.values())

    def add(self, name: str, follower: Follower) -> None:
        """From now on it goes on with each training step, and agrees with its like on other members when they
        change."""
        name = f"{name} {len(self._all)}"
        self._all[name] = follower
        if name in self._told:  # others have had it before the members changed
            follower.hear(self._told[name], *self._where)

    def check(self, ranks: int) -> None:
        """Raises ValueError if there can't be so many."""
        for one in self._all.values():
            one.check(ranks)

    def commit(self) -> None:
        """A training step was committed."""
        for one in self._all.values():
            one.commit()

    def tell(self) -> dict[str, dict[str, Any]]:
        """For the other members."""
        return {name: one.tell() for name, one in self._all.items()}

    def hear(self, everyone: Sequence[Told], members: Sequence[int], generation: int) -> None:
        """Takes in what all members have told that hold the job's state. ``members``: who takes part from now on."""
        names = dict.fromkeys(name for one in everyone for name in one)
        self._told = {name: [one[name] for one in everyone if name in one] for name in names}
        self._where = members, generation
        for name, one in self._all.items():
            if name in self._told:
                one.hear(self._told[name], members, generation)
