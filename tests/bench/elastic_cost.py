#!/usr/bin/env python3
"""The cost of `--elastic` while nobody is lost: the same training in two jobs, with and without it.

    python tests/bench/elastic_cost.py                                       # 1 x 4, 1 x 2 and 2 x 1 ranks, tiny steps
    python tests/bench/elastic_cost.py --shapes 1x4 --megabytes 25 --steps 200

Both jobs are started together and take turns, so that both see the same machine; one waits while the other trains. ms:
median over turns of the time of a step, on the slowest rank. ``more``: median of the difference between the two turns
of a round. ``flags``: a small all-reduce of the job without `--elastic`, which between hosts is a round trip.

Where the two jobs' memory lies in the machine's decides about more than the thing that is measured, and stays as it is
while they run. So both are started `--starts` times, and either is the first one as often: ``more`` is the median over
starts, beside the least and the most.
`--within` starts one job, with `--elastic`, and takes turns inside it: "plain" steps leave out the commit, and all else
is the same, the memory too. That shows what the commit costs where two jobs differ by more than that.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

START_DEADLINE_S = 180.0
TURN_DEADLINE_S = 300.0
WARM_UP = 2
"""Rounds that do not count."""
KINDS = ("plain", "elastic")


@dataclass(frozen=True)
class Turn:
    """Seconds of a step, and of a small all-reduce, on the slowest rank."""

    step_s: float
    flags_s: float


def switch_commit(reducer, commits):
    """From now on passes of an elastic job are committed, or shown as soon as they are exchanged."""
    from bagua.torch_api.step.vote import Vote

    class Uncommitted(Vote):
        repeats = True  # plans are held back all the same

    if reducer._vote.repeats:
        reducer.kept = vars(reducer).get("kept", reducer._vote)
        reducer._vote = reducer.kept if commits else Uncommitted()


def rank_main(address, megabytes):
    """The program of a rank: a turn each time that the driver asks for one."""
    import torch
    from torch import nn

    import bagua.torch_api as bagua
    from bagua.bench.ranks import harness

    torch.set_num_threads(1)
    bagua.init_process_group()
    width = int((megabytes * 1e6 / 4 / 3) ** 0.5)
    inner = [nn.Linear(width, width), nn.Tanh()] if megabytes else [nn.Linear(24, 18), nn.Tanh()]
    first, last = (width, width) if megabytes else (24, 18)
    model = nn.Sequential(nn.Linear(first if megabytes else 16, first), nn.Tanh(), *inner, nn.Linear(last, last))
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    wrapped = model.with_bagua([optimizer])
    inputs = torch.randn(1 if megabytes else 8, first if megabytes else 16)
    small = bagua.empty(3, dtype=torch.int32)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            wrapped(inputs).square().mean().backward()
            optimizer.step()

    def flags(number):
        for _ in range(number):
            bagua.allreduce_inplace(small, op=bagua.ReduceOp.MAX)

    driver = None
    if bagua.get_rank() == 0:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        driver = connection.makefile("rw")
    order = torch.zeros(1, dtype=torch.int64)
    while True:
        if driver is not None:
            order[0] = int(driver.readline() or 0)
        bagua.broadcast(order, 0)
        steps = abs(int(order[0]))
        if steps == 0:
            break
        switch_commit(wrapped.bagua_ddp.passes.step, commits=int(order[0]) > 0)
        bagua.barrier()
        step_s = harness.slowest(harness.seconds(lambda: train(steps)) / steps)  # noqa: B023
        bagua.barrier()
        flags_s = harness.slowest(harness.seconds(lambda: flags(steps)) / steps)  # noqa: B023
        if driver is not None:
            driver.write(f"{step_s} {flags_s}\n")
            driver.flush()
    bagua.barrier()


class Job:
    """One of the two, as the driver sees it."""

    def __init__(self, kind, shape, options, folder):
        self.kind = kind
        address = str(folder / kind)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen()
        command = [sys.executable, "-P", "-m", "bagua.cli.main", "run", "--quiet"]
        command += ["--elastic"] * (kind == "elastic")
        command += ["--nnodes", str(shape[0]), "--nproc-per-node", str(shape[1]), str(Path(__file__).resolve())]
        command += ["--address", address, "--megabytes", str(options.megabytes)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
        self.process = subprocess.Popen(command, stdout=sys.stderr, env=environment)
        self._driver = None

    def meet(self):
        """Waits for its rank 0."""
        deadline = time.monotonic() + START_DEADLINE_S
        while not select.select([self._listener], [], [], 0.2)[0]:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the {self.kind} job did not come up: see its words above")
        connection = self._listener.accept()[0]
        connection.settimeout(TURN_DEADLINE_S)
        self._driver = connection.makefile("rw")

    def turn(self, steps):
        """``steps`` below zero: in an elastic job, so many without a commit."""
        assert self._driver is not None
        self._driver.write(f"{steps}\n")
        self._driver.flush()
        answer = self._driver.readline().split()
        if len(answer) != 2:
            raise SystemExit(f"the {self.kind} job ended in its turn: see its words above")
        return Turn(float(answer[0]), float(answer[1]))

    def end(self):
        with contextlib.suppress(OSError, AttributeError):
            self._driver.write("0\n")
            self._driver.flush()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait(30)
        self._listener.close()


@contextlib.contextmanager
def jobs(shape, options, kinds):
    """Both, started in this order, ready to take turns. Leaving the context ends them."""
    with tempfile.TemporaryDirectory(prefix="bagua-cost-") as folder, contextlib.ExitStack() as ends:
        started = []
        for kind in kinds:
            started.append(Job(kind, shape, options, Path(folder)))
            ends.callback(started[-1].end)
        for job in started:
            job.meet()
        yield started


def measure(shape, options):
    """A row of the table, in seconds."""
    found = {kind: [] for kind in KINDS}
    more = []  # of each start
    for start in range(options.starts):
        order = KINDS[:: -1 if start % 2 else 1]
        with jobs(shape, options, ("elastic",) if options.within else order) as started:
            before = len(found["plain"])
            job_of = {job.kind: job for job in started}
            for number in range(WARM_UP + max(3, options.steps // options.turn)):
                for kind in order[:: 1 if number % 2 else -1]:
                    without = options.within and kind == "plain"
                    turn = job_of["elastic" if without else kind].turn(-options.turn if without else options.turn)
                    if number >= WARM_UP:
                        found[kind].append(turn)
        pairs = zip(found["plain"][before:], found["elastic"][before:], strict=True)
        more.append(statistics.median(elastic.step_s - plain.step_s for plain, elastic in pairs))
    steps = {kind: statistics.median(turn.step_s for turn in turns) for kind, turns in found.items()}
    flags = statistics.median(turn.flags_s for turn in found["plain"])
    return steps["plain"], steps["elastic"], statistics.median(more), min(more), max(more), flags


def shapes(text):
    """ "1x4,2x1": pairs of hosts and ranks of each."""
    found = []
    for one in text.split(","):
        hosts, _, ranks = one.partition("x")
        found.append((int(hosts), int(ranks)))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=shapes, default="1x4,1x2,2x1", help="hosts x ranks of each, with commas")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--turn", type=int, default=50, help="steps of a turn")
    parser.add_argument("--starts", type=int, default=1, help="how often both jobs are started")
    parser.add_argument("--within", action="store_true", help="one elastic job: its steps with and without the commit")
    parser.add_argument("--megabytes", type=float, default=0, help="of gradients; 0: the model of 1000 parameters")
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.address:
        rank_main(options.address, options.megabytes)
        return
    print(f"{'hosts x ranks':<14}{'plain':>10}{'elastic':>10}{'more':>10}{'least':>10}{'most':>10}{'flags':>10}   ms")
    for shape in options.shapes:
        name = f"{shape[0]} x {shape[1]}"
        print(f"{name:<14}" + "".join(f"{1e3 * value:>10.3f}" for value in measure(shape, options)), flush=True)


if __name__ == "__main__":
    main()
