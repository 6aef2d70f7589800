#!/usr/bin/env python3
"""One of several ranks is killed by SIGKILL: how long the others pause, beside torchrun and torchft.

python tests/bench/elastic_peers.py --ranks 4 --megabytes 100 --rounds 3 --python torchft=/path/to/python

Each round starts every system once, one after the other, so that all see the same machine. A pause is the longest time
between two steps that are new, after the kill, less the median time of a step. ``in vain``: steps that a rank computed
and that did not count (or counted twice), on average over the ranks that are left. ``went on``: rounds in which these
made new steps.

torchrun starts all ranks again from the last checkpoint (every --checkpoint-every steps). torchft is measured with its
own heartbeat (5 s) and with one of 1 s (torchft-1s). A system is looked for in this Python, or in the one that --python
names. What can't be imported is left out, and the table says so.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

RANK_MAIN = Path(__file__).with_name("elastic_rank.py")
MODULES = {"bagua": "bagua.torch_api", "torchrun": "torch.distributed.run", "torchft": "torchft"}
LIGHTHOUSE = {
    "torchft": ("--join_timeout_ms", "10000"),
    "torchft-1s": ("--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"),
}
SYSTEMS = ("bagua", "torchrun", *LIGHTHOUSE)
START_DEADLINE_S = 180.0
AFTER = 5
"""New steps after the kill that are waited for."""


@dataclass(frozen=True)
class Step:
    """A line of a rank's diary. ``at``: seconds of the monotonic clock."""

    at: float
    number: int
    ranks: int
    tried: int


@dataclass(frozen=True)
class Found:
    """Of one kill: seconds of the pause and of a step at the median, steps in vain."""

    pause_s: float
    step_s: float
    in_vain: float


class Unmeasured(Exception):
    """A system did not do it; the words say what is missing."""


def read(folder: Path) -> dict[int, list[Step]]:
    """The diaries: pid -> its steps."""
    found = {}
    for path in folder.glob("steps-*"):
        lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[int(path.name.removeprefix("steps-"))] = [
            Step(int(at) / 1e9, int(number), int(ranks), int(tried)) for at, number, ranks, tried in lines
        ]
    return found


def new_steps(diaries: Sequence[Sequence[Step]]) -> list[float]:
    """When each step was there for the first time on the last of these ranks, which may have done it again later."""
    first: dict[int, list[float]] = {}
    for diary in diaries:
        seen = -1
        for step in diary:
            if step.number > seen:
                seen = step.number
                first.setdefault(step.number, []).append(step.at)
    return sorted(max(times) for times in first.values())


def judge(diaries: dict[int, list[Step]], victim: int, killed_at: float) -> Found:
    """Of the diaries of all processes. Those that began after the kill continue the ones before (torchrun)."""
    before = {pid: steps for pid, steps in diaries.items() if steps and steps[0].at < killed_at}
    after = [steps for pid, steps in diaries.items() if steps and pid not in before]
    left = [steps for pid, steps in before.items() if pid != victim]
    if after:  # all ranks were started again
        furthest = max(step.number for steps in before.values() for step in steps)
        times = sorted({*new_steps(left), *new_steps([[s for s in steps if s.number > furthest] for steps in after])})
        again = max(steps[0].number for steps in after)
        in_vain = float(furthest - again + 1)
    else:
        times = new_steps(left)
        in_vain = statistics.mean(steps[-1].tried - steps[-1].number for steps in left)
        in_vain -= statistics.mean(
            max(step.tried - step.number for step in steps if step.at < killed_at) for steps in left
        )
    gaps = [(later, later - earlier) for earlier, later in itertools.pairwise(times)]
    usual = statistics.median(gap for at, gap in gaps if at < killed_at)
    return Found(max(gap for at, gap in gaps if at > killed_at) - usual, usual, in_vain)


def available(system: str, python: str) -> bool:
    probe = subprocess.run(
        [python, "-P", "-c", f"import {MODULES[system.partition('-')[0]]}"], capture_output=True, check=False
    )
    return probe.returncode == 0


@contextlib.contextmanager
def started(
    system: str, python: str, ranks: int, arguments: Sequence[str], log: Path
) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """The system at work: the processes that train, or start those that do. Leaving the context ends all of them."""
    kind = system.partition("-")[0]
    program = [str(RANK_MAIN), kind, *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONSAFEPATH": "1"}
    processes: list[subprocess.Popen[bytes]] = []

    def start(*command: str, **more: str) -> None:
        processes.append(subprocess.Popen(command, env={**env, **more}, stdout=out, stderr=out, start_new_session=True))

    with log.open("ab") as out:
        try:
            if kind == "bagua":
                shape = ("--elastic", "--nproc-per-node", str(ranks), "--quiet")
                start(python, "-m", "bagua.cli.main", "run", *shape, *program)
            elif kind == "torchrun":
                shape = ("--nproc-per-node", str(ranks), "--max-restarts", "3", "--standalone")
                start(python, "-m", "torch.distributed.run", *shape, *program)
            else:
                lighthouse = Path(python).with_name("torchft_lighthouse")
                address = f"127.0.0.1:{free_port()}"
                start(str(lighthouse), "--bind", address, "--min_replicas", "1", *LIGHTHOUSE[system])
                for rank in range(ranks):
                    start(python, *program, RANK=str(rank), TORCHFT_LIGHTHOUSE=f"http://{address}", LOGLEVEL="ERROR")
            yield processes[1:] if kind == "torchft" else processes
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM if kind != "torchft" else signal.SIGKILL)
            for process in processes:
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def measure(system: str, python: str, options: argparse.Namespace) -> Found:
    """One start, one kill. Raises Unmeasured."""
    with tempfile.TemporaryDirectory(prefix="bagua-elastic-") as name:
        folder = Path(name)
        arguments = [name, str(options.megabytes), str(options.checkpoint_every)]
        with started(system, python, options.ranks, arguments, options.log) as processes:
            wait_for(folder, processes, lambda: all_at_work(folder, options), "all ranks at work")
            victim = sorted(read(folder))[1]
            killed_at = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            wait_for(folder, processes, lambda: goes_on(folder, victim, killed_at), "new steps after the kill")
            return judge(read(folder), victim, killed_at)


def all_at_work(folder: Path, options: argparse.Namespace) -> bool:
    """All take part, and have for some steps; the last one of them lies between two checkpoints."""
    found, every = read(folder).values(), options.checkpoint_every
    together = [sum(step.ranks == options.ranks for step in steps) for steps in found]
    ready = len(together) == options.ranks and min(together) >= options.steps
    return ready and max(steps[-1].number for steps in found) % every == every // 2


def goes_on(folder: Path, victim: int, killed_at: float) -> bool:
    found = {pid: steps for pid, steps in read(folder).items() if steps}
    furthest = max((s.number for steps in found.values() for s in steps if s.at < killed_at), default=0)
    # torchrun ends those that are left, some of them after one more step.
    alive = {pid: steps for pid, steps in found.items() if Path(f"/proc/{pid}").exists() and pid != victim}
    new = [pid for pid, steps in alive.items() if steps[-1].number >= furthest + AFTER]
    return len(new) >= len([steps for steps in alive.values() if steps[-1].at > killed_at]) > 0


def wait_for(
    folder: Path, processes: Sequence[subprocess.Popen[bytes]], condition: Callable[[], bool], what: str
) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while not condition():
        if all(process.poll() is not None for process in processes):
            raise Unmeasured(f"all of its processes have ended before there were {what}")
        if time.monotonic() > deadline:
            diaries = {pid: steps[-1:] for pid, steps in read(folder).items()}
            raise Unmeasured(f"not within {START_DEADLINE_S:g} s: {what} ({diaries})")
        time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="with commas")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=100, help="of gradients")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of all ranks before the kill, at the least")
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument("--python", action="append", default=[], metavar="SYSTEM=PATH")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "bagua-elastic-peers.log")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends all that was started here
    systems = [name for name in SYSTEMS if name in options.systems.split(",")]
    found, missing = rounds(systems, dict(entry.split("=", 1) for entry in options.python), options)
    if options.output == "json":
        rows = {name: [asdict(one) for one in kills] for name, kills in found.items()}
        print(json.dumps({"ranks": options.ranks, "megabytes": options.megabytes, "found": rows, "missing": missing}))
    else:
        show(options, found, missing)
    return 0 if "bagua" in found or "bagua" not in systems else 1


def rounds(
    systems: Sequence[str], pythons: dict[str, str], options: argparse.Namespace
) -> tuple[dict[str, list[Found]], dict[str, str]]:
    """The findings for each system, and why others are missing."""
    programs = {name: pythons.get(name.partition("-")[0], sys.executable) for name in systems}
    missing = {name: f"not installed in {path}" for name, path in programs.items() if not available(name, path)}
    found: dict[str, list[Found]] = {}
    for number in range(options.rounds):
        for name in [name for name in systems if name not in missing]:
            print(f"round {number + 1} of {options.rounds}: {name}", file=sys.stderr, flush=True)
            try:
                found.setdefault(name, []).append(measure(name, programs[name], options))
            except Unmeasured as error:
                print(f"{name}: {error}; see {options.log}", file=sys.stderr)
    failed = {name: f"failed every time: see {options.log}" for name, kills in found.items() if not kills}
    return {name: kills for name, kills in found.items() if kills}, missing | failed


def show(options: argparse.Namespace, found: dict[str, list[Found]], missing: dict[str, str]) -> None:
    title = f"SIGKILL of 1 of {options.ranks}, {options.megabytes} MB"
    print(f"{title:<28}{'median pause':>14}{'longest':>12}{'a step':>10}{'in vain':>10}{'went on':>10}")
    for name, kills in found.items():
        pauses = [one.pause_s for one in kills]
        cells = (
            f"{statistics.median(pauses):.2f} s",
            f"{max(pauses):.2f} s",
            f"{statistics.median(one.step_s for one in kills):.2f} s",
            f"{statistics.mean(one.in_vain for one in kills):.1f}",
            f"{len(kills)} of {options.rounds}",
        )
        print(f"{name:<28}{cells[0]:>14}{cells[1]:>12}{cells[2]:>10}{cells[3]:>10}{cells[4]:>10}")
    for name, why in missing.items():
        print(f"{name:<28}{why}")


if __name__ == "__main__":
    sys.exit(main())
