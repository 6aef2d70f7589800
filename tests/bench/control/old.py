"""Submitting where many jobs have ended."""

import time
from dataclasses import replace

from rig.coordinator.fleet import TRIVIAL
from rig.coordinator.old_jobs import count_jobs, insert_old_jobs

from .calls import spec, submit_latency
from .report import Row, bar, console
from .way import Coordinator

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
