"""The progress of one member through the epochs of a dataset: the batches that it is given, and those that are
committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from bagua.torch_api.comm.checkpoint_state import Kept
from bagua.torch_api.comm.step_state import Heard
from bagua.torch_api.data.complexity import balanced_order, balanced_split
from bagua.torch_api.data.resumable import differences
from bagua.torch_api.data.shares import Batch, Progress, Split

SIZES = ("batch_size", "global_batch", "per_island")  # settings that a resumed job may change


@dataclass(frozen=True)
class Setting:
    """The arguments of a sampler that all members have alike. Exactly one of ``batch_size`` and ``global_batch`` is
    given. ``costs``: a checksum of what samples cost; empty: their costs are not known. ``per_island``: ranks of an
    island get the same batches, and sizes are those of islands."""

    length: int
    batch_size: int | None
    global_batch: int | None
    shuffle: bool
    seed: int
    costs: str = ""
    per_island: bool = False

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError("The dataset is empty: there is nothing to share out. [BG701]")
        sizes = {"batch_size": self.batch_size, "global_batch": self.global_batch}
        given = {name: value for name, value in sizes.items() if value is not None}
        if len(given) != 1:
            raise ValueError(
                "Pass either batch_size, samples of each rank, or global_batch, samples of all together. [BG701]"
            )
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}: it must be a whole number from 1 on. [BG701]")

    def shares(self, ranks: int, island_size: int = 1) -> tuple[int, ...]:
        """Samples of each rank in a round; those of an island have as many. With ``per_island`` the samples of each
        island. Raises ValueError if there is not one for each."""
        who = "ranks"
        if self.per_island:
            ranks, island_size, who = ranks // island_size, 1, "islands"
        if self.batch_size is not None:
            return (self.batch_size,) * ranks
        assert self.global_batch is not None
        if self.global_batch < ranks:
            raise ValueError(
                f"global_batch is {self.global_batch}: that is not one sample for each of {ranks} {who}. [BG701]"
            )
        if self.global_batch % island_size:
            raise ValueError(
                f"global_batch is {self.global_batch}: ranks of an island get as many samples each, so it must be a "
                f"multiple of the island's size, {island_size}. [BG701]"
            )
        each, more = divmod(self.global_batch // island_size, ranks // island_size)
        return tuple(each + (rank // island_size < more) for rank in range(ranks))  # the first get the remainder

    def order(self, epoch: int, opening: Sequence[int], costs: torch.Tensor | None = None, chunk: int = 1) -> list[int]:
        """Indices of samples in the order of that epoch; ``opening`` come first. With ``costs``, float64 of shape
        [length], ``chunk`` of like costs follow each other."""
        if not self.shuffle:
            return [*opening, *range(self.length)]
        random = torch.Generator(device="cpu")
        random.manual_seed(self.seed + epoch)
        if costs is not None:
            return [*opening, *balanced_order(costs, chunk, random)]
        return [*opening, *torch.randperm(self.length, generator=random).tolist()]


class Course:
    """``epoch``: the present one. ``given``: batches that this member was given and has not committed. ``version``:
    goes up when batches that it has not been given become others. ``opening``: samples left of the epoch before."""

    def __init__(
        self,
        setting: Setting,
        members: Sequence[int],
        member: int,
        generation: int,
        costs: torch.Tensor | None = None,
        island_size: int = 1,
    ) -> None:
        self.setting = setting
        self._island_size = island_size
        self._costs = costs
        self.member = member
        self.epoch = 0
        self.given = 0
        self.version = 0
        self._committed = 0  # rounds of this epoch
        self._generation = generation  # in which members and shares were settled
        self._counted = 0  # of the rounds that come next: already committed, because others had done so
        self.opening: tuple[int, ...] = ()
        self._epochs: int | None = None  # of the training; None: it was not said
        self._begin(members)

    def _begin(self, members: Sequence[int]) -> None:
        self._members = tuple(members)
        readers = self._readers(members)
        self._chunk = len(readers)
        split = self._order_epoch()
        shares = self.setting.shares(len(members), self._island_size)
        self._progress = Progress(len(self._order), readers, shares, split=split, last=self._is_last)
        self.given = self._committed = 0
        self.version += 1

    def _readers(self, members: Sequence[int]) -> tuple[int, ...]:
        """Members that get batches of their own: all, or the first one of each island."""
        return tuple(members[:: self._island_size if self.setting.per_island else 1])

    @property
    def _reader(self) -> int:
        """The member of which this one gets the batches."""
        own = self._members.index(self.member)
        return self._members[own - own % self._island_size] if self.setting.per_island else self.member

    def end_after(self, epochs: int) -> None:
        """The training has so many epochs: all samples of the last one are used in it."""
        self._epochs = epochs
        self._progress = replace(self._progress, last=self._is_last)

    @property
    def _is_last(self) -> bool:
        """False where ranks of an island get other samples each: they run the same passes, so none may have a batch
        less than another."""
        alike = self._island_size == 1 or self.setting.per_island
        return alike and self._epochs is not None and self.epoch + 1 >= self._epochs

    def _order_epoch(self) -> Split | None:
        """Makes the order of this epoch. Returns how rounds of it are divided, if costs are known."""
        self._order = self.setting.order(self.epoch, self.opening, self._costs, self._chunk)
        return None if self._costs is None else partial(balanced_split, self._costs[self._order].tolist())

    @property
    def left(self) -> int:
        """Rounds of this epoch that this member has not been given; those at the end are smaller."""
        more, size = self._progress.left, sum(self._progress.shares)
        # One round more than there are full ones: the last ones are smaller.
        return max(0, len(self._progress.rounds(self.given + 1 + -(-more // size))) - self.given)

    @property
    def steps_of_epoch(self) -> int:
        """Rounds of a whole epoch with the present members, if none of its samples goes to the next one."""
        return -(-self.setting.length // sum(self._progress.shares))

    def batch(self, ahead: int = 0) -> list[int] | None:
        """Indices of the samples of this member's batch after the next ``ahead`` ones. None: the epoch has no more."""
        batch = self._progress.batch(self._reader, self.given + ahead)
        return None if batch is None else self._samples(batch)

    def _samples(self, batch: Batch) -> list[int]:
        return [self._order[position] for position in batch]

    def give(self) -> float:
        """Gives out the next batch. Returns its weight: its samples, divided by the mean of all ranks."""
        batches = self._progress.rounds(self.given + 1)[self.given]
        self.given += 1
        return _weight(batches, self._progress.members.index(self._reader))

    def commit(self) -> None:
        """Commits a step of all members: the batches that they were given are used."""
        if self._counted:  # hear() has committed it: other members had done so
            self._counted = 0
            return
        self._commit(self.given)

    def _commit(self, rounds: int) -> None:
        self._progress = self._progress.commit(rounds)
        self._committed += rounds
        self.given -= rounds

    def end_epoch(self) -> None:
        """Ends the epoch. Samples that are left open the next one if they are fewer than ranks; else all ranks have
        given up this epoch, and they are not used in it."""
        self._commit(self.given)
        # A whole round that is left: the loop gave the epoch up.
        self.opening = () if self._progress.rounds(1) else tuple(self._samples(self._progress.rest()))
        self.epoch += 1
        self._begin(self._members)

    # Changes of membership

    def describe(self) -> dict[str, Any]:
        """Returns all that must be the same on all members."""
        return asdict(self.setting)

    def check(self, ranks: int) -> None:
        """Raises ValueError if a round has no sample for each of so many."""
        self.setting.shares(ranks, self._island_size)

    def tell(self) -> dict[str, Any]:
        """State for the other members, in JSON's types: the same on all that have committed as much."""
        return {
            "setting": asdict(self.setting),
            "generation": self._generation,
            "epoch": self.epoch,
            "committed": self._committed,
            "opening": self.opening,
            "chunk": self._chunk,
            "progress": self._progress.to_json(),
        }

    def hear(self, told: Heard, members: Sequence[int], generation: int) -> float:
        """The members of generation ``generation``, in the order of ranks, have told these states, by their numbers;
        with each the batches that it was given. Afterwards all of them have the same rounds. A member that tells
        nothing is new: it enters where the others are.

        Some may be a step ahead: others learn here that the step under way will be committed, and count it. Returns by
        how much batches that this member was given weigh more now: see ``give``. Raises ValueError if settings differ.
        """
        setting = asdict(self.setting)
        for member, (_, other) in told.items():
            if other["setting"] != setting:
                raise ValueError(
                    f"ElasticSampler differs between members: {setting} on this one, {other['setting']} on member "
                    f"{member}. All ranks make it with the same arguments. [BG603]"
                )
        # The furthest member: all that it has committed is committed everywhere.
        first = max((state for _, state in told.values()), key=itemgetter("generation", "epoch", "committed"))
        given = {member: _given(*told[member], first) if member in told else 0 for member in members}
        own = given[self.member]
        self._counted += self.given - own  # batches that others have committed: the next ``commit`` here is theirs
        self._adopt(first)
        self.given = own
        change = self._change_of_weight(members)  # before shares change: it asks who had which batch
        shares = self.setting.shares(len(members), self._island_size)
        self._members = tuple(members)
        readers = self._readers(members)
        # One rank of an island may have been given a batch before another one.
        size = len(members) // len(readers)
        held = {one: max(map(given.__getitem__, members[at * size :][:size])) for at, one in enumerate(readers)}
        self._progress = self._progress.regroup(readers, shares, held)
        self._generation = generation
        self.version += 1
        return change

    def _change_of_weight(self, members: Sequence[int]) -> float:
        """Batches of those that are left may be larger, or smaller, than those of all have been: the mean of their
        weights is to be 1 again."""
        rounds = self._progress.rounds(self.given)[: self.given]
        left = [rank for rank, member in enumerate(self._progress.members) if member in members]
        weights = [_weight(batches, rank) for batches in rounds for rank in left]
        return len(weights) / sum(weights) if weights else 1.0

    # Checkpoints: see ``Keeper``

    def keep(self) -> Kept:
        """Returns the state to keep. Batches that this rank was given count: weights have their local steps, also where
        the exchange that commits them is still to come."""
        progress = self._progress.commit(self.given)
        return Kept({**self.tell(), "committed": self._committed + self.given, "progress": progress.to_json()})

    def misfit(self, document: Any) -> str:
        """Says which settings differ; sizes of batches may."""
        mine = {name: value for name, value in asdict(self.setting).items() if name not in SIZES}
        return differences(document["setting"], mine)

    def make_room(self, document: Any, own: Any) -> Kept:
        """Makes the epoch go on with the present members, and with all samples that no committed batch had."""
        members, generation = self._members, self._generation
        # ``hear`` wants the settings and the generation of now.
        state = {**document, "setting": asdict(self.setting), "generation": generation}
        self.given = 0
        # Members of the checkpoint are gone: each held nothing.
        self.hear({member: (0, state) for member in document["progress"]["members"]}, members, generation)
        return Kept(None)

    def filled(self, ranks: int) -> None:
        """Does nothing: there is no more to take over."""

    def _adopt(self, state: Mapping[str, Any]) -> None:
        self.epoch = int(state["epoch"])
        self._committed = int(state["committed"])
        self.opening = tuple(state["opening"])
        self._chunk = int(state["chunk"])
        split = self._order_epoch()
        told = state["progress"]
        self._progress = Progress(
            length=told["length"],
            members=tuple(told["members"]),
            shares=tuple(told["shares"]),
            cursor=told["cursor"],
            returned=tuple(told["returned"]),
            held={int(member): tuple(map(tuple, batches)) for member, batches in told["held"].items()},
            split=split,
            last=self._is_last,
        )


def _weight(batches: Sequence[Batch], rank: int) -> float:
    """Returns the samples of this rank's batch in a round, divided by the mean of all ranks."""
    return len(batches[rank]) * len(batches) / sum(map(len, batches))


def _given(given: int, state: Mapping[str, Any], first: Mapping[str, Any]) -> int:
    """Batches that the member of ``state`` was given and that the member of ``first`` has not committed with it."""
    if state["epoch"] < first["epoch"]:  # the epoch is over on the others
        return 0
    return given - (int(first["committed"]) - int(state["committed"]))
