"""Pairs of ranks that average with each other: formed anew when members are lost, one rests where they are odd."""

import pytest

from bagua.algorithms.pairs import Pairs


class Members:
    def __init__(self, ranks, rank):
        self.ranks = tuple(ranks)
        self._rank = rank

    def rank(self):
        return self.ranks.index(self._rank)

    def nranks(self):
        return len(self.ranks)


class Group:
    """``n`` ranks on one host, as rank ``rank`` sees them."""

    def __init__(self, n, rank):
        self.n, self.rank = n, rank

    @property
    def hosts(self):
        return (tuple(range(self.n)),)

    def get_global_communicator(self):
        return Members(range(self.n), self.rank)

    def communicator(self, ranks):
        return Members(ranks, self.rank)

    def new_communicator(self, ranks, purpose):
        assert purpose, "ranks make them at moments of their own"
        return self.communicator(ranks)


def met(pairs):
    """Whom each rank meets in this round; the next one begins."""
    found = []
    for one in pairs:
        everybody = one.everybody()
        found.append(None if everybody is None else everybody.ranks)
        one.round += 1
    return found


@pytest.mark.parametrize("n", [3, 5])
def test_one_rests_where_ranks_are_odd(n):
    pairs = [Pairs(Group(n, rank), hierarchical=False, rests=True) for rank in range(n)]
    resting = set()
    for _ in range(n + 1):
        found = met(pairs)
        assert found.count(None) == 1
        resting.add(found.index(None))
        for rank, both in enumerate(found):
            if both is not None:
                assert rank in both and all(found[other] == both for other in both)
    assert len(resting) == (n + 1) // 2  # those that meet nobody in some round: one half


def test_pairs_are_formed_anew_when_members_are_lost():
    groups = [Group(4, rank) for rank in range(4)]
    pairs = [Pairs(group, hierarchical=False) for group in groups]
    met(pairs)
    for group, one in zip(groups[:3], pairs[:3], strict=True):
        group.n = 3
        one.form()
    assert met(pairs[:3]).count(None) == 1
    for group, one in zip(groups[:1], pairs[:1], strict=True):
        group.n = 1
        one.form()
    assert pairs[0].everybody() is None and pairs[0].peer == 0


@pytest.mark.parametrize("n", range(1, 8))
def test_members_of_all_pairs_meet_without_a_circle(n):
    """Each rank waits in each of its communicators for the other member, one after the other: all come to the end."""
    pairs = [Pairs(Group(n, rank), hierarchical=False, private="test", rests=True) for rank in range(n)]
    left = [[one.ranks for one in pair.of_all_rounds()] for pair in pairs]
    assert {ranks for one in left for ranks in one} == {
        (a, b) for a in range((n + 1) // 2) for b in range(n) if b >= (n + 1) // 2
    }
    while any(left):
        both = next(one[0] for one in left if one and all(left[rank][:1] == one[:1] for rank in one[0]))
        for rank in both:
            left[rank].pop(0)
    assert [pair.round for pair in pairs] == [0] * n
