"""The coordinator's store, sessions and reconciler under a clock that jumps, whatever fails.

``simulated/world.py`` says what is promised. A history that breaks it is named by its seed;
``BAGUA_SIMULATION_SEED=N`` plays that one alone."""

import contextlib
import gc
import os
from dataclasses import replace

import pytest
from simulated.coordinator import Life
from simulated.history import drawn, fixed, late_hello, outage, play
from simulated.world import BrokenPromiseError

from bagua.daemon.coordinator.rounds.intake import Intake
from bagua.daemon.coordinator.store.database import open_engine
from bagua.daemon.coordinator.store.store import Store

ONE = os.environ.get("BAGUA_SIMULATION_SEED")
PARTS = 10 if ONE is None else 1  # tests that share the random histories, for runs with several processes
_COLLECT_EVERY = 100


def first_broken(seeds, make_life=Life):
    """The report of the first history that breaks a promise; empty if none does."""
    gc.disable()  # histories leave circles behind: they are looked for now and then
    gc.freeze()  # and not among what was there before
    try:
        for number, seed in enumerate(seeds, 1):
            try:
                play(drawn(seed, make_life))
            except Exception as error:
                return f"seed {seed}: {type(error).__name__}: {error}"
            if number % _COLLECT_EVERY == 0:
                gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()
        gc.collect()
    return ""


def number_of_histories(config):
    usual = 100_000 if config.getoption("--full") else 240
    return int(os.environ.get("BAGUA_SIMULATION_HISTORIES", usual))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
def test_random_histories(part, request):
    if ONE is not None:
        play(drawn(int(ONE)))
        return
    found = first_broken(range(part, number_of_histories(request.config), PARTS))
    assert not found, f"{found}\nplay it alone: BAGUA_SIMULATION_SEED=N pytest {__file__} -k random"


@pytest.mark.parametrize("seed", [1261, 27923, 33252, 36872, 60544, 89424, 90084])
def test_histories_that_broke_a_promise_once(seed):
    play(drawn(seed))


@pytest.mark.parametrize("trouble", ["fail", "lose", "slow", "cancel"])
def test_trouble_at_each_question_to_the_database(trouble):
    """One course of events, as often as it asks the database; each time another question meets the trouble."""
    asked = play(fixed({}))
    assert asked > 20
    for number in range(1, asked + 1):
        try:
            play(fixed({number: trouble}, seed=number))
        except BrokenPromiseError as error:
            raise AssertionError(f"{trouble} at question {number} of the fixed history: {error}") from error


@pytest.mark.parametrize("away", ["database", "coordinator"])
def test_minutes_without_it(away):
    """Training goes on, and changes wait until it is back."""
    play(outage(away, 600.0))


class FaultyIntake(Intake):
    """Taking in every third fact raises, as a fault of the coordinator would."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._facts = 0

    def fact(self, session, job):
        self._facts += 1
        if self._facts % 3 == 0:
            job = replace(job, ranks=tuple(replace(rank, state=None) for rank in job.ranks))
        super().fact(session, job)


def test_promises_hold_where_the_coordinator_has_faults():
    """Slots come back, every wait ends, and no job is over while it is computed."""
    found = first_broken(range(150), with_parts(make_intake=FaultyIntake))
    assert not found, found


def test_the_same_over_sqlite():
    """The store in memory is no better than a real one."""

    for seed in range(20):
        play(drawn(seed, make_store=WatchedStore))


class WatchedStore(Store):
    """SQLite, without a file."""

    def __init__(self, on_commit):
        super().__init__(open_engine("sqlite://"))
        self._on_commit = on_commit

    @contextlib.contextmanager
    def transaction(self):
        with super().transaction() as tx:
            yield tx
        self._on_commit()


def test_a_late_hello():
    play(late_hello())


def with_parts(**parts):
    return type("OtherLife", (Life,), parts)


def test_a_history_is_the_same_every_time():
    assert [play(drawn(seed)) for seed in range(30)] == [play(drawn(seed)) for seed in range(30)]
