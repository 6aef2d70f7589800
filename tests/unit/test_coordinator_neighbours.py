"""Several coordinators on one database."""

from __future__ import annotations

from bagua.daemon.coordinator.clock import ServiceClock
from bagua.daemon.coordinator.domain import JobRecord, JobSpec, JobState, Stored
from bagua.daemon.coordinator.neighbours import RESYNC_S, Neighbours
from bagua.daemon.coordinator.settings import Settings


def test_with_the_usual_settings_another_one_leads_within_five_seconds():
    """By the clock of the second: it looks every RESYNC_S, and the first dies right after a beat."""
    settings = Settings()
    times = [100.0]
    clock = ServiceClock(1.0, monotonic=lambda: times[0], wall=lambda: 0.0)
    second = Neighbours("two", clock, settings.lease_s, settings.job_lease_s)
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
