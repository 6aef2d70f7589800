"""Which ranks make islands, and which of them are lost together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua.base import islands
from bagua.base.errors import ConfigError
from bagua.torch_api.data.epoch_progress import Course, Setting


@pytest.mark.parametrize(
    ("size", "ranks", "fits"),
    [
        *((size, ranks, True) for size, ranks in [(1, [3]), (2, [4, 2]), (3, [3, 3]), (4, [2, 2]), (2, [1] * 4)]),
        *((size, ranks, True) for size, ranks in [(8, [4, 4]), (4, [2, 2, 4])]),
        *((size, ranks, False) for size, ranks in [(2, [3]), (4, [6, 2]), (3, [2, 2, 2]), (4, [1, 3]), (4, [2, 4, 2])]),
    ],
)
def test_hosts_hold_whole_islands_or_islands_whole_hosts(size, ranks, fits):
    assert (not islands.misfit(size, ranks)) is fits


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "1" * 5000])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="BG114"):
        islands.size_in({islands.VARIABLE: text})


@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_one_lost_member_costs_its_island_alone(size, count, data):
    members = list(range(size * count))
    lost = data.draw(st.sets(st.sampled_from(members)))
    staying, out = islands.divide(members, size, lost.__contains__)
    assert sorted(staying + out) == members
    assert {one // size for one in out} == {one // size for one in lost}
    assert len(staying) % size == 0


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 40), st.booleans(), st.integers(1, 5))
def test_ranks_of_an_island_get_as_many_samples(size, count, length, together, each):
    ranks = size * count
    sizes = (
        {"batch_size": None, "global_batch": size * (count + each)}
        if together
        else {"batch_size": each, "global_batch": None}
    )
    courses = [
        Course(Setting(length, **sizes, shuffle=True, seed=0), range(ranks), member, 1, island_size=size)
        for member in range(ranks)
    ]
    used = []
    while (batches := [course.batch() for course in courses])[0] is not None:
        assert all(len(batch) == len(batches[rank // size * size]) for rank, batch in enumerate(batches))
        used += [index for batch in batches for index in batch]
        for course in courses:
            course.give()
            course.commit()
    assert len(used) == len(set(used)) and length - len(used) < ranks
