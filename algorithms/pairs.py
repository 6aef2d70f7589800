"""Forms pairs of ranks, or of hosts, that average with each other, other ones in each round: ``shift_one``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bagua.algorithms.base import Communicator, ProcessGroup


class Pairs:
    """The pairs of ``n`` units, which are ranks, or hosts with ``hierarchical``.

    In round s unit u < n/2 meets unit n/2 + (s + u) mod n/2, so that after n/2 rounds each unit of one half has met
    each of the other. ``round`` is that s. One unit has no peer. ``met``: the peer of the last round that has begun.

    ``private``: a name that no others have, for exchanges that ranks begin at moments of their own, one after the
    other. Their communicators serve nobody else, and each call of ``leaders`` or ``everybody`` begins a round.
    Otherwise the owner counts ``round`` up, and communicators are the process group's, which all use in the same order.

    ``rests``: where the number of units is odd, one of them has no peer in each round. Otherwise ValueError is raised
    for an odd number above 1.
    """

    def __init__(self, process_group: ProcessGroup, hierarchical: bool, private: str = "", rests: bool = False) -> None:
        self._group = process_group
        self._private = private
        self.hierarchical = hierarchical
        self.round = 0
        self.form()
        if self.n != len(self.units) and not rests:
            raise ValueError(
                f"peer_selection_mode='shift_one' pairs {'hosts' if hierarchical else 'ranks'}, and there are "
                f"{len(self.units)}: an odd number can't be paired. Use an even number, or peer_selection_mode='all'. "
                "[BG308]"
            )

    def form(self) -> None:
        """Forms the pairs of those ranks that the group has now."""
        hosts = self._group.hosts
        everyone = self._group.get_global_communicator()
        mine = everyone.ranks[everyone.rank()]
        self.units = hosts if self.hierarchical else tuple((rank,) for rank in everyone.ranks)
        # An odd number is rounded up: one has no peer in each round.
        self.n = 1 if len(self.units) == 1 else len(self.units) + len(self.units) % 2
        self.position = next(index for index, unit in enumerate(self.units) if mine in unit)
        self.leader = mine == self.units[self.position][0]
        self.met = self.peer
        self._host_of = {rank: index for index, host in enumerate(hosts) for rank in host}
        self._kept: dict[tuple[int, ...], Communicator] = {}  # communicators of earlier members have ended

    @property
    def peer(self) -> int:
        """The other unit's position in this round."""
        return peer_of(self.position, self.n, self.round) if self.n > 1 else self.position

    def is_absent(self, peer: int) -> bool:
        """True if there is no unit at this position, so that its partner rests."""
        return peer >= len(self.units)

    def is_far(self, peer: int) -> bool:
        """True if that unit is on another host."""
        return self._host_of[self.units[peer][0]] != self._host_of[self.units[self.position][0]]

    @property
    def partners(self) -> tuple[int, ...]:
        """Units that this one ever meets."""
        half = self.n // 2
        return tuple(range(half, self.n)) if self.position < half else tuple(range(half))

    def mean(self, own: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
        """Returns the mean of this unit's and the last peer's values, each rank counted once. It has the same bits on
        both.
        """
        # The lower position comes first: both add in one order, and get the same bits.
        low, high = sorted((self.position, self.met))
        share = len(self.units[low]) / (len(self.units[low]) + len(self.units[high]))
        first, second = (own, arrived) if low == self.position else (arrived, own)
        return torch.mul(first, share).add_(second, alpha=1 - share)

    def everybody(self) -> Communicator | None:
        """Returns the communicator of all ranks of both units of this round; None if this unit rests. ``private``: the
        round has begun then."""
        if self._begin_or_rest():
            return None
        return self._communicator((*self.units[self.position], *self.units[self.peer]))

    def leaders(self) -> Communicator | None:
        """The same of the first rank of each unit; None on other ranks, too."""
        if not self.leader or self._begin_or_rest():
            return None
        return self._communicator((self.units[self.position][0], self.units[self.peer][0]))

    def of_all_rounds(self) -> Iterator[Communicator]:
        """Yields ``everybody`` of each round, without beginning any. Only for ``private`` with ranks as units.
        Ranks that meet at each communicator never wait in a circle: all go through the rounds in the same order.
        """
        for number in range(self.n // 2):
            peer = peer_of(self.position, self.n, number)
            if not self.is_absent(peer):
                yield self._own((*self.units[self.position], *self.units[peer]))

    def _begin_or_rest(self) -> bool:
        """Begins a round without a peer, and returns True, if this unit has none in it."""
        if self.n > 1 and not self.is_absent(self.peer):
            return False
        self.met = self.peer
        self.round += bool(self._private)
        return True

    def _communicator(self, ranks: tuple[int, ...]) -> Communicator:
        self.met = self.peer
        self.round += bool(self._private)
        return self._own(ranks) if self._private else self._group.communicator(sorted(ranks))

    def _own(self, ranks: tuple[int, ...]) -> Communicator:
        key = tuple(sorted(ranks))  # each of the two names itself first
        if key not in self._kept:
            self._kept[key] = self._group.new_communicator(key, purpose=self._private)
        return self._kept[key]


def peer_of(unit: int, n: int, round: int) -> int:
    """The peer of ``unit`` of ``n`` (even) in a round."""
    half = n // 2
    if unit < half:
        return (round + unit) % half + half
    return (unit - half - round) % half
