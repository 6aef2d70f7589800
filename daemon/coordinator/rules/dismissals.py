"""Stops those that were to leave by a planned change and do not end: pure functions of facts and clock.

Their daemon ends them when they have left the engine and go on all the same. But one that hangs before that, while a
loss lets the others go on at once, would hold its slots for ever: nobody waits for it any more.
"""

from __future__ import annotations

from dataclasses import replace

from bagua.daemon.coordinator.rules.domain import JobRecord, Phase
from bagua.daemon.coordinator.rules.joins import Wave
from bagua.daemon.coordinator.rules.options import Options
from bagua.daemon.coordinator.rules.placement import names


def stop_late(job: JobRecord, now: float, options: Options) -> tuple[Wave | None, float | None]:
    """Returns (dismissed parts whose time begins, or is over; None), or (None, when to look again). Their time begins
    when everybody else has gone on without them.
    """
    leaving = [part for part in job.former if part.dismissed and part.phase is not Phase.STOPPED]
    if not leaving:
        return None, None
    trains = [host.entered for host in job.hosts if host.phase is not Phase.STOPPED and not host.new]
    alone = [part for part in leaving if trains and min(trains) > part.last_generation]
    late = [part for part in alone if part.since_clock and now >= part.since_clock + options.leave_s]
    begun = [replace(part, since_clock=now) for part in alone if not part.since_clock]
    if not late and not begun:
        return None, min((part.since_clock + options.leave_s for part in alone), default=None)
    changed = {part.index: part for part in begun} | {part.index: replace(part, dismissed=False) for part in late}
    after = replace(job, former=tuple(changed.get(part.index, part) for part in job.former))
    verb, whose = ("is", "its") if len(late) == 1 else ("are", "their")
    text = f"{names([part.node_id for part in late])} {verb} stopped: {whose} ranks were to leave, and have not ended"
    return Wave(after, "stopped", f"{text} {options.leave_s:g} s after the others went on" if late else ""), None
