"""Tuning decides right under simulated step times: noise, hiccups, drift, changes for good."""

import random

import pytest

from bagua.daemon.coordinator.use.tuning_search import Tried, propose
from bagua.tuning.comparison import Step
from bagua.tuning.decision import Decider, Limits, Phase
from bagua.tuning.space import Dimension

SPACE = (
    Dimension("bucket_kib", ("256", "512", "1024", "2048", "4096", "8192", "16384", "32768"), ordered=True),
    Dimension("chunk_kib", ("128", "256", "512", "1024", "2048"), ordered=True),
)


def bowl(best, depth):
    """Step time in seconds: the defaults take 0.1, the best bucket size ``depth`` less of it."""

    def cost(setting):
        if not setting:
            return 0.1
        distance = abs(SPACE[0].choices.index(setting["bucket_kib"]) - best)
        chunk = abs(SPACE[1].choices.index(setting["chunk_kib"]) - 2)
        return 0.1 * (1 - depth + 0.05 * distance**1.5 + 0.01 * chunk)

    return cost


class Simulation:
    """A job that tunes itself. ``cost``: seconds of a step; may be changed while it runs."""

    def __init__(self, cost, noise, seed, hiccups=0.0, drift=0.0):
        self.cost, self.noise, self.hiccups, self.drift = cost, noise, hiccups, drift
        self.random = random.Random(seed)
        self.time, self.steps, self.searches = 0.0, 0, 0
        self.trials = []
        self.said = []
        self.decider = Decider(
            self.ask,
            lambda: [],
            limits=Limits(),
            clock=lambda: self.time,
            tell=self.trials.append,
            say=self.said.append,
            anew=self.anew,
        )
        self.begun = 0

    def anew(self):
        self.searches += 1
        self.begun = len(self.trials)

    def ask(self):
        tried = [Tried(one.setting, one.level) for one in self.trials[self.begun :]]
        found = propose(SPACE, tried, seed=1)
        if found is None:
            raise StopIteration
        return found

    def step(self, setting):
        seconds = self.cost(setting) * self.random.gauss(1, self.noise) * (1 + self.drift * self.steps)
        if self.random.random() < self.hiccups:
            seconds *= 10
        self.steps += 1
        self.time += seconds
        return Step(seconds, max(0.0, seconds - 0.06))

    def run(self, steps):
        end = self.steps + steps
        while self.steps < end:
            block = self.decider.next_block()
            self.decider.add([self.step(block.setting) for _ in range(block.steps)])

    @property
    def quality(self):
        """Step time of what was chosen, in that of the defaults, without noise."""
        return self.cost(self.decider.present) / self.cost({})


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("hiccups", [0.0, 0.03])
def test_it_finds_what_is_better_and_never_what_is_worse(noise, hiccups):
    for seed in range(2):
        good = Simulation(bowl(best=4, depth=0.3), noise, seed, hiccups)
        good.run(300)
        assert good.decider.phase is Phase.SETTLED, good.said
        assert good.quality < (0.75 if noise < 0.1 else 0.9), good.said  # the best is 0.7
        useless = Simulation(bowl(best=4, depth=0.0), noise, seed, hiccups)
        useless.run(300)
        assert useless.decider.phase is Phase.SETTLED
        assert useless.quality <= 1.02, useless.said


def test_drift_is_no_gain():
    """All steps become faster: whatever comes later looks better."""
    simulation = Simulation(bowl(best=4, depth=-0.03), 0.01, 1, drift=-0.001)
    simulation.run(300)
    assert simulation.quality <= 1.02


def test_it_begins_anew_for_a_change_and_not_for_a_hiccup():
    simulation = Simulation(bowl(best=2, depth=0.2), 0.02, 3)
    simulation.run(500)
    assert simulation.decider.phase is Phase.SETTLED
    found = simulation.decider.present
    kept, simulation.cost = simulation.cost, lambda setting: 0.3
    simulation.run(100)  # two windows
    simulation.cost = kept
    simulation.run(400)
    assert simulation.searches == 0 and simulation.decider.phase is Phase.SETTLED
    other = bowl(best=6, depth=0.4)
    simulation.cost = lambda setting: 1.5 * other(setting)
    simulation.run(800)
    assert simulation.searches == 1 and simulation.decider.phase is Phase.SETTLED
    assert simulation.decider.present != found
    assert simulation.quality < 0.7


def test_noise_is_no_change_and_a_search_for_nothing_makes_patient():
    """Step times wander by a fifth from window to window."""
    simulation = Simulation(bowl(best=2, depth=0.0), 0.02, 4)
    wanders = random.Random(4)
    level = [1.0]
    simulation.cost = lambda setting: 0.05 * level[0]
    for _ in range(60):
        level[0] = wanders.uniform(0.8, 1.2)
        simulation.run(50)
    assert simulation.searches == 0
    quick = Simulation(lambda setting: 0.002 * level[0], 0.02, 4)
    for _ in range(10):  # between two levels, for longer than three windows each time
        level[0] = 1.0 if level[0] > 1.2 else 1.5
        quick.run(5_000)
    assert 1 <= quick.searches <= 3
    assert quick.decider.next_block().steps >= 500  # of 2 ms: looks are no more frequent than every second or so


def test_members_that_change_discard_the_comparison_under_way():
    simulation = Simulation(bowl(best=4, depth=0.3), 0.01, 5)
    simulation.run(12)
    block = simulation.decider.next_block()
    while block.setting == simulation.decider.present:
        simulation.decider.add([simulation.step(block.setting) for _ in range(block.steps)])
        block = simulation.decider.next_block()
    trials = len(simulation.trials)
    simulation.decider.discard()
    assert len(simulation.trials) == trials
    again = simulation.decider.next_block()
    assert again.setting == simulation.decider.present  # the comparison begins with the present setting
    simulation.decider.add([simulation.step(again.setting) for _ in range(again.steps)])
    assert simulation.decider.next_block().setting == block.setting  # the same candidate
    simulation.run(300)
    assert simulation.quality < 0.75


def test_proposals_are_new_and_end():
    space = (Dimension("a", ("1", "2", "4"), ordered=True), Dimension("b", ("x", "y")))
    tried = []
    while (found := propose(space, tried, seed=7)) is not None:
        assert found not in [one.setting for one in tried]
        tried.append(Tried(found, 1.0 + len(tried)))
    assert len(tried) == 6
    assert propose((), [], seed=0) is None
