"""One elastic job on every host, which changes."""

import statistics
import time

from bagua.proto import common_pb2

from .calls import spec, until_state
from .report import Row, bar, console
from .way import SLOTS, Coordinator


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
