"""When checkpoints are due: by steps without a message, by time with few."""

import itertools
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua.torch_api.saving.schedule import Schedule


class Rank:
    """One rank, whose clock shows something else than those of the others."""

    def __init__(self, every, offset):
        self.now = 0.0
        self.schedule = Schedule(timedelta(seconds=every), lambda: self.now + offset)


class Job:
    """Ranks that hear what rank 0 decides."""

    def __init__(self, every, ranks):
        self.ranks = [Rank(every, 1000.0 * rank) for rank in range(ranks)]
        self.messages = 0
        self.saved = []

    def step(self, number, seconds):
        told = []

        def agree(decide):
            if not told:
                told.append(decide())
                self.messages += 1
            return told[0]

        for rank in self.ranks:
            rank.now += seconds
        found = [rank.schedule.due(number, agree) for rank in self.ranks]
        assert len(set(found)) == 1, "ranks differ"
        if found[0]:
            self.saved.append((number, self.ranks[0].now))


def test_steps_need_no_message():
    def never(_):
        raise AssertionError("a message")

    schedule = Schedule(3, lambda: 0.0)
    assert [step for step in range(1, 11) if schedule.due(step, never)] == [3, 6, 9]


@given(st.floats(0.001, 40.0), st.floats(1.0, 100.0))
def test_time_is_kept(step, every):
    """With steps of one length each checkpoint is within a step of its time, after the same step on all ranks."""
    job = Job(every, 3)
    count = min(3000, int(4 * every / step) + 8)
    for number in range(1, count):
        job.step(number, step)
    times = [0.0, *(when for _, when in job.saved)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert all(abs(gap - max(every, step)) <= step for gap in gaps), gaps
    if count == int(4 * every / step) + 8:
        assert gaps


def test_few_messages():
    job = Job(60.0, 2)
    for number in range(1, 6001):
        job.step(number, 0.1)
    assert len(job.saved) == 10
    assert job.messages < 6000 * 0.03


def test_steps_that_become_slower_are_seen():
    job = Job(60.0, 2)
    for number in range(1, 301):
        job.step(number, 0.1)
    for number in range(301, 401):
        job.step(number, 10.0)
    gaps = [after[1] - before[1] for before, after in itertools.pairwise(job.saved)]
    assert all(gap <= 70 for gap in gaps[1:]), gaps


def test_a_rank_that_joined_decides_as_the_others():
    """It must not take the steps before it came for its own: they would seem to last no time."""
    job = Job(60.0, 1)
    schedule = job.ranks[0].schedule
    schedule.restart(5000)
    for number in range(5001, 5201):
        job.step(number, 1.0)
    assert [number for number, _ in job.saved] == [5060, 5120, 5180]


@pytest.mark.parametrize("every", [10**9, timedelta(hours=9)])
def test_a_checkpoint_that_is_asked_for_comes_within_seconds(every):
    clock, asked = [0.0], [False]
    schedule = Schedule(every, lambda: clock[0], lambda: asked[0])
    schedule.restart(0)

    def due(step):
        clock[0] += 0.1
        return schedule.due(step, lambda decide: decide())

    assert not any(due(step) for step in range(1, 500))
    asked[0] = True
    assert 0 < 1 + next(index for index, step in enumerate(range(500, 600)) if due(step)) <= 21
    asked[0] = False
    assert not any(due(step) for step in range(600, 800))
