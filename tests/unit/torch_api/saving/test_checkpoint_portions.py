"""Shares of a checkpoint: each row once, and about as many bytes for each rank."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from bagua.torch_api.saving.staging import SMALL_BYTES, Size, portions

SIZES = st.lists(
    st.builds(Size, st.integers(0, 3000), st.sampled_from([0, 1, 4, 4096, 1 << 16, 1 << 20, (1 << 22) + 4])),
    max_size=30,
)


def check_each_row_once(sizes, ranks):
    found = portions(sizes, ranks)
    assert len(found) == ranks
    by_tensor = {number: [] for number in range(len(sizes))}
    for tensor, begin, end in [one for mine in found for one in mine]:
        by_tensor[tensor].append((begin, end))
    for number, rows in by_tensor.items():
        assert rows, "a tensor is in no portion"
        assert rows[0][0] == 0 and rows[-1][1] == sizes[number].rows
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(rows))
        assert len(rows) == 1 or all(begin < end for begin, end in rows)
        if sizes[number].rows * sizes[number].row_bytes < SMALL_BYTES:
            assert len(rows) == 1


@given(SIZES, st.integers(1, 9))
def test_each_row_is_written_once(sizes, ranks):
    check_each_row_once(sizes, ranks)


@given(SIZES, st.integers(1, 9))
def test_shares_are_balanced(sizes, ranks):
    """A share is larger than the mean by two pieces that can't be cut, at most: one at each end."""
    piece = max([SMALL_BYTES, *(size.row_bytes for size in sizes)])
    shares = [
        sum((end - begin) * sizes[tensor].row_bytes for tensor, begin, end in one) for one in portions(sizes, ranks)
    ]
    assert max(shares) <= sum(shares) / ranks + 2 * piece
