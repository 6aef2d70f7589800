"""Shares of samples: every sample of an epoch is in exactly one committed step, whatever members are lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bagua.torch_api.data.shares import Batch, Progress

MOST_AHEAD = 3


class Job(RuleBasedStateMachine):
    """Members that take batches, commit, are lost and join. ``given``: since the last commit."""

    progress = Progress(0, (0,), (1,))

    def __init__(self) -> None:
        super().__init__()
        self.committed: list[int] = []
        self.given: dict[int, list[Batch]] = {}
        self.next_member = 0

    @initialize(
        length=st.integers(0, 60), shares=st.lists(st.integers(1, 5), min_size=1, max_size=5), last=st.booleans()
    )
    def begin(self, length: int, shares: list[int], last: bool) -> None:
        self.progress = Progress(length, tuple(range(len(shares))), tuple(shares), last=last)
        self.given = {member: [] for member in range(len(shares))}
        self.next_member = len(shares)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(self.progress.members))
        number = len(self.given[member])
        rounds = self.progress.rounds(number + 1)
        if number < min(len(rounds), MOST_AHEAD):
            batch = rounds[number][self.progress.members.index(member)]
            assert batch
            self.given[member].append(batch)

    @precondition(lambda self: all(self.given.values()))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, min(map(len, self.given.values()))))
        self.progress = self.progress.commit(count)
        for batches in self.given.values():
            self.committed += [position for batch in batches[:count] for position in batch]
            del batches[:count]

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        members = self.progress.members
        gone = data.draw(st.sets(st.sampled_from(members), max_size=len(members) - 1))
        left = [member for member in members if member not in gone]
        shares = [self.progress.shares[members.index(member)] for member in left]
        self.progress = self.progress.regroup(left, shares, {m: len(batches) for m, batches in self.given.items()})
        self.given = {member: self.given[member] for member in left}

    @precondition(lambda self: not any(self.given.values()) and len(self.given) < 6)
    @rule(share=st.integers(1, 4))
    def join(self, share: int) -> None:
        members = (*self.progress.members, self.next_member)
        self.progress = self.progress.regroup(members, (*self.progress.shares, share), dict.fromkeys(members, 0))
        self.given[self.next_member] = []
        self.next_member += 1

    @invariant()
    def batches_stay_with_whom_they_were_given(self) -> None:
        for rank, member in enumerate(self.progress.members[: len(self.given)]):
            rounds = self.progress.rounds(len(self.given[member]))
            assert [batches[rank] for batches in rounds] == self.given[member]
            assert [self.progress.batch(member, number) for number in range(len(rounds))] == self.given[member]

    @invariant()
    def no_sample_is_used_twice(self) -> None:
        given = [position for batches in self.given.values() for batch in batches for position in batch]
        used = [*given, *self.committed]
        assert len(used) == len(set(used)) and all(0 <= position < self.progress.length for position in used)

    @invariant()
    def nobody_waits_for_a_round_that_others_began(self) -> None:
        most = max(map(len, self.given.values()), default=0)
        assert len(self.progress.rounds(most)) == most

    def teardown(self) -> None:
        progress, used = self.progress, list(self.committed)
        while rounds := progress.rounds(1):
            used += [position for batch in rounds[0] for position in batch]
            progress = progress.commit()
        rest = progress.rest()
        assert len(rest) < len(progress.members)
        assert sorted([*used, *rest]) == list(range(progress.length))


TestJob = Job.TestCase
TestJob.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_rounds() -> None:
    progress = Progress(11, (0, 1), (2, 3))
    assert progress.rounds(3) == [((0, 1), (2, 3, 4)), ((5, 6), (7, 8, 9))], "the last sample has no partner"
    assert progress.commit(2).rest() == (10,)
    progress = replace(progress, last=True)
    assert progress.rounds(4) == [((0, 1), (2, 3, 4)), ((5, 6), (7,)), ((8, 9), (10,))], "the last ones share alike"
    assert progress.commit(3).rest() == ()
    smaller = Progress(8, (0, 1), (3, 3)).rounds(2)
    assert smaller[1] == ((6,), (7,)), "both get as many"
    assert Progress(9, (0, 1), (3, 3), last=True).rounds(2)[1] == ((6, 7), (8,))
    least = Progress(5, (0, 1), (1, 1), last=True)
    assert len(least.rounds(3)) == 2 and least.commit(2).rest() == (4,), "one has no partner"


@given(length=st.integers(2, 80), shares=st.lists(st.integers(2, 6), min_size=1, max_size=6))
def test_no_sample_is_left_in_the_last_epoch(length: int, shares: list[int]) -> None:
    progress = Progress(length, tuple(range(len(shares))), tuple(shares), last=True)
    rounds = progress.rounds(length)
    used = [position for batches in rounds for batch in batches for position in batch]
    assert used == list(range(length if length >= len(shares) else 0))
    assert all(1 <= len(batch) <= share for batches in rounds for batch, share in zip(batches, shares, strict=True))
    assert len(rounds) == (-(-length // sum(shares)) if used else 0)


def test_a_lost_member_gives_back() -> None:
    before = Progress(12, (0, 1, 2), (2, 2, 2))
    after = before.regroup((0, 2), (2, 2), {0: 1, 1: 1, 2: 1})
    assert after.rounds(1) == [((0, 1), (4, 5))], "the survivors' batches stay theirs"
    assert after.commit().rounds(1) == [((2, 3), (6, 7))], "the others come next"


def test_one_that_is_ahead_keeps_its_batch() -> None:
    after = Progress(9, (0, 1, 2), (1, 1, 1)).regroup((0, 1), (1, 1), {0: 2, 1: 1, 2: 1})
    assert after.rounds(2) == [((0,), (1,)), ((3,), (2,))]


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        Progress(3, (0, 1), (1, 0))
    with pytest.raises(ValueError, match="3 rounds can't be committed: the epoch has 1 left"):
        Progress(3, (0, 1), (1, 1)).commit(3)
