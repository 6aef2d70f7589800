#!/usr/bin/env python3
"""The cost of the control plane: a real coordinator process, and simulated daemons that speak its protocol.

    python tests/bench/control_plane.py
    python tests/bench/control_plane.py --rows queue --waiting 2000 --trivial 16
    python tests/bench/control_plane.py --hosts 300
    python tests/bench/control_plane.py --compare --accounts --tls --postgres postgresql://postgres@127.0.0.1/bench
    python tests/bench/control_plane.py --compare --rows start --operator

Rows: `queue` (trivial jobs through 8 slots), `wide` (one job on all hosts, and reads meanwhile), `elastic` (one job on
all hosts, which loses ranks), `beats` (daemons that do nothing), `old` (submitting where there are many old jobs),
`start` (a job of two nodes from nothing, with real daemons: with --operator as a BaguaJob on Kubernetes). Each has a
coordinator of its own. --compare measures twice, first without all that is asked for, and tells whether each figure
is at most twice as dear then. Nothing is asserted: the figures depend on the machine, which runs the coordinator, the
daemons and the readers at once.
"""

import argparse
import resource
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/rig, whatever PYTHONSAFEPATH says
sys.path.insert(0, str(Path(__file__).parent))

from control.figures import beats, elastic, old, queue, wide
from control.report import console, tables
from control.start import start
from control.way import Way
from rich.console import Console

ROWS = {"queue": queue, "wide": wide, "elastic": elastic, "beats": beats, "old": old, "start": start}


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--accounts", action="store_true", help="callers and daemons show tokens of accounts")
    parser.add_argument("--tls", action="store_true", help="mutual TLS between all of them")
    parser.add_argument("--postgres", metavar="URL", default="", help="a database of its own: all in it is DROPPED")
    parser.add_argument("--operator", action="store_true", help="for `start`: a BaguaJob (KUBEBUILDER_ASSETS, etcd)")
    parser.add_argument("--compare", action="store_true", help="first without these four, then with, and the ratio")
    parser.add_argument("--waiting", type=int, default=10_000, help="jobs in the queue")
    parser.add_argument("--trivial", type=int, default=2_000, help="jobs that are timed")
    parser.add_argument("--hosts", type=int, default=1_000)
    parser.add_argument("--times", type=int, default=5, help="how often the wide job is run, and one from nothing")
    parser.add_argument("--losses", type=int, default=20, help="ranks of the elastic job that are killed")
    parser.add_argument("--changes", type=int, default=20, help="planned changes of the elastic job")
    parser.add_argument("--old", type=int, default=200_000, help="jobs that have ended")
    parser.add_argument("--beat-s", type=float, default=20.0, help="how long heartbeats are measured")
    parser.add_argument("--settle-s", type=float, default=20.0, help="pause before heartbeats are measured")
    parser.add_argument("--limit-s", type=float, default=600.0, help="how long one step may take")
    options = parser.parse_args()
    way = Way(options.accounts, options.tls, options.postgres, options.operator)
    if options.compare and way == Way():
        parser.error("--compare needs one of --accounts, --tls, --postgres, --operator, or several.")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the coordinator and the daemons inherit it
    found = {each.name: run(options, each) for each in ([Way(), way] if options.compare else [way])}
    for table in tables(found):
        Console().print(table)


def run(options, way):
    options.way = way
    rows = []
    for name in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            for row in ROWS[name](options, Path(folder)):
                rows.append(row)
                console.print(f"[dim]{way.name}: {row.what.strip()}: {row.value} ({row.note})", highlight=False)
    return rows


if __name__ == "__main__":
    main()
