"""Tells a program that the members of its job have changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bagua.torch_api.job.session import Session


class MembershipChange(NamedTuple):
    """A change of membership, told to a program. ``previous_world_size``: when it was told last, or joined the job; on
    a newcomer, what others were told last."""

    generation: int
    rank: int
    world_size: int
    previous_world_size: int


OnChange = Callable[[MembershipChange], object]


class MembershipChanges:
    """Changes of membership of one session, as the program is told of them. ``told_in``: the generation that the
    program was told of last. ``world_size``: its."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.told_in = session.membership.generation
        self.world_size = session.membership.world_size
        self.functions: list[OnChange] = []

    def tell(self) -> None:
        """Members have changed, and what the program exchanged has been committed. Nothing if it knows, and while some
        rest."""
        now = self._session.membership
        if self.told_in == now.generation or now.resting:
            return
        change = MembershipChange(now.generation, now.rank, now.world_size, self.world_size)
        self.told_in, self.world_size = now.generation, now.world_size
        for function in list(self.functions):  # a copy: a function may add others
            function(change)
