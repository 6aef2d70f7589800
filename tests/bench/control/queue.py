"""Trivial jobs through a few slots."""

import time

from rig.coordinator.fleet import TRIVIAL

from .calls import SUBMITTING, finished, spec, submit_latency, submit_many, until_ended
from .report import RATE, Row
from .way import SLOTS, Coordinator


def queue(options, folder):
    """Trivial jobs through 8 slots: past jobs that do not fit, and then as a long queue themselves."""
    target = "50 jobs/s"
    with Coordinator(folder / "past", way=options.way) as coordinator:
        yield submit_latency(coordinator, "submit, one after the other", cancel=True)
        with coordinator.fleet(1) as fleet:
            fleet.wait_connected()
            rate, note = trivial_rate(coordinator, fleet, options)
            yield Row("trivial jobs through 8 slots, empty queue", rate, RATE, target, note)
        too_big = spec(TRIVIAL, nproc=SLOTS + 1)
        what = f"submitting {options.waiting} jobs"
        cpu = coordinator.cpu_s()
        _, seconds = submit_many(coordinator, too_big, options.waiting, what)
        each = (coordinator.cpu_s() - cpu) / options.waiting * 1e3
        note = f"{options.waiting} jobs, {SUBMITTING} calls under way; {each:.1f} ms of CPU each"
        yield Row("submit, many at once", options.waiting / seconds, RATE, "", note)
        with coordinator.fleet(1) as fleet:
            fleet.wait_connected()
            rate, note = trivial_rate(coordinator, fleet, options)
            what_past = f"  past {options.waiting} that do not fit"
            yield Row(what_past, rate, RATE, target, note)
    with Coordinator(folder / "through", way=options.way) as coordinator:
        _, seconds = submit_many(coordinator, spec(TRIVIAL), options.waiting, what)
        with coordinator.fleet(1) as fleet:
            began, cpu = time.monotonic(), coordinator.cpu_s()
            count = min(options.trivial, options.waiting)
            done, took = finished(fleet, 0, count, began, options.limit_s)
            note = f"{done} in {took:.1f} s, {(coordinator.cpu_s() - cpu) / max(1, done) * 1e3:.1f} ms of CPU each"
            what = f"  the first {count} of {options.waiting} that wait"
            yield Row(what, done / took, RATE, target, f"{note}; submitted in {seconds:.1f} s")


def trivial_rate(coordinator, fleet, options):
    """(jobs per second, how many in how long) from the first submission to the end of the last."""
    before, cpu, began = fleet.counts().finished, coordinator.cpu_s(), time.monotonic()
    ids, _ = submit_many(coordinator, spec(TRIVIAL), options.trivial, "trivial jobs")
    done, took = finished(fleet, before, options.trivial, began, options.limit_s)
    if done == options.trivial:
        with coordinator.client() as client:
            until_ended(client, ids[-1], options.limit_s)
        took = time.monotonic() - began
    each = (coordinator.cpu_s() - cpu) / max(1, done) * 1e3
    return done / took, f"{done} in {took:.1f} s, {each:.1f} ms of CPU each"
