#!/usr/bin/env python3
"""All-reduce of four emulated hosts, one pair of which has a slow link. Needs root.

    sudo "$(which python)" tests/bench/slow_link.py                      # all cases, two minutes
    sudo "$(which python)" tests/bench/slow_link.py --cases 0-1@40mbit none --sizes 8M

Each case runs twice, with the ring in the order of measured bandwidths and in that of the hosts
(``BAGUA_MEASURE_RING=0``). A case is a pair of hosts and its rate in both directions; each host sends at ``--rate`` in
all. The hosts are network namespaces behind one bridge, with one rank each.
"""

import argparse
import functools
import os
import sys

from bagua.base.errors import BaguaError
from bagua.bench.emulation import DEVICE, Emulation, _command, namespace_name, start_time
from bagua.bench.units import parse_sizes, size_text
from bagua.cli.bench import tasks
from bagua.tuning.network import parse_network

HOSTS = 4
CASES = ("0-1@40mbit", "0-1@200mbit", "0-2@40mbit", "none")
ORDERS = {"measured": "1", "hosts": "0"}
"""Values of BAGUA_MEASURE_RING."""


class Bridged(Emulation):
    """Hosts behind a bridge in a namespace of its own. ``slow``: two hosts, and the rate between them."""

    def __init__(self, network, hosts, slow):
        super().__init__(network, hosts)
        self.slow = slow
        self.bridge = namespace_name(os.getpid(), start_time(os.getpid()) or 0, HOSTS)

    def _join_by_relay(self, program):
        """The bridge is in the place of the relay, which has one rate for all pairs."""
        _command("ip", "netns", "add", self.bridge)
        _command("ip", "-n", self.bridge, "link", "add", "bridge", "type", "bridge")
        _command("ip", "-n", self.bridge, "link", "set", "bridge", "up")
        for host, name in enumerate(self.names):
            port = f"port{host}"
            peer = ("type", "veth", "peer", "name", port, "netns", self.bridge)
            _command("ip", "link", "add", DEVICE, "netns", name, *peer)
            _command("ip", "-n", self.bridge, "link", "set", port, "master", "bridge", "up")
            self._shape(host, name)

    def _shape(self, host, name):
        """All that the host sends shares one rate; what goes to the other host of the slow pair has less of it."""
        on = ("-n", name)
        _command("tc", *on, "qdisc", "add", "dev", DEVICE, "root", "handle", "1:", "htb", "default", "10")
        self._class(name, "1:", "1:1", self.network.rate, self.network.rate)
        self._class(name, "1:1", "1:10", self.network.rate, self.network.rate)
        if self.slow is None or host not in self.slow[:2]:
            return
        rate = self.slow[2]
        other = self.addresses[self.slow[1] if host == self.slow[0] else self.slow[0]]
        self._class(name, "1:1", "1:20", rate, rate)
        match = ("u32", "match", "ip", "dst", f"{other}/32", "flowid", "1:20")
        _command("tc", *on, "filter", "add", "dev", DEVICE, "parent", "1:", "protocol", "ip", "prio", "1", *match)

    def _class(self, name, parent, number, rate, most):
        bits = ("rate", f"{rate:.0f}bit", "ceil", f"{most:.0f}bit", "quantum", "60000")
        _command("tc", "-n", name, "class", "add", "dev", DEVICE, "parent", parent, "classid", number, "htb", *bits)

    def close(self):
        super().close()
        _command("ip", "netns", "delete", self.bridge, check=False)


def parse_case(text):
    """``0-1@40mbit``, or none."""
    if text == "none":
        return None
    pair, _, rate = text.partition("@")
    one, _, other = pair.partition("-")
    hosts = sorted({int(one), int(other)})
    if len(hosts) != 2 or hosts[1] >= HOSTS:
        raise ValueError(f"{text!r}: the hosts are two of 0 to {HOSTS - 1}")
    return hosts[0], hosts[1], parse_network(rate).rate


def measure(case, order, network, sizes, seconds, rounds):
    """Seconds by size, medians of the slowest rank."""
    config = {
        "sizes": sizes,
        "systems": [{"name": "bagua", "memory": "bucket", "codec": "none"}],
        "nodes": HOSTS,
        "emulated": True,
        "rate": network.rate,
        "delay_s": 0.0,
        **{"nnodes": HOSTS, "nproc_per_node": 1, "dtype": "float32"},
        **{"seconds": seconds, "rounds": rounds, "threads": 1},
    }
    os.environ["BAGUA_MEASURE_RING"] = ORDERS[order]
    bridged = functools.partial(Bridged, slow=parse_case(case))
    task = tasks.Task("bagua.bench.ranks.allreduce", config, HOSTS, 1, {"OMP_NUM_THREADS": "1"}, quiet=True)
    return {row["bytes"]: row["s"] for row in tasks.measure(task, network, bridged)["rows"]}


def main(arguments=None):
    """Prints a row for each case and size, seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="HOST-HOST@RATE")
    parser.add_argument("--sizes", default="1M,8M", help="bytes of each rank's vector")
    parser.add_argument("--rate", default="400mbit", help="of each host")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each size")
    parser.add_argument("--rounds", type=int, default=3, help="the fewest")
    options = parser.parse_args(arguments)
    network, sizes = parse_network(options.rate), parse_sizes(options.sizes)
    print("| slow link | size | measured order | order of hosts |\n|---|---|---|---|")
    for case in options.cases:
        found = [measure(case, order, network, sizes, options.seconds, options.rounds) for order in ORDERS]
        for size in sizes:
            print(f"| {case} | {size_text(size)} | " + " | ".join(f"{one[size]:.3f} s" for one in found) + " |")


if __name__ == "__main__":
    try:
        main()
    except (BaguaError, ValueError) as error:
        sys.exit(f"error: {error}")
