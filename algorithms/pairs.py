"""Who averages with whom where ranks, or hosts, do it in pairs that change: ``shift_one`` of the original."""

from __future__ import annotations

from bagua.algorithms.base import Communicator, ProcessGroup


class Pairs:
    """The pairs of ``n`` units, which are ranks, or hosts with ``hierarchical``.

    In round s unit u < n/2 meets unit n/2 + (s + u) mod n/2, so that after n/2 rounds each unit of one half has met
    each of the other. ``round`` is that s; the owner counts it up. One unit has no peer.

    ``private``: communicators of its own. Without it they are the process group's, which other models use, too: then
    all must exchange in the same order on all ranks.

    Raises ValueError for an odd number of units above 1.
    """

    def __init__(self, process_group: ProcessGroup, hierarchical: bool, private: bool = False) -> None:
        self._group = process_group
        self._private = private
        self.hierarchical = hierarchical
        hosts = process_group.hosts
        everyone = process_group.get_global_communicator()
        mine = everyone.ranks[everyone.rank()]
        self.units = hosts if hierarchical else tuple((rank,) for rank in everyone.ranks)
        self.n = len(self.units)
        if self.n > 1 and self.n % 2:
            raise ValueError(
                f"peer_selection_mode='shift_one' pairs {'hosts' if hierarchical else 'ranks'}, and there are "
                f"{self.n}: an odd number can't be paired. Use an even number, or peer_selection_mode='all'."
            )
        self.position = next(index for index, unit in enumerate(self.units) if mine in unit)
        self.leader = mine == self.units[self.position][0]
        self.round = 0
        self._host_of = {rank: index for index, host in enumerate(hosts) for rank in host}
        self._kept: dict[tuple[int, ...], Communicator] = {}

    @property
    def peer(self) -> int:
        """The other unit's position in this round."""
        return peer_of(self.position, self.n, self.round)

    @property
    def first(self) -> bool:
        """Whether this unit is the first of its pair."""
        return self.position < self.peer

    def is_far(self, peer: int) -> bool:
        """Whether that unit is on another host."""
        return self._host_of[self.units[peer][0]] != self._host_of[self.units[self.position][0]]

    @property
    def partners(self) -> tuple[int, ...]:
        """All units that this one ever meets."""
        half = self.n // 2
        return tuple(range(half, self.n)) if self.position < half else tuple(range(half))

    def weights(self) -> tuple[float, float]:
        """Shares of the first and of the second unit in the mean over all ranks of both."""
        here, there = len(self.units[self.position]), len(self.units[self.peer])
        own = here / (here + there)
        return (own, 1 - own) if self.first else (1 - own, own)

    def everybody(self) -> Communicator:
        """All ranks of both units."""
        return self._communicator((*self.units[self.position], *self.units[self.peer]))

    def leaders(self) -> Communicator | None:
        """The first rank of each unit; None on other ranks."""
        if not self.leader:
            return None
        return self._communicator((self.units[self.position][0], self.units[self.peer][0]))

    def _communicator(self, ranks: tuple[int, ...]) -> Communicator:
        if not self._private:
            return self._group.communicator(sorted(ranks))
        key = tuple(sorted(ranks))
        if key not in self._kept:
            self._kept[key] = self._group.new_communicator(key)
        return self._kept[key]


def peer_of(unit: int, n: int, round: int) -> int:
    """The peer of ``unit`` of ``n`` (even) in a round."""
    half = n // 2
    if unit < half:
        return (round + unit) % ((n + 1) // 2) + half
    return (unit - half - round) % half
