"""The figures, each with a coordinator of its own, and simulated daemons."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace

from rig.coordinator.fleet import TRIVIAL
from rig.coordinator.old_jobs import count_jobs, insert_old_jobs

from bagua.proto import common_pb2

from .calls import (
    PAUSE_S,
    SUBMITTING,
    Readers,
    finished,
    spec,
    submit_latency,
    submit_many,
    until_ended,
    until_state,
)
from .report import RATE, Row, bar, console
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


def wide(options, folder):
    """One job on every host, run and cancelled, several times; and what reads cost meanwhile."""
    shape = f"{options.hosts:,} x {SLOTS} ranks"
    phases = {"RUNNING": [], "cancelled": []}
    with (
        Coordinator(folder / "wide", way=options.way) as coordinator,
        coordinator.fleet(options.hosts) as fleet,
        coordinator.client() as client,
    ):
        console.print(f"{options.hosts} daemons connect …")
        fleet.wait_connected(options.limit_s)
        with ExitStack() as stack:
            readers = None
            for _ in range(options.times):
                cpu, began = coordinator.cpu_s(), time.monotonic()
                job_id = client.submit(spec("train", options.hosts, SLOTS)).job_id
                if readers is None:
                    readers = Readers(coordinator, job_id)
                    stack.callback(readers.close)
                readers.show(job_id)
                at = until_state(client, job_id, common_pb2.JOB_STATE_RUNNING, began, options.limit_s, "RUNNING")
                last = fleet.counts().last_started_at
                phases["RUNNING"].append(Phase(at - last, at - began, coordinator.cpu_s() - cpu))
                cpu, began = coordinator.cpu_s(), time.monotonic()
                client.cancel(job_id)
                at = until_state(client, job_id, common_pb2.JOB_STATE_CANCELLED, began, options.limit_s, "CANCELLED")
                last = fleet.counts().last_stopped_at
                phases["cancelled"].append(Phase(at - last, at - began, coordinator.cpu_s() - cpu))
        for name, found in phases.items():
            yield _phase(f"{shape}: {name}", found)
        if readers is not None:
            yield from readers.rows()
        counts = fleet.counts()
        note = f"streams that broke: {counts.broken} {' '.join(counts.errors)}".strip()
        yield Row("  memory of the coordinator", coordinator.memory() / 2**20, "MiB", "", note)


@dataclass(frozen=True)
class Phase:
    """Seconds until a state was seen: since the last fact, and since it was asked for; CPU seconds meanwhile."""

    after_fact: float
    asked: float
    cpu: float


def _phase(what, phases):
    after = [max(0.0, phase.after_fact) for phase in phases]
    asked = statistics.median(phase.asked for phase in phases)
    cpu = statistics.median(phase.cpu for phase in phases)
    note = f"median of {len(phases)}, longest {max(after):.2f} s"
    note += f"; {asked:.1f} s since it was asked for; {cpu:.1f} s of CPU"
    return Row(what, statistics.median(after), "s", "3 s after the last fact", note, least=PAUSE_S)


def elastic(options, folder):
    """One elastic job on every host; its ranks are killed, one after the other, then it waits and goes on: when every
    host has been told."""
    with (
        Coordinator(folder / "elastic", way=options.way) as coordinator,
        coordinator.fleet(options.hosts) as fleet,
        coordinator.client() as client,
    ):
        console.print(f"{options.hosts} daemons connect …")
        fleet.wait_connected(options.limit_s)
        job = spec("train", options.hosts, SLOTS)
        job.elastic = True
        job_id, began = client.submit(job).job_id, time.monotonic()
        until_state(client, job_id, common_pb2.JOB_STATE_RUNNING, began, options.limit_s, "RUNNING")
        found = []
        memory = []
        cpu = coordinator.cpu_s()
        with bar("ranks are killed", options.losses) as show:
            for number in range(options.losses):
                told = (number + 1) * options.hosts
                fleet.kill_rank(number % options.hosts)
                counts = fleet.wait(lambda counts, told=told: counts.regrouped >= told, options.limit_s, "not told")
                found.append(counts.last_regrouped_at - counts.killed_at)
                memory.append(coordinator.memory())
                show(number + 1)
        spent = (coordinator.cpu_s() - cpu) / options.losses
        planned = []
        with bar("the job waits and goes on", options.changes) as show:
            for number in range(options.changes):
                told += options.hosts
                asked = time.monotonic()
                (client.resume if number % 2 else client.pause)(job_id)
                counts = fleet.wait(lambda counts, told=told: counts.regrouped >= told, options.limit_s, "not told")
                planned.append(counts.last_regrouped_at - asked)
                memory.append(coordinator.memory())
                show(number + 1)
        what = f"{options.hosts:,} x {SLOTS} ranks: a rank is lost, all have the next generation"
        note = f"median of {len(found)}, longest {max(found):.2f} s; {spent:.2f} s of CPU each"
        yield Row(what, statistics.median(found), "s", "1 s", note)
        if planned:
            note = f"median of {len(planned)} pauses and resumptions, longest {max(planned):.2f} s"
            yield Row("  a planned change", statistics.median(planned), "s", "1 s", note)
        grown = (memory[-1] - memory[min(2, len(memory) - 1)]) / 2**20
        yield Row("  memory of the coordinator", memory[-1] / 2**20, "MiB", "", f"{grown:+.0f} MiB since the third")


def beats(options, folder):
    """Daemons that do nothing."""
    with Coordinator(folder / "beats", way=options.way) as coordinator, coordinator.fleet(options.hosts) as fleet:
        console.print(f"{options.hosts} daemons connect …")
        fleet.wait_connected(options.limit_s)
        # Their arrival is over, and acknowledgements (every 15 s) have told all of them how often to speak.
        time.sleep(options.settle_s)
        cpu, began = coordinator.cpu_s(), time.monotonic()
        time.sleep(options.beat_s)
        share = (coordinator.cpu_s() - cpu) / (time.monotonic() - began)
        note = f"over {options.beat_s:g} s; streams that broke: {fleet.counts().broken}"
        yield Row(f"heartbeats of {options.hosts:,} daemons, of a core", 100 * share, "%", "10 %", note, least=0.5)


LOOK_S = 60.0  # so long old jobs are watched while they expire: all 200,000 take ten minutes


def old(options, folder):
    """Submitting where many jobs have ended: where they are kept, and as it is usually. On SQLite always: the jobs are
    written straight into its file."""
    way = replace(options.way, postgres="")
    state = folder / "state"
    with Coordinator(state):
        pass  # makes the database
    [database] = state.rglob("*.db")
    began = time.monotonic()
    with bar("old jobs", options.old) as show:
        insert_old_jobs(database, spec(TRIVIAL), options.old, show)
    console.print(f"{options.old} old jobs written in {time.monotonic() - began:.0f} s")
    size = database.stat().st_size
    with Coordinator(state, "--keep", "forever", way=way) as coordinator:
        yield submit_latency(coordinator, f"submit, {options.old:,} old jobs kept")
    began = time.monotonic()
    with Coordinator(state, way=way) as coordinator:
        note = f"serving after {time.monotonic() - began:.1f} s"
        row = submit_latency(coordinator, f"submit, {options.old:,} old jobs at the start")
        yield replace(row, note=f"{row.note}; {note}")
        left = count_jobs(database)
        while left > 10_100 and time.monotonic() < began + LOOK_S:
            time.sleep(0.5)
            left = count_jobs(database)
        what = f"  old jobs left after {time.monotonic() - began:.0f} s"
        now = database.stat().st_size
        yield Row(what, left, "jobs", "10,000 jobs", f"database {size / 1e6:.0f} MB before, {now / 1e6:.0f} MB after")
