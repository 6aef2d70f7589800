#!/usr/bin/env python3
"""Full load for minutes: memory, descriptors and threads of daemons and ranks must stay flat, results right.

    python tests/soak/soak.py --minutes 10 --nnodes 2 --nproc-per-node 2

Runs ``bagua run`` with ranks that do random operations (sizes, dtypes, reductions, codecs, groups made and destroyed,
ordinary and shared memory), looks at every process twice a second, and prints a table. Exit code 1: something grew, a
result was wrong, or a process is left over.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # whatever PYTHONSAFEPATH says

from trend import growth

EVERY_S = 0.5
STARTED_S = 120.0
ENDED_S = 120.0
PAGE = os.sysconf("SC_PAGE_SIZE")
# Growth that is no leak: fragments of the heap, descriptors and threads of a group that is alive.
LIMITS = {"memory": (24 << 20, 0.05), "descriptors": (12.0, 0.0), "threads": (6.0, 0.0)}


@dataclass
class Watched:
    """A process and what it held over time."""

    name: str
    pid: int
    times: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    descriptors: list[float] = field(default_factory=list)
    threads: list[float] = field(default_factory=list)

    def look(self):
        proc = Path(f"/proc/{self.pid}")
        try:
            resident = int((proc / "statm").read_text().split()[1]) * PAGE
            descriptors, threads = len(os.listdir(proc / "fd")), len(os.listdir(proc / "task"))
        except (OSError, IndexError):
            return  # it has ended
        self.times.append(time.monotonic())
        self.memory.append(resident)
        self.descriptors.append(descriptors)
        self.threads.append(threads)

    def row(self, limits=LIMITS):
        found = {"process": self.name, "samples": len(self.times)}
        for what, (absolute, relative) in limits.items():
            values = getattr(self, what)
            largest, grew = max(values, default=0.0), growth(self.times, values)
            found[what] = {"largest": largest, "grew": grew, "flat": grew <= absolute + relative * largest}
        return found


def watched(folder, ranks, process):
    """All ranks and their daemons, once the ranks have told who they are."""
    deadline = time.monotonic() + STARTED_S
    while len(files := [path for path in folder.glob("rank-*.pid") if path.read_text()]) < ranks:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            sys.exit(f"the ranks did not start: {(folder / 'log').read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)
    pids = {path.stem.replace("-", " "): tuple(map(int, path.read_text().split())) for path in sorted(files)}
    daemons = sorted({parent for _, parent in pids.values()})
    found = [Watched(f"daemon {index}", pid) for index, pid in enumerate(daemons)]
    return found + [Watched(name, pid) for name, (pid, _) in pids.items()]


def soak(options):
    ranks, seconds = options.nnodes * options.nproc_per_node, options.minutes * 60
    with tempfile.TemporaryDirectory(prefix="bagua-soak-") as name:
        folder = Path(name)
        program = [Path(__file__).with_name("rank.py"), folder, seconds, options.seed, options.max_bytes]
        shape = ["--nnodes", options.nnodes, "--nproc-per-node", options.nproc_per_node]
        command = [sys.executable, "-P", "-m", "bagua.cli.main", "run", *shape, *program]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)
            try:
                processes = watched(folder, ranks, process)
                deadline = time.monotonic() + seconds + ENDED_S
                while process.poll() is None and time.monotonic() < deadline:
                    for one in processes:
                        one.look()
                    time.sleep(EVERY_S)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait(30)
        reports = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
        wrong = [text for report in reports for text in report["wrong"]]
        if process.returncode or len(reports) < ranks:
            wrong.append(f"it ended with {process.returncode}: {(folder / 'log').read_text(errors='replace')[-2000:]}")
    wrong += [f"{one.name} is left" for one in processes if Path(f"/proc/{one.pid}").exists()]
    rows = [one.row() for one in processes]
    wrong += [f"{row['process']}: {what} grows" for row in rows for what in LIMITS if not row[what]["flat"]]
    totals = {key: sum(report[key] for report in reports) for key in ("operations", "bytes", "groups")}
    return {"ok": not wrong, "wrong": wrong, "seconds": seconds, "seed": options.seed, **totals, "rows": rows}


def table(rows):
    """Of the processes."""
    lines = [
        f"{'process':<14}{'samples':>8}{'memory MiB':>12}{'grew':>8}{'fds':>6}{'grew':>6}{'threads':>9}{'grew':>6}"
    ]
    for row in rows:
        memory, descriptors, threads = (row[what] for what in LIMITS)
        grown = [f"{what} by {row[what]['grew']:.0f}" for what in LIMITS if not row[what]["flat"]]
        lines.append(
            f"{row['process']:<14}{row['samples']:>8}{memory['largest'] / 2**20:>12.1f}{memory['grew'] / 2**20:>8.1f}"
            f"{descriptors['largest']:>6.0f}{descriptors['grew']:>6.1f}{threads['largest']:>9.0f}"
            f"{threads['grew']:>6.1f}" + (f"  grows: {', '.join(grown)}" if grown else "")
        )
    return lines


def tell(found, output, *words):
    """Prints the report, and ends this program."""
    end = [f"wrong: {text}" for text in found["wrong"]] + ["ok" if found["ok"] else "FAILED"]
    print(json.dumps(found) if output == "json" else "\n".join([*table(found["rows"]), *words, *end]))
    sys.exit(0 if found["ok"] else 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--nnodes", type=int, default=2)
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--max-bytes", type=int, default=32 << 20, help="largest operation, over all its ranks")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the sequence of operations")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    options = parser.parse_args()
    found = soak(options)
    words = f"{found['operations']} operations, {found['bytes'] / 2**30:.1f} GiB, {found['groups']} groups in "
    tell(found, options.output, f"{words}{found['seconds']:.0f} s, seed {found['seed']}")


if __name__ == "__main__":
    main()
