"""The samples that each member trains on next. Every sample of an epoch is in exactly one committed step.

Samples are known by their position in the order of their epoch. A *round* gives one batch to every member; a training
step uses the batches of one round, or of several (gradient accumulation). All members compute the same rounds from the
same ``Progress`` without a message; they tell each other only, when the membership changes, how many batches each has
been given.

When a member is lost, the batches of the survivors stay theirs: their gradients are computed already, and the step is
repeated with them. Batches that the lost one had been given since the last commit go back, and come next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

Batch = tuple[int, ...]  # Positions in the order of the epoch
# Divides the positions of a round into one batch for each rank, of these sizes (0: none).
Split = Callable[[Batch, Sequence[int]], list[Batch]]


@dataclass(frozen=True)
class Progress:
    """Progress of the job in an epoch, counted from the last committed step. ``length``: samples of this epoch.
    ``members``: their numbers, in the order of ranks. ``shares``: samples that each gets in a round. ``returned``:
    positions below ``cursor`` that have been given back. ``held``: batches that a member was given before the last
    change of membership and that have not been committed. ``split``: None gives each rank the positions that come next.
    """

    length: int
    members: tuple[int, ...]
    shares: tuple[int, ...]
    cursor: int = 0
    returned: tuple[int, ...] = ()
    held: Mapping[int, tuple[Batch, ...]] = field(default_factory=dict)
    split: Split | None = field(default=None, compare=False, repr=False)  # two partial functions are never equal
    last: bool = False  # no other epoch follows: the last rounds share what is left, alike or not

    def __post_init__(self) -> None:
        if not self.shares or min(self.shares) < 1:
            raise ValueError(f"shares are {self.shares}: every rank needs at least one sample of each round. [BG701]")

    @property
    def left(self) -> int:
        """Samples that no member has been given."""
        return len(self.returned) + self.length - self.cursor

    def rounds(self, count: int) -> list[tuple[Batch, ...]]:
        """The next ``count`` rounds, each with a batch for every rank; fewer where the epoch ends before. The last ones
        are smaller, but of one size for all that are given one. Fewer samples than ranks are left over. In the last
        epoch sizes differ, and none are, unless a rank was lost in the last round, or a round can't be smaller."""
        return _deal(self, count)[0]

    def batch(self, member: int, number: int) -> Batch | None:
        """The member's batch of round ``number``, counted from 0: as ``rounds``, but quicker. None: there is none."""
        rank, taken = self.members.index(member), 0
        for earlier in range(number):
            sizes = _sizes(self, earlier, taken)
            if sizes is None:
                return None
            taken += sum(sizes)
        sizes = _sizes(self, number, taken)
        if sizes is None:
            return None
        if not sizes[rank]:  # the rank holds a batch of that round already
            return self.held[member][number]
        if self.split is not None:
            return _parts(self, taken, sizes)[rank]
        begin = taken + sum(sizes[:rank])
        return _pool(self, begin, begin + sizes[rank])

    def commit(self, count: int = 1) -> Progress:
        """Commits the batches of every member of the next ``count`` rounds. Raises ValueError if there are not so
        many."""
        given, taken = _deal(self, count)
        if len(given) < count:
            raise ValueError(f"{count} rounds can't be committed: the epoch has {len(given)} left. [BG704]")
        held = {member: batches[count:] for member, batches in self.held.items() if len(batches) > count}
        late = max(0, taken - len(self.returned))
        return replace(self, cursor=self.cursor + late, returned=self.returned[taken:], held=held)

    def regroup(self, members: Sequence[int], shares: Sequence[int], given: Mapping[int, int]) -> Progress:
        """Follows a change of membership. ``members`` and ``shares``: the new ones, in the order of ranks. ``given``:
        how many batches each survivor was given since the last commit; newcomers may join where nobody was given any.
        """
        survivors = [member for member in members if member in self.members]
        rounds = self.rounds(max((given[member] for member in survivors), default=0))
        held = {
            member: tuple(batches[self.members.index(member)] for batches in rounds[: given[member]])
            for member in survivors
            if given[member]
        }
        kept = set(_positions(held))
        # Batches that survivors hold may lie beyond the cursor.
        reached = max([self.cursor, *(position + 1 for position in kept)])
        # All below it that nobody holds comes next.
        back = {*self.returned, *_positions(self.held), *range(self.cursor, reached)} - kept
        return Progress(
            self.length, tuple(members), tuple(shares), reached, tuple(sorted(back)), held, self.split, self.last
        )

    def to_json(self) -> dict[str, Any]:
        """Returns all fields but ``split``, in JSON's types."""
        # A function is no plain data: each rank has its own.
        names = ("length", "members", "shares", "cursor", "returned", "held")
        return {name: getattr(self, name) for name in names}

    def rest(self) -> tuple[int, ...]:
        """Positions that are left when there is no other round: they open the next epoch."""
        return (*self.returned, *range(self.cursor, self.length))


def _positions(held: Mapping[int, tuple[Batch, ...]]) -> chain[int]:
    return chain.from_iterable(chain.from_iterable(held.values()))


def _deal(progress: Progress, count: int) -> tuple[list[tuple[Batch, ...]], int]:
    """Returns (rounds, samples that they take of those that no member had been given)."""
    rounds: list[tuple[Batch, ...]] = []
    taken = 0
    while len(rounds) < count and (sizes := _sizes(progress, len(rounds), taken)) is not None:
        parts = zip(progress.members, sizes, _parts(progress, taken, sizes), strict=True)
        rounds.append(tuple(part if size else progress.held[member][len(rounds)] for member, size, part in parts))
        taken += sum(sizes)
    return rounds, taken


def _parts(progress: Progress, taken: int, sizes: Sequence[int]) -> list[Batch]:
    """The batches of the ranks in the round that begins after ``taken`` samples."""
    if progress.split is not None:
        return progress.split(_pool(progress, taken, taken + sum(sizes)), sizes)
    ends = [taken + end for end in accumulate(sizes)]
    return [_pool(progress, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _sizes(progress: Progress, number: int, taken: int) -> tuple[int, ...] | None:
    """Samples that each member is given in round ``number``, 0 where it holds its batch; ``taken``: by those before.
    None: there is no such round."""
    needing = _needing(progress, number)
    held_rounds = max(map(len, progress.held.values()), default=0)
    later = sum(_needing(progress, further) for further in range(number + 1, held_rounds))
    # A later round in which somebody holds a batch must take place: a sample is kept for each who has none there.
    room = max(0, progress.left - taken - later) // needing if needing else 0
    if needing and not room:
        return None
    if needing == len(progress.members) and not progress.last:
        return tuple(min(share, room) for share in progress.shares)
    if needing == len(progress.members):
        left = progress.left - taken - later
        return _filled(progress.shares, _of_round(left, sum(progress.shares), needing))
    holds = (number < len(progress.held.get(member, ())) for member in progress.members)
    return tuple(0 if held else min(share, room) for held, share in zip(holds, progress.shares, strict=True))


def _of_round(left: int, most: int, members: int) -> int:
    """Samples of the next round: as many as fit, but two rounds share the last ones where a remainder that is not
    enough for all members would follow."""
    return -(-left // 2) if most < left < most + members and left >= 2 * members else min(left, most)


def _filled(shares: Sequence[int], total: int) -> tuple[int, ...]:
    """Divides so many samples as evenly as the shares allow. There is one for each at least."""
    level = max(shares)
    while (even := sum(min(share, level) for share in shares)) > total:
        level -= 1
    sizes = []
    for share in shares:
        more = share > level and even < total
        even += more
        sizes.append(min(share, level) + more)
    return tuple(sizes)


def _needing(progress: Progress, number: int) -> int:
    """Members that hold no batch of that round."""
    if not progress.held:
        return len(progress.members)
    return sum(len(progress.held.get(member, ())) <= number for member in progress.members)


def _pool(progress: Progress, begin: int, end: int) -> Batch:
    """Samples number ``begin`` to ``end`` of those that no member had been given."""
    first = len(progress.returned)
    late = range(progress.cursor + max(0, begin - first), progress.cursor + max(0, end - first))
    return (*progress.returned[begin:end], *late)
