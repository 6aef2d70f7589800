"""Shares of samples: every sample of an epoch is in exactly one committed step, whatever members are lost."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from bagua.torch_api.data.shares import Progress


def test_rounds():
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
def test_no_sample_is_left_in_the_last_epoch(length, shares):
    progress = Progress(length, tuple(range(len(shares))), tuple(shares), last=True)
    rounds = progress.rounds(length)
    used = [position for batches in rounds for batch in batches for position in batch]
    assert used == list(range(length if length >= len(shares) else 0))
    assert all(1 <= len(batch) <= share for batches in rounds for batch, share in zip(batches, shares, strict=True))
    assert len(rounds) == (-(-length // sum(shares)) if used else 0)
