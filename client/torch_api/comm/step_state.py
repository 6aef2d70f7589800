"""State that is the same for all members and goes on with each training step, as that of a sampler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Heard = Mapping[int, tuple[int, Mapping[str, Any]]]
"""By member: batches that it was given and has not committed, and its state."""


class Follower(Protocol):
    """``given``: batches that this member was given and has not committed."""

    given: int

    def describe(self) -> Any:
        """Returns all that must be the same on all members, as plain data."""
        ...

    def check(self, ranks: int) -> None:
        """Raises ValueError if there can't be so many."""
        ...

    def commit(self) -> None:
        """A training step was committed."""
        ...

    def tell(self) -> dict[str, Any]:
        """State for the other members, in JSON's types: the same on all that are as far."""
        ...

    def hear(self, told: Heard, members: Sequence[int], generation: int) -> float:
        """Takes in the states of all members that have one, in a generation of ``members``. Returns by how much the
        batches weigh more now that this member was given."""
        ...


Told = Mapping[str, Mapping[str, Any]]
"""States of one member, by name."""


class Followers:
    """Followers of one session, ``by_name``, in the order in which all members made them."""

    def __init__(self) -> None:
        self.by_name: dict[str, Follower] = {}
        self._told: dict[str, Heard] = {}  # in the generation that was entered last
        self._where: tuple[Sequence[int], int] = (), 0  # its members and number

    def describe(self) -> dict[str, Any]:
        """Returns all that must be the same on all members, by name."""
        return {name: one.describe() for name, one in self.by_name.items()}

    @property
    def given(self) -> int:
        """Batches that this member was given and has not committed."""
        given = 0
        for one in self.by_name.values():  # no generator: once in each step
            given += one.given
        return given

    def add(self, name: str, follower: Follower) -> None:
        """Adds a follower: it goes on with each training step from now on, and agrees with its like on other members
        when they change."""
        name = f"{name} {len(self.by_name)}"
        self.by_name[name] = follower
        if name in self._told:  # others have had it before the members changed
            follower.hear(self._told[name], *self._where)

    def check(self, ranks: int) -> None:
        """Raises ValueError if there can't be so many."""
        for one in self.by_name.values():
            one.check(ranks)

    def commit(self) -> None:
        """A training step was committed."""
        for one in self.by_name.values():
            one.commit()

    def tell(self) -> dict[str, dict[str, Any]]:
        """Returns the words for the other members."""
        return {name: one.tell() for name, one in self.by_name.items()}

    def tell_given(self) -> dict[str, int]:
        """Returns the batches that this member was given, and has not committed, by name."""
        return {name: one.given for name, one in self.by_name.items()}

    def hear(
        self, everyone: Mapping[int, tuple[Mapping[str, int], Told]], members: Sequence[int], generation: int
    ) -> float:
        """Takes in what all members have told that hold the job's state. ``members``: who takes part from now on.
        Returns by how much the batches weigh more now that this member was given."""
        told: dict[str, dict[int, tuple[int, Mapping[str, Any]]]] = {}
        for member, (given, states) in everyone.items():
            for name, state in states.items():
                told.setdefault(name, {})[member] = given[name], state
        self._told = dict(told)
        self._where = members, generation
        heard = ((self.by_name[name], states) for name, states in told.items() if name in self.by_name)
        return math.prod(one.hear(states, members, generation) for one, states in heard)
