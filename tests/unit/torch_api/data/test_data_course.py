"""Courses through a dataset: members that step, commit and are lost at any moment use each sample once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from bagua.torch_api.data.complexity import digest
from bagua.torch_api.data.elastic_sampler import ElasticSampler
from bagua.torch_api.data.epoch_progress import Course, Setting

Samples = list[tuple[int, int]]  # (epoch, index)


@dataclass
class Member:
    """A rank's loop: batches, a step that becomes ready and is committed, and again."""

    course: Course
    step: int = 0
    batches: Samples = field(default_factory=list)
    taken: int = 0
    ready: bool = False
    heard: int = 0  # steps that somebody has committed, as far as this member was told

    @property
    def known(self):
        return max(self.step, self.heard)


class Job(RuleBasedStateMachine):
    """A step takes one batch, or two where its number is odd. It commits where all members are ready, first on one and
    later on others. ``used``: samples by step, of all members that took part. Members of an island of two get the same
    batches."""

    def __init__(self):
        super().__init__()
        self.members = {}
        self.used = {}
        self.generation = 1
        self.next_number = 8

    @initialize(
        ranks=st.integers(1, 4),
        length=st.integers(1, 30),
        size=st.integers(1, 4),
        whole=st.booleans(),
        balanced=st.booleans(),
        island=st.sampled_from((1, 2)),
    )
    def begin(self, ranks, length, size, whole, balanced, island):
        each, together = (None, 5 + size) if whole else (size, None)
        self.setting = Setting(length, each, together, shuffle=True, seed=7, per_island=island > 1)
        self.island = island
        ranks *= island
        self.costs = torch.arange(length).mul(7).remainder(5).double() if balanced else None
        self.members = {n: Member(self.course(range(ranks), n, 1)) for n in range(ranks)}

    def course(self, members, member, generation):
        return Course(self.setting, members, member, generation, self.costs, self.island)

    @rule(data=st.data())
    def go_on(self, data):
        if not self.members:
            return
        member = self.members[data.draw(st.sampled_from(sorted(self.members)))]
        if not member.ready:
            self._take(member)
        elif all(
            other.step > member.step or (other.step == member.step and other.ready) for other in self.members.values()
        ):
            self._commit(member)

    def _take(self, member):
        wanted = 1 + member.step % 2
        batch = member.course.batch()
        if batch is None and not member.taken:
            member.course.end_epoch()
            return
        if batch is not None:  # else the epoch ends within a step: that is smaller, on all members
            member.course.give()
            member.batches += [(member.course.epoch, index) for index in batch]
            member.taken += 1
        member.ready = batch is None or member.taken == wanted

    def _commit(self, member):
        if not any(other.known > member.step for other in self.members.values()):
            batches = [other.batches for other in self.members.values()]
            assert batches == [one for one in batches[:: self.island] for _ in range(self.island)]
            self.used[member.step] = [sample for one in batches[:: self.island] for sample in one]
        member.course.commit()
        member.step, member.batches, member.taken, member.ready = member.step + 1, [], 0, False

    @precondition(lambda self: len(self.members) > self.island)
    @rule(data=st.data())
    def lose(self, data):
        firsts = sorted(self.members)[:: self.island]
        gone = data.draw(st.sets(st.sampled_from(firsts), max_size=len(firsts) - 1))
        for number in gone:
            for one in range(number, number + self.island):
                del self.members[one]
        self.generation += 1
        told = self.told()
        furthest = max(member.known for member in self.members.values())
        # Some hear it, and then another one is lost before the rest does.
        most = len(self.members) - 1 if len(self.members) > self.island else 0
        slow = data.draw(st.sets(st.sampled_from(sorted(self.members)), max_size=most))
        for number, member in self.members.items():
            if number not in slow:
                member.course.hear(told, list(self.members), self.generation)
                member.heard = furthest
        if slow:
            return self.lose(data)
        for member in self.members.values():
            if member.step < furthest:
                assert member.ready and furthest == member.step + 1
                self._commit(member)
            else:
                member.ready = False
                wanted = 1 + member.step % 2
                member.ready = member.taken == wanted

    @precondition(lambda self: self.between_steps() and len(self.members) < 4 * self.island)
    @rule(count=st.integers(1, 2))
    def join(self, count):
        count *= self.island
        self.generation += 1
        told = self.told()
        step = next(iter(self.members.values())).step
        for number in range(self.next_number, self.next_number + count):
            first = number - number % self.island
            island = range(first, first + self.island)
            self.members[number] = Member(self.course(island, number, self.generation - 1), step)
        self.next_number += count
        for member in self.members.values():
            member.course.hear(told, list(self.members), self.generation)

    def told(self):
        return {n: (one.course.given, json.loads(json.dumps(one.course.tell()))) for n, one in self.members.items()}

    def between_steps(self):
        """All have committed the same step, and have been given nothing of the next one."""
        steps = {member.step for member in self.members.values()}
        return len(steps) == 1 and not any(one.taken or one.ready or one.course.given for one in self.members.values())

    def teardown(self):
        if not self.members:
            return
        for _ in range(2000):
            if all(member.course.epoch >= 2 and not member.taken for member in self.members.values()):
                break
            for member in self.members.values():
                if member.ready:
                    if all(o.step > member.step or (o.step == member.step and o.ready) for o in self.members.values()):
                        self._commit(member)
                elif member.course.epoch < 2 or member.taken:
                    self._take(member)
        first = next(iter(self.members.values())).course
        samples = [sample for step in self.used.values() for sample in step]
        total = [index for number, index in samples if number < first.epoch] + list(first.opening)
        assert all(total.count(index) == first.epoch for index in range(self.setting.length))


TestJob = Job.TestCase
TestJob.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def told(*courses):
    return {course.member: (course.given, course.tell()) for course in courses}


def test_members_that_are_as_far_tell_the_same():
    """Messages stay small: one of them sends it to all."""
    courses = [Course(Setting(500, 1, None, True, 7), range(100), member, 1) for member in range(100)]
    for course in courses:
        course.give()
    for course in courses[:50]:
        course.commit()
    assert len({json.dumps(state) for _, state in told(*courses).values()}) == 2


def test_one_that_leaves_as_planned_has_committed_alone():
    """Member 2 sees the end of the step, and is dismissed; 0 and 1 lose member 3 at the same time and never see it.
    They repeat the step without both, whose samples come next."""
    setting = Setting(12, 1, None, False, 0)
    courses = [Course(setting, range(4), member, 1) for member in range(4)]
    used = []
    for step in range(2):
        batches = [course.batch() for course in courses]
        for course in courses:
            course.give()
        if step == 0:
            used += [sample for batch in batches for sample in batch]
            for course in courses:
                course.commit()
    courses[2].commit()
    left = courses[:2]
    states = told(*left)
    for course in left:
        course.hear(states, [0, 1], 2)
    used += [sample for batch in batches[:2] for sample in batch]  # the step that is repeated
    for course in left:
        course.commit()
    assert [course.batch() for course in left] == [[6], [7]]
    while (more := [course.batch() for course in left]) != [None, None]:
        used += [sample for batch in more for sample in batch]
        for course in left:
            course.give()
            course.commit()
    assert sorted(used) == list(range(12))


def test_weights_of_unequal_shares():
    courses = [Course(Setting(8, None, 4, False, 0), range(3), member, 1) for member in range(3)]
    assert [course.batch() for course in courses] == [[0, 1], [2], [3]]
    assert [course.give() for course in courses] == [1.5, 0.75, 0.75]


def test_epochs_have_orders_of_their_own():
    course = Course(Setting(20, 20, None, True, 3), [0], 0, 1)
    first = course.batch()
    course.give()
    course.commit()
    assert course.batch() is None and course.left == 0
    course.end_epoch()
    assert first != course.batch() and sorted(first) == sorted(course.batch()) == list(range(20))


def test_too_few_at_the_end_open_the_next_epoch():
    courses = [Course(Setting(5, 1, None, False, 0), range(2), member, 1) for member in range(2)]
    for course in courses:
        for _ in range(2):
            course.give()
        course.end_epoch()
    assert [course.opening for course in courses] == [(4,)] * 2
    assert [course.batch() for course in courses] == [[4], [0]]


def test_members_with_other_arguments_are_named():
    mine, other = (
        Course(Setting(5, 2, None, False, 0), range(2), 0, 1),
        Course(Setting(6, 2, None, False, 0), range(2), 1, 1),
    )
    with pytest.raises(ValueError, match=r"'length': 6.* on member 1"):
        mine.hear(told(mine, other), [0, 1], 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 1, None), "dataset is empty"),
        ((5, None, None), "either batch_size"),
        ((5, 1, 1), "either batch_size"),
        ((5, 0, None), "batch_size is 0"),
        ((5, None, 2.5), "global_batch is 2.5"),
        ((5, True, None), "batch_size is True"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        Setting(*arguments, shuffle=True, seed=0)
    with pytest.raises(ValueError, match="not one sample for each of 3 ranks"):
        Setting(5, None, 2, True, 0).shares(3)


@pytest.mark.parametrize("sizes", [{"batch_size": 8, "global_batch": None}, {"batch_size": None, "global_batch": 30}])
def test_rounds_are_balanced_through_a_loss(sizes):
    """The dearest rank costs little above the mean, with four ranks and after one of them was lost."""
    costs = torch.randn(960, generator=torch.Generator().manual_seed(3)).exp().double()
    setting = Setting(960, **sizes, shuffle=True, seed=1)

    def excess(balanced):
        courses = [Course(setting, range(4), member, 1, costs if balanced else None) for member in range(4)]
        above = total = 0.0
        used = []
        for step in range(20):
            if step == 10:
                states = told(*courses[:3])
                courses = courses[:3]
                for course in courses:
                    course.hear(states, [0, 1, 2], 2)
            batches = [course.batch() or [] for course in courses]
            # Shares of 30 differ by a sample: a rank's cost for each of its samples counts.
            loads = [float(costs[batch].sum()) / len(batch) for batch in batches]
            above += max(loads) - sum(loads) / len(loads)
            total += sum(loads) / len(loads)
            used += [index for batch in batches for index in batch]
            for course in courses:
                course.give()
                course.commit()
        assert len(set(used)) == len(used)
        return above / total

    assert excess(True) * 3 < excess(False)


def test_without_shuffling_rounds_are_dealt_out_in_the_order_of_the_dataset():
    costs = torch.tensor([9.0, 1.0, 1.0, 9.0, 5.0, 4.0, 1.0, 2.0], dtype=torch.float64)
    courses = [Course(Setting(8, 2, None, shuffle=False, seed=0), range(2), member, 1, costs) for member in range(2)]
    assert [sorted(course.batch() or []) for course in courses] == [[0, 1], [2, 3]]
    for course in courses:
        course.give()
        course.commit()
    assert [sorted(course.batch() or []) for course in courses] == [[4, 6], [5, 7]]


def test_members_with_other_costs_are_told_so():
    settings_of = [Setting(8, 2, None, True, 0, digest(torch.full((8,), cost).double())) for cost in (1.0, 2.0)]
    one, other = (Course(setting, range(2), member, 1) for member, setting in enumerate(settings_of))
    with pytest.raises(ValueError, match="differs between members"):
        one.hear(told(one, other), [0, 1], 2)


def test_a_stream_is_refused():
    with pytest.raises(TypeError, match=r"Stream is a stream without a length.*BG701"):
        ElasticSampler(Stream(), batch_size=1)


class Stream(torch.utils.data.IterableDataset):
    """Its samples have no numbers."""

    def __iter__(self):
        return iter([1])


def test_a_checkpoint_counts_batches_whose_exchange_is_still_to_come():
    """Weights that are saved have their steps. Here two of three batches of an epoch of six samples were trained."""
    setting = Setting(6, 1, None, shuffle=True, seed=0)
    first, second = (Course(setting, [0, 1], member, 1) for member in range(2))
    trained = []
    for _ in range(2):
        for course in (first, second):
            trained += course.batch()
            course.give()
    alone = Course(setting, [5], 5, 1)
    alone.make_room(json.loads(json.dumps(first.keep().document)), None)
    left = []
    while (batch := alone.batch()) is not None and alone.epoch == 0:
        left += batch
        alone.give()
        alone.commit()
    assert sorted(trained + left) == list(range(6))
