"""One job on every host."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass

from bagua.proto import common_pb2

from .calls import PAUSE_S, Readers, spec, until_state
from .report import Row, console
from .way import SLOTS, Coordinator


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
