#!/usr/bin/env python3
"""A rank, a host or a daemon is lost, a host is silent, or one joins: the others' pause, beside torchrun and torchft.

    python tests/bench/elastic_peers.py --python torchft=/path/to/python                # all faults, three rounds
    python tests/bench/elastic_peers.py --faults rank,host --ranks 4 --megabytes 100 --rounds 3
    python tests/bench/elastic_peers.py --faults rank --ranks 6 --island-size 2 --systems bagua,torchft,torchft-1s \\
        --python torchft=/path/to/python

The faults, each in a start of its own:

    rank     SIGKILL of 1 of 4 ranks of a host. With --island-size islands (torchft's groups) hold a model that FSDP2
             shards, and lose one rank: the pause is that of the others
    host     SIGKILL of 1 of 3 hosts with one rank each: of Bagua's keeper (which takes all with it), of torchrun's
             agent and its rank at once, of torchft's replica group
    silent   SIGSTOP of 1 of 3 hosts with all in it. "limit": the silence after which the system gives it up
    daemon   SIGKILL of the daemon, below 4 ranks: of Bagua's daemon proper, of torchrun's agent, of torchft's
             lighthouse, which this program starts again at once, because nobody else does
    join     one more host, of one rank, joins 3 that train

Each round starts every system once for each fault, one after the other, so that all see the same machine. A pause is
the longest time between two steps that are new, after the fault, less the median time of a step. That of a join is
taken from the newcomer's start on: for all systems it holds what that start takes from the processors. ``in vain``:
steps that a rank computed and that did not count (or counted twice), on average over the ranks that are left. ``went
on``: rounds in which these made new steps, within --within seconds.

torchrun starts all ranks again from the last checkpoint (every --checkpoint-every steps). It is measured with its own
times, and (torchrun-5s) with shorter ones: 5 s for an operation of Gloo and for an agent without a word, 1 s for late
agents; both with a store for each attempt, because with the shared one an agent that joins hangs (torch 2.13). torchft
is measured with its own heartbeat (5 s), and (torchft-1s) with one of 1 s and managers that ask a lost lighthouse again
every second; its operations may take 5 s. A system that did not go on twice, or once where it waits longer than
--within for a silent host, is not tried again.

A system is looked for in this Python, or in the one that --python names; Bagua is that of this Python. What can't be
imported is left out, and the table says so.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from elastic_rig import Unmeasured, read
from elastic_systems import FAULTS, MODULES, SETTINGS, Shape, started

START_WITHIN_S = 180.0
AFTER = 5
"""New steps after a fault that are waited for."""
WATCHED_S = {"daemon": 10.0}
"""After a fault that some systems don't notice at once."""


@dataclass(frozen=True)
class Found:
    """Of one fault: seconds of the pause and of a step at the median, steps in vain."""

    pause_s: float
    step_s: float
    in_vain: float


def new_steps(diaries):
    """When each step was there for the first time on the last of these ranks, which may have done it again later."""
    first = {}
    for diary in diaries:
        seen = -1
        for step in diary:
            if step.number > seen:
                seen = step.number
                first.setdefault(step.number, []).append(step.at)
    return sorted(max(times) for times in first.values())


def judge(diaries, struck):
    """Of the diaries of all processes. If nobody goes on, those that began after the fault continue (torchrun)."""
    before = {pid: steps for pid, steps in diaries.items() if steps and steps[0].at < struck.at}
    after = [steps for pid, steps in diaries.items() if steps and pid not in before]
    left = [steps for pid, steps in before.items() if pid not in struck.victims]
    if after and max(steps[-1].at for steps in left) < min(steps[0].at for steps in after):  # all were started again
        furthest = max(step.number for steps in before.values() for step in steps)
        times = sorted({*new_steps(left), *new_steps([[s for s in steps if s.number > furthest] for steps in after])})
        again = max(steps[0].number for steps in after)
        in_vain = float(furthest - again + 1)
    else:
        times = new_steps(left)
        # A rank of torchft that is behind takes over the number of the others: it has not computed those steps.
        last = [[step for step in steps if step.at < struck.at][-1] for steps in left]
        more = [
            (steps[-1].tried - old.tried, steps[-1].number - old.number) for steps, old in zip(left, last, strict=True)
        ]
        in_vain = statistics.mean(float(max(0, tried - counted)) for tried, counted in more)
    gaps = [(later, later - earlier) for earlier, later in itertools.pairwise(times)]
    usual = statistics.median(gap for at, gap in gaps if at < struck.at)
    return Found(max(gap for at, gap in gaps if at > struck.at) - usual, usual, in_vain)


def available(system, python):
    probe = subprocess.run(
        [python, "-P", "-c", f"import {MODULES[system.partition('-')[0]]}"], capture_output=True, check=False
    )
    return probe.returncode == 0


def measure(name, fault, python, options):
    """One start, one fault. Raises Unmeasured."""
    shape = Shape.of(fault, options)
    with tempfile.TemporaryDirectory(prefix="bagua-elastic-") as place:
        folder = Path(place)
        arguments = [place, str(options.megabytes), str(options.checkpoint_every)]
        with started(name, python, shape, arguments, options.log) as system:
            wait_for(system, START_WITHIN_S, lambda: all_at_work(folder, shape.members, options), "all ranks at work")
            struck = system.strike(fault)
            watched = struck.at + WATCHED_S.get(fault, 0.0)
            wait_for(
                system,
                options.within,
                lambda: time.monotonic() > watched and goes_on(folder, struck),
                f"new steps of {struck.ranks} ranks after the fault",
            )
            return judge(read(folder), struck)


def all_at_work(folder, ranks, options):
    """All take part, and have for some steps; the last one of them lies between two checkpoints."""
    found, every = read(folder).values(), options.checkpoint_every
    together = [sum(step.ranks == ranks for step in steps) for steps in found]
    ready = len(together) == ranks and min(together) >= options.steps
    return ready and max(steps[-1].number for steps in found) % every == every // 2


def goes_on(folder, struck):
    found = {pid: steps for pid, steps in read(folder).items() if steps}
    left = {pid for pid in found if Path(f"/proc/{pid}").exists()} - struck.victims
    # torchrun ends those that are left, some of them after more steps.
    old = [s.number for pid, steps in found.items() for s in steps if s.at < struck.at or pid not in left]
    furthest = max(old, default=0)
    at_work = [found[pid] for pid in left if found[pid][-1].at > struck.at]
    new = [sum(s.number > furthest and s.ranks >= struck.ranks for s in steps) for steps in at_work]
    return len(at_work) >= struck.ranks and min(new) >= AFTER


def wait_for(system, within, condition, what):
    deadline = time.monotonic() + within
    while not condition():
        if system.has_ended():
            raise Unmeasured(f"all of its processes have ended before there were {what}")
        if time.monotonic() > deadline:
            diaries = {pid: steps[-1:] for pid, steps in read(system.folder).items()}
            raise Unmeasured(f"not within {within:g} s: {what} ({diaries})")
        time.sleep(0.02)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", default=",".join(FAULTS), help="with commas")
    parser.add_argument("--systems", default=",".join(SETTINGS), help="with commas")
    parser.add_argument("--ranks", type=int, default=4, help="of the host in rank and daemon")
    parser.add_argument("--island-size", type=int, default=1, help="of the ranks of a host, in rank")
    parser.add_argument("--hosts", type=int, default=3, help="in host, silent and join")
    parser.add_argument("--megabytes", type=int, default=100, help="of gradients")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of all ranks before the fault, at the least")
    parser.add_argument("--within", type=float, default=120.0, help="seconds to wait for new steps after a fault")
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument("--python", action="append", default=[], metavar="SYSTEM=PATH")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "bagua-elastic-peers.log")
    parser.add_argument("--output", choices=("markdown",), help=argparse.SUPPRESS)  # there was another one
    options = parser.parse_args()
    for wanted, known in ((options.faults, FAULTS), (options.systems, SETTINGS)):
        if unknown := set(wanted.split(",")) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    if options.island_size > 1 and (options.faults != "rank" or "torchrun" in options.systems):
        parser.error("--island-size goes with --faults rank, and with the systems bagua, torchft and torchft-1s.")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends all that was started here
    programs, results = prepare(options)
    try:
        rounds(programs, results, options)
    finally:  # it takes long: who ends it early gets what there is
        show(options, results)
    return 0 if all(cell.found for cell in results.cells if cell.system == "bagua") else 1


@dataclass
class Cell:
    """A system and a fault: the findings of the rounds in which it went on, and why it did not in others."""

    fault: str
    system: str
    limit_s: float | None
    found: list[Found]
    why_not: list[str]


@dataclass
class Results:
    """``missing``: systems that are not there, with the reason. ``loads``: of the machine, before each start."""

    cells: list[Cell]
    missing: dict[str, str]
    loads: list[float]


def prepare(options):
    """The Python of each system, and results to be filled."""
    pythons = dict(entry.split("=", 1) for entry in options.python)
    programs = {
        name: pythons.get(name.partition("-")[0], sys.executable)
        for name in SETTINGS
        if name in options.systems.split(",")
    }
    missing = {name: f"not installed in {path}" for name, path in programs.items() if not available(name, path)}
    cells = [
        Cell(fault, name, SETTINGS[name].silence_s if fault == "silent" else None, [], [])
        for fault in FAULTS
        if fault in options.faults.split(",")
        for name in programs
        if name not in missing
    ]
    return programs, Results(cells, missing, [])


def rounds(programs, results, options):
    for number, cell in itertools.product(range(options.rounds), results.cells):
        patience = 1 if (cell.limit_s or 0.0) > options.within else 2
        if not cell.found and len(cell.why_not) == patience:
            continue  # the outcome would be the same, after as long a wait
        results.loads.append(os.getloadavg()[0])
        print(f"round {number + 1} of {options.rounds}: {cell.fault}, {cell.system}", file=sys.stderr, flush=True)
        try:
            cell.found.append(measure(cell.system, cell.fault, programs[cell.system], options))
            print(f"    {cell.found[-1]}", file=sys.stderr)
        except Unmeasured as error:
            cell.why_not.append(str(error))
            print(f"    {error}; see {options.log}", file=sys.stderr)


def show(options, results):
    heads = ("median pause", "longest", "limit", "a step", "in vain", "went on")
    print(f"| fault | system | {' | '.join(heads)} |\n{'|---' * (2 + len(heads))}|")
    for cell in results.cells:
        title = FAULTS[cell.fault].format(ranks=options.ranks, hosts=options.hosts)
        print(f"| {title} | {cell.system} | {' | '.join(texts(cell))} |")
    print()
    for name, why in results.missing.items():
        print(f"{name}: {why}")
    loads = sorted(results.loads) or [0.0]
    print(f"load of the machine before a start: median {statistics.median(loads):.1f}, most {loads[-1]:.1f}")


def texts(cell):
    went_on = f"{len(cell.found)} of {len(cell.found) + len(cell.why_not)}"
    limit = f"{cell.limit_s:g} s" if cell.limit_s else ""
    if not cell.found:
        return ("-", "-", limit, "-", "-", went_on)
    pauses = [one.pause_s for one in cell.found]
    return (
        f"{statistics.median(pauses):.2f} s",
        f"{max(pauses):.2f} s",
        limit,
        f"{statistics.median(one.step_s for one in cell.found):.2f} s",
        f"{statistics.mean(one.in_vain for one in cell.found):.1f}",
        went_on,
    )


if __name__ == "__main__":
    sys.exit(main())
