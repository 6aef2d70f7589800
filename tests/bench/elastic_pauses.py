#!/usr/bin/env python3
"""How long the ranks that are left pause when somebody is lost, a daemon dies, or somebody joins.

    python tests/bench/elastic_pauses.py                                     # all rows, ten times each
    python tests/bench/elastic_pauses.py --rows rank,join --times 3 --megabytes 20
    python tests/bench/elastic_pauses.py --rows rank,join --ranks 6 --island-size 2

A pause is the longest time between two steps of a rank that is left, of the slowest such rank, less the median time of
a step before. The rows, each on a cluster of its own on this machine:

    rank     SIGKILL of 1 of 4 ranks of a host; with islands it takes its own with it
    daemon   SIGKILL of the daemon proper, below its keeper, on that host
    join     a new rank (an island) takes the place of the one that was killed, less the state at 7 Gbit/s
    host     SIGKILL of the keeper of 1 of 3 hosts with one rank each
    silent   1 of 3 hosts is stopped with all of its processes, less the limit of 5 s (docs/elastic.md)
    coordinator  SIGKILL of the coordinator, which is away for 4 s. Two more rows take turns with it, 4 s each:
             "restart", in which it is started on the same processors, and "undisturbed", in which nothing happens
"""

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bagua.base.daemon_process import daemon_pid
from bagua.daemon.node.keeper.keeper import MAX_DEATHS

sys.path.insert(0, str(Path(__file__).parent))

from elastic_rig import SILENCE_S, Rig, Unmeasured

ON_ONE_HOST, BETWEEN_HOSTS, ABOVE = ("rank", "daemon", "join"), ("host", "silent"), ("coordinator",)
ROWS = (*ON_ONE_HOST, *BETWEEN_HOSTS, *ABOVE)
TARGETS = {"rank": (0.3, 1.0), "host": (0.3, 1.0), "silent": (0.5, 1.5), "daemon": (1.5, 3.0), "join": (0.2, 1.0)}
"""Seconds: median, 99 of 100."""
TURN_S = 4.0
DAEMON_DEATHS = MAX_DEATHS - 1
"""Of one daemon. At the next one its keeper would give up: so many within a minute mean that the daemon is broken."""


@contextlib.contextmanager
def rig(nodes, slots, options):
    with tempfile.TemporaryDirectory(prefix="bagua-pauses-") as folder:
        diaries = Path(folder) / "diaries"
        diaries.mkdir()
        made = Rig(Path(folder), slots, diaries, [str(options.megabytes), "10"], options.island_size)
        try:
            made.start_nodes(nodes)
            made.start_job()
            made.await_whole()
            yield made
        except Unmeasured as error:
            raise SystemExit(str(error)) from error
        finally:
            made.end()


def on_one_host(options, tell):
    for done in range(0, options.times, DAEMON_DEATHS):
        on_a_new_cluster(min(DAEMON_DEATHS, options.times - done), options, tell)


def on_a_new_cluster(times, options, tell):
    with rig(1, options.ranks, options) as made:
        for _ in range(times):
            if "daemon" in options.rows:
                began = time.monotonic()
                os.kill(daemon_pid(next(iter(made.nodes.values())).process.pid), signal.SIGKILL)
                tell("daemon", made.pause_of(list(made.ranks()), began))
            if "rank" in options.rows or "join" in options.rows:
                (victim, *_), *others = made.islands()
                left = list(itertools.chain(*others))
                began = time.monotonic()
                os.kill(victim, signal.SIGKILL)
                tell("rank", made.pause_of(left, began))
                joined = made.join_of(left, began)
                tell("join", joined - options.megabytes * 8e-3 / 7)


def between_hosts(options, tell):
    with rig(options.hosts, 1, options) as made:
        for _, row in itertools.product(range(options.times), BETWEEN_HOSTS):
            if row not in options.rows:
                continue
            ranks = made.ranks()
            victim, node = sorted(ranks.items())[0]
            left = [pid for pid in ranks if pid != victim]
            service = made.nodes.pop(node)
            daemon, began = daemon_pid(service.process.pid), time.monotonic()
            if row == "host":
                service.process.kill()
                tell(row, made.pause_of(left, began))
            else:
                for pid in (service.process.pid, daemon, victim):
                    os.kill(pid, signal.SIGSTOP)
                tell(row, made.pause_of(left, began) - SILENCE_S)
                for pid in (victim, daemon, service.process.pid):
                    os.kill(pid, signal.SIGKILL)
            made.start_nodes(options.hosts)
            made.await_whole()


def without_the_coordinator(options, tell):
    with rig(1, options.ranks, options) as made:
        pids = list(made.ranks())
        for _ in range(options.times):
            tell("undisturbed", made.turn(pids, lambda: None, TURN_S))
            tell("coordinator", made.turn(pids, made.coordinator.process.kill, TURN_S))
            tell("restart", made.turn(pids, made.start_coordinator, TURN_S))


def most(times):
    """99 of 100 are at most this: of fewer the longest."""
    return sorted(times)[min(len(times) - 1, int(0.99 * len(times)))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="with commas")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--island-size", type=int, default=1, help="of the ranks of a host: shards of FSDP2")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=100, help="of gradients")
    options = parser.parse_args()
    options.rows = options.rows.split(",")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends all that was started here
    found = {}

    def tell(row, seconds):
        found.setdefault(row, []).append(max(0.0, seconds))
        print(f"{row}: {seconds * 1e3:.0f} ms", file=sys.stderr, flush=True)

    if set(options.rows) & set(ON_ONE_HOST):
        on_one_host(options, tell)
    if set(options.rows) & set(BETWEEN_HOSTS):
        between_hosts(options, tell)
    if set(options.rows) & set(ABOVE):
        without_the_coordinator(options, tell)
    print(f"{'row':<12}{'median':>10}{'99 %':>10}{'wanted':>16}{'times':>8}   ({options.megabytes} MB)")
    for row, times in found.items():
        wanted = " / ".join(f"{seconds:g}" for seconds in TARGETS.get(row, ()))
        print(f"{row:<12}{statistics.median(times):>8.3f} s{most(times):>8.3f} s{wanted:>14} s{len(times):>8}")


if __name__ == "__main__":
    main()
