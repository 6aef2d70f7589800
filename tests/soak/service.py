#!/usr/bin/env python3
"""A whole service under faults for an hour: a coordinator, two daemons, callers that submit, cancel and read slowly.

    python tests/soak/service.py
    python tests/soak/service.py --minutes 5 --seed 7 --output json

Meanwhile the coordinator is killed and stopped, its wall clock jumps, its database is locked and its disk full; daemons
are killed and cut off. At the end all faults are over, the jobs end, and the history is checked: ``HISTORY`` in
``service_history.py`` lists the rules. Memory, descriptors, threads and disk must be flat. Exit code 1: they are not,
or a rule is broken.
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # whatever PYTHONSAFEPATH says
sys.path.insert(0, str(Path(__file__).parents[1]))  # for rig

from service_history import broken_rules
from service_world import SLOTS, World
from soak import LIMITS as GROUP
from soak import Watched, tell

from bagua.base.errors import ServiceError
from bagua.proto import common_pb2

LOOK_S = 0.5
END_S = 180.0
JUDGED = 60
"""Samples: a shorter life of a process says nothing about growth."""
LIMITS = {**GROUP, "descriptors": (12.0 + 10 * SLOTS, 0.0), "threads": (6.0 + 4 * SLOTS, 0.0)}
"""Growth that is no leak: all slots of a daemon are busy at the end, and none was at the beginning. Whatever leaks with
each job comes to more within a minute, and whatever leaks with each fault within an hour."""
DISK_PER_JOB = 40_000
"""Bytes of the state folder of a coordinator for each job that it keeps, its journal and a little more aside."""
DISK = 96 << 20
"""Bytes of all other folders: logs of the jobs that daemons keep."""


class Callers:
    """Threads that use the service. What was acknowledged is written down in ``world.jobs``."""

    def __init__(self, world, seed, rate):
        self._world = world
        self._random = random.Random(seed)
        self._rate = rate
        self._over = threading.Event()
        self.refused = Counter()
        self.read = 0
        self._threads = [
            threading.Thread(target=self._guard, args=(work,)) for work in (self._submit, self._read_slowly)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self):
        self._over.set()
        for thread in self._threads:
            thread.join(END_S)

    def _guard(self, work):
        while not self._over.is_set():
            try:
                work()
            except ServiceError as error:  # the service is away, as it is meant to be
                self.refused[type(error).__name__] += 1
                self._over.wait(0.2)

    def _submit(self):
        """One job, sometimes twice with the same key; and now and then one is cancelled."""
        key = f"key-{self._random.getrandbits(64):016x}"
        code = self._random.choice((0, 0, 0, 3))
        seconds = self._random.choice((0.0, 0.2, 1.0, 5.0))
        self._world.intend(key, code)
        for _ in range(self._random.choice((1, 1, 1, 2))):
            self._world.submit(key, code, seconds)
        if self._random.random() < 0.15:
            self._world.cancel(self._random.choice(list(self._world.jobs.values())))
        self._over.wait(self._random.expovariate(self._rate))

    def _read_slowly(self):
        """Follows the output of the newest job, a chunk a second."""
        with self._world.client() as client:
            jobs = client.list(limit=1)
            for chunk in client.logs(jobs[0].job_id, follow=True) if jobs else ():
                self.read += len(chunk.data)
                if self._over.wait(0.5):
                    return
        self._over.wait(0.5)


FAULTS = {
    "kill-coordinator": World.kill_coordinator,
    "stop-coordinator": World.stop_coordinator,
    "clock-jump": World.jump_clock,
    "kill-daemon": World.kill_daemon,
    "partition": World.partition,
    "lock-database": World.lock_database,
    "full-disk": World.fill_disk,
    "backup": World.back_up,
}


def soak(options):
    draw = random.Random(options.seed)
    seconds = options.minutes * 60
    done = Counter()
    with tempfile.TemporaryDirectory(prefix="bgs-", ignore_cleanup_errors=True) as name, World(Path(name)) as world:
        watch = Watch(world)
        callers = Callers(world, options.seed, options.rate)
        end = time.monotonic() + seconds
        kinds = []
        try:
            while time.monotonic() < end:
                kinds = kinds or draw.sample(list(FAULTS), len(FAULTS))
                kind = kinds.pop()
                print(f"{seconds - end + time.monotonic():7.1f} s  {kind}", file=sys.stderr)
                FAULTS[kind](world, draw.uniform(0.5, 4.0))
                done[kind] += 1
                world.need_coordinator()
                time.sleep(min(draw.uniform(1.0, options.pause), max(0.0, end - time.monotonic())))
        except BaseException:  # such as a service that does not start: threads would keep this program
            watch.stop()
            raise
        finally:
            callers.stop()
        wrong = finish(world)
        watch.stop()
        disk = {path.name: size_of(path) for path in world.folder.iterdir()}
        wrong += broken_rules(world) + world.troubles
        most = (DISK_PER_JOB * len(world.jobs) + DISK, DISK)
        if disk["state"] > most[0] or sum(disk.values()) - disk["state"] > most[1]:
            wrong.append(f"the disk is not flat: {disk}, with {len(world.jobs)} jobs")
        rows = [one.row(LIMITS) for one in watch.lives if len(one.times) >= JUDGED]
    flat = all(row[what]["flat"] for row in rows for what in LIMITS)
    return {
        "ok": flat and not wrong,
        "wrong": wrong,
        "seconds": seconds,
        "seed": options.seed,
        "faults": dict(done),
        "jobs": len(world.jobs),
        "refused": dict(callers.refused),
        "bytes_read": callers.read,
        "disk": disk,
        "rows": rows,
    }


def finish(world):
    """Heals everything and waits for the ends of all jobs: what is left is cancelled. Returns what is wrong."""
    world.heal()
    deadline = time.monotonic() + END_S
    unfinished = list(world.jobs.values())
    while time.monotonic() < deadline:
        try:
            with world.client() as client:
                states = {job.job_id: job for job in client.list(limit=1_000_000)}
                unfinished = [
                    job for job in world.jobs.values() if job in states and states[job].state not in world.ENDED
                ]
                for job in unfinished:
                    if states[job].state in (common_pb2.JOB_STATE_PENDING, common_pb2.JOB_STATE_RUNNING):
                        world.cancel(job)
        except ServiceError:
            unfinished = ["unknown: no coordinator answers"]
        if not unfinished:
            return []
        time.sleep(0.5)
    return [f"{len(unfinished)} jobs have not ended after {END_S:g} s: {unfinished[:5]}"]


def size_of(folder):
    """Bytes of a file, or of all files below a folder."""
    found = 0
    for path in (folder, *folder.rglob("*")):
        try:
            found += path.lstat().st_size
        except OSError:
            continue
    return found


class Watch:
    """Looks at all processes of the service; each life of one is a row of its own."""

    def __init__(self, world):
        self._world = world
        self.lives = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self):
        self._over.set()
        self._thread.join(END_S)

    def _run(self):
        while not self._over.wait(LOOK_S):
            for name, pid in self._world.pids().items():
                life = self._newest(name)
                if life is None or life.pid != pid:
                    life = Watched(name, pid)
                    self.lives.append(life)
                life.look()  # not at those that have ended: their numbers are given to others within minutes

    def _newest(self, name):
        return next((one for one in reversed(self.lives) if one.name == name), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--rate", type=float, default=2.0, help="jobs that are submitted in a second, about")
    parser.add_argument("--pause", type=float, default=15.0, help="the longest time between two faults, seconds")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    options = parser.parse_args()
    found = soak(options)
    faults = ", ".join(f"{count} x {kind}" for kind, count in sorted(found["faults"].items()))
    words = f"{found['jobs']} jobs in {found['seconds']:.0f} s, seed {found['seed']}; {faults}"
    more = f"disk: {found['disk']}; refused: {found['refused']}; {found['bytes_read']} bytes read slowly"
    tell(found, options.output, words, more)


if __name__ == "__main__":
    main()
