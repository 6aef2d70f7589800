"""Codes of tools that measure, predict and break on purpose."""

from __future__ import annotations

from bagua.error_codes.entry import Area, Entry

AREA = Area(
    "tools",
    "Measuring, predicting, faults on purpose",
    "Errors of `bagua bench`, `bagua advise` and `bagua chaos`.",
    (
        Entry(
            "BG001",
            "A measurement did not come to its end",
            "A job or a program that `bagua bench` started failed, could not connect to its other end, computed a "
            "wrong result, or its result did not arrive.",
            "Read the words in the error and the last lines of output. Run the same command again when the machine "
            "was overloaded. `bench net` needs two connected node daemons for pairs. A wrong result is a fault of "
            "ours: please report it with the command.",
        ),
        Entry(
            "BG002",
            "An emulated network can't be made",
            "`--emulate` makes network namespaces. That needs root, the program `ip` of iproute2, and for a delay "
            "the device `/dev/net/tun`; or the kernel refused one of the commands.",
            "Run the command as root, install iproute2, or leave `--emulate` out. In a container without "
            "`/dev/net/tun` emulate a rate alone, as in `--emulate 1gbit`.",
        ),
        Entry(
            "BG003",
            "A fault can't be played",
            "`bagua chaos` can't do one of its faults here (no root, no mount namespace, no PostgreSQL), the job "
            "that it trains did not begin, or the effect of a fault did not come within the limit.",
            "Leave the kind of fault out, or name the kinds that you want with `--kinds`. Run as root for faults "
            "of network and disk. If ranks ended that should go on, keep the report: that is what the command "
            "looks for.",
        ),
        Entry(
            "BG004",
            "A network is not described, or can't be",
            "`bagua advise` needs to know what is between the hosts, and one host does not show it; or the text is "
            "no rate and delay; or the measured times fit no model of a network.",
            "Write `RATE[,DELAY]`, such as `--network 1gbit`, `--network 100mbit,5ms` or `none`. Rates go from "
            "`100kbit` to `100gbit`. To fit a network, measure at least two sizes, the larger one of some "
            "megabytes.",
        ),
        Entry(
            "BG005",
            "A step profile can't be read or used",
            "The file is no profile that `bagua advise --save` wrote, was written by another version, was changed "
            "by hand, or can't be read or written; or it names an exchange that has no prediction of its own.",
            "Record it again: `bagua advise --save FILE SCRIPT`. The error names the field that can't be used.",
        ),
    ),
)
