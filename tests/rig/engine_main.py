"""A program that holds engines, as a node daemon does; one JSON line in, one JSON line out.

``python engine_main.py '<json>'`` with {"core" (path)}. Killing or stopping this process is what happens to a host
whose daemon is killed or stopped. Commands are methods of ``Host`` whose names begin with ``do_``.
"""

import json
import os
import select
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # whatever PYTHONSAFEPATH says

from bagua.csrc import build
from rig.engines import open_engine


class Host:
    """Engines by name: several jobs may be on one host."""

    def __init__(self, core):
        self.core = build._load(Path(core))
        self.engines = {}

    def do_open(self, job, tokens, job_key, **options):
        of_rank = {int(rank): bytes.fromhex(token) for rank, token in tokens.items()}
        key = bytes.fromhex(job_key)
        self.engines[job] = open_engine(self.core, tokens=of_rank, job_key=key, job_id=job, **options)
        return {"address": self.engines[job].address()}

    def do_peers(self, job, addresses):
        self.engines[job].set_peers(addresses)
        return {}

    def do_state(self, job, longer_than_s=0.0):
        engine = self.engines[job]
        return {
            "stats": engine.stats(),
            "error": engine.error(),
            "waiting": engine.waiting(longer_than_s),
            "events": engine.events(),
        }

    def do_know_step(self, job):
        """Waits until the engine knows how long a training step takes."""
        while not self.engines[job].step_s():
            time.sleep(0.05)
        return {"step_s": self.engines[job].step_s()}

    def do_error(self, job):
        """Waits until the engine has failed."""
        engine = self.engines[job]
        while not engine.error():
            select.select([engine.event_fd()], [], [], 5.0)
            engine.events()
        return {"error": engine.error()}

    def do_await(self, job, kind):
        """Waits until the engine tells of something of this kind; the event, and when it was seen."""
        engine = self.engines[job]
        while True:
            for event in engine.events():
                if event["kind"] == kind:
                    return {**event, "at": time.monotonic()}
            select.select([engine.event_fd()], [], [], 5.0)

    def do_regroup(self, job, tokens=None, **generation):
        of_member = {int(member): bytes.fromhex(token) for member, token in (tokens or {}).items()}
        began = time.monotonic()
        self.engines[job].regroup(tokens=of_member, **generation)
        return {"address": self.engines[job].address(), "took": time.monotonic() - began}

    def do_resources(self):
        """Descriptors and threads of this process, its resident memory in bytes."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        }

    def do_close(self, job):
        self.engines.pop(job).close()  # and its descriptor of events goes with it
        return {}


def main():
    host = Host(json.loads(sys.argv[1])["core"])
    print("{}", flush=True)
    while line := sys.stdin.readline():
        command = json.loads(line)
        try:
            answer = getattr(host, f"do_{command.pop('do')}")(**command)
        except host.core.CoreError as error:
            answer = {"refused": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
