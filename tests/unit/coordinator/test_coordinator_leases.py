"""Several coordinators on one database."""

from dataclasses import replace

from bagua.daemon.coordinator.admin.settings import Settings
from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.rules.coordinator_leases import RESYNC_S, CoordinatorLeases
from bagua.daemon.coordinator.rules.domain import JobRecord, JobSpec, JobState, NodeRecord, NodeView, Stored


def test_with_the_usual_settings_another_one_leads_within_five_seconds():
    """By the clock of the second: it looks every RESYNC_S, and the first dies right after a beat."""
    settings = Settings()
    times = [100.0]
    clock = ServiceClock(1.0, monotonic=lambda: times[0], wall=lambda: 0.0)
    second = CoordinatorLeases("two", clock, settings.lease_s, settings.job_lease_s)
    job = Stored(JobRecord("job-1", JobSpec("", 1, 1, 0, 0, 0, b""), 0.0, JobState.RUNNING), 1, 0, "one")
    second.observe({"one": 7.0})
    died = times[0]
    beat = 8.0
    while not second.orphans([job]):
        times[0] += RESYNC_S
        clock.tick()
        second.observe({"one": beat})
        assert times[0] <= died + 5.0
    assert times[0] > died + settings.job_lease_s, "a beat that is late by less costs nobody his jobs"


def test_what_is_known_of_nodes_that_talk_to_another_one():
    times = [100.0]
    clock = ServiceClock(1.0, monotonic=lambda: times[0], wall=lambda: 0.0)
    leases = CoordinatorLeases("two", clock, 10.0, 3.0)
    leases.observe({"one": 7.0})
    heard = clock.now()
    node = NodeRecord("a", "a", "127.0.0.1", 1, "", "boot", 0.0, "one")
    there = NodeView("a", "a", "127.0.0.1", "boot", 1, 0, True, 0.0)
    assert leases.heard_of(node, None, heard + 8.0) == 0.0, "it may have spoken a moment ago"
    for _ in range(40):
        times[0] += 0.5
        clock.tick()
    assert not leases.connected(node)
    now = clock.now()
    assert leases.heard_of(node, there, now) == heard, "the other one has died: since then nobody has heard of it"
    ended = replace(node, owner=None)
    assert leases.heard_of(ended, there, now) == leases.heard_of(node, None, now) == now
    assert leases.heard_of(ended, replace(there, connected=False, heard_clock=33.0), now) == 33.0


def test_who_is_alone_looks_for_beats_alone():
    """Until another one comes, and until one that has died was looked at once more after its lease."""
    times = [100.0]
    clock = ServiceClock(1.0, monotonic=lambda: times[0], wall=lambda: 0.0)
    two = CoordinatorLeases("two", clock, 10.0, 3.0)

    def looks(beats, seconds):
        found = []
        for _ in range(int(seconds / RESYNC_S)):
            times[0] += RESYNC_S
            clock.tick()
            found.append(two.alone(beats))
            two.observe(beats)
        return found

    assert looks({"two": 1.0}, 1.5) == [False, True, True]
    assert not any(looks({"two": 2.0, "one": 7.0}, 10.0)), "it may be alive"
    assert looks({"two": 3.0, "one": 7.0}, 1.5) == [False, True, True], "dead: seen once more, and never again"
    assert looks({"two": 3.0, "one": 8.0}, 0.5) == [False], "it woke up"
