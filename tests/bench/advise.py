#!/usr/bin/env python3
"""Step times that ``bagua advise`` predicts beside measured ones, between two emulated hosts. Needs root.

    python tests/bench/advise.py                                              # all cases, 50 minutes
    python tests/bench/advise.py --cases resnet@1gbit mlp@1gbit,5ms --save found.json
    python tests/bench/advise.py --read found.json --profiles found.profiles  # predicts again what was measured before

A case is a model of ``bagua bench train`` on a network, with two hosts or so many (``resnet-s@20mbit@4``). Two emulated
hosts share this machine's cores, so each has half of them, and the profile is recorded with two ranks, which share
them in the same way. Other work on the machine
changes from minute to minute: so each algorithm takes turns with a step without communication, and the profile's times
are multiplied by that step over the recorded one.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
from pathlib import Path

from bagua.base.errors import BaguaError
from bagua.bench.emulation import DEVICE
from bagua.cli.advise import record
from bagua.cli.bench.tasks import Task, measure
from bagua.cli.bench.train import train_systems
from bagua.tuning.advice import predict
from bagua.tuning.exchanges import exchange_of
from bagua.tuning.network import parse_network
from bagua.tuning.predict import Cluster
from bagua.tuning.profile import CodecSpeed, StepProfile

ALGORITHMS = (
    *("gradient_allreduce", "gradient_allreduce:codec=fp16", "bytegrad", "top_k", "power_sgd"),
    *(
        "decentralized:codec=minmax8",
        "low_precision_decentralized",
        "local_sgd",
        "diloco:codec=int4,interval=4",
        "streaming_diloco:interval=4",
    ),
)
CASES = (
    *("resnet@1gbit", "resnet@1gbit,5ms", "resnet@100mbit", "resnet@100mbit,5ms", "resnet@50mbit"),
    *("mlp@1gbit", "mlp@1gbit,5ms", "transformer@100mbit", "tiny@1gbit,5ms", "tiny@100mbit,20ms"),
)
ALONE = "no communication"
TOP = 2


def record_model(model, folder, steps):
    """The model's profile, of two ranks with one computing thread each."""
    script = str(Path(__file__).with_name("advise_rank.py"))
    profile = record(script, [model], False, 2, steps, ["OMP_NUM_THREADS=1"], None, quiet=True)
    folder.mkdir(parents=True, exist_ok=True)
    profile.save(folder / f"{model}.json")
    return profile


def parts_of(case):
    """Model, network and number of hosts of ``MODEL@NETWORK[@HOSTS]``."""
    model, network, *hosts = case.split("@")
    return model, network, int(hosts[0]) if hosts else 2


def measure_case(case, seconds, rounds, warm_up):
    """By algorithm: seconds of its steps, and of those without communication that took turns with them."""
    model, network, hosts = parts_of(case)
    systems = []
    for system in train_systems(",".join(ALGORITHMS), "none"):
        if system["kind"] == "bagua":
            systems += [{"name": f"{ALONE}, beside {system['name']}", "kind": "alone"}, system]
    config = {
        "systems": systems,
        "device": DEVICE,
        "malloc": "raised",
        "seconds": seconds,
        "rounds": rounds,
        "warm_up": warm_up,
        "threads": 1,
        "model": model,
    }
    task = Task("bagua.bench.ranks.train", config, hosts, 1, {"OMP_NUM_THREADS": "1"}, quiet=True)
    found = {row["system"]: row["turns_s"] for row in measure(task, parse_network(network))["rows"]}
    return {
        system["algorithm"]: [found[system["name"]], found[f"{ALONE}, beside {system['name']}"]]
        for system in systems
        if system["kind"] == "bagua"
    }


def at_load(profile, times):
    """The profile of a machine that is so many times as slow."""
    speeds = profile.speeds
    return dataclasses.replace(
        profile,
        parameters=tuple(dataclasses.replace(one, ready_ns=round(one.ready_ns * times)) for one in profile.parameters),
        **{name: round(getattr(profile, name) * times) for name in ("forward_ns", "backward_ns", "rest_ns")},
        speeds=dataclasses.replace(
            speeds,
            **{name: getattr(speeds, name) / times for name in ("reduce", "memory", "socket")},
            operation_s=speeds.operation_s * times,
            codecs={name: CodecSpeed(one.encode / times, one.decode / times) for name, one in speeds.codecs.items()},
        ),
    )


def compare(case, measured, profile):
    """A row for each algorithm, the fastest measured one first, both as they are without other load. ``times``: each
    step over the one without communication beside it."""
    _, name, hosts = parts_of(case)
    network = parse_network(name)
    half = dataclasses.replace(profile, cores=max(1, profile.cores // hosts))
    rows = []
    for text, (steps, alone) in measured.items():
        step_s, alone_s = statistics.median(steps), statistics.median(alone)
        loaded = at_load(half, alone_s / profile.compute_s)
        cluster = Cluster.of(loaded, network, hosts=hosts, ranks=1)
        predicted_s = predict(loaded, cluster, exchange_of(text)).step_s
        rows.append(
            {
                "case": case,
                "algorithm": text,
                "alone_ms": alone_s * 1e3,
                "measured_ms": step_s * 1e3,
                "predicted_ms": predicted_s * 1e3,
                "error": predicted_s / step_s - 1,
                "times": [step / base for step, base in zip(steps, alone, strict=True)],
                "predicted_times": predicted_s / alone_s,
            }
        )
    return sorted(rows, key=lambda row: statistics.median(row["times"]))


def slower_beyond_noise(one, best):
    """Whether the rounds show it, whose order changes with the noise otherwise: a sign test at 5 %, of one side."""
    slower = sum(a > b for a, b in zip(one, best, strict=True))
    n = len(best)
    return sum(math.comb(n, k) for k in range(slower, n + 1)) / 2**n < 0.05


def outcome(rows):
    """Of one case: the measured best, and the better one of the two that are predicted best. ``cost``: how much longer
    the step of that is; ``noise``: and whether the rounds do not tell them apart."""
    best = min(rows, key=lambda row: statistics.median(row["times"]))
    two = sorted(rows, key=lambda row: row["predicted_times"])[:TOP]
    taken = min(two, key=lambda row: statistics.median(row["times"]))
    return {
        "case": best["case"],
        "best": best["algorithm"],
        "taken": taken["algorithm"],
        "cost": statistics.median(taken["times"]) / statistics.median(best["times"]) - 1,
        "noise": not slower_beyond_noise(taken["times"], best["times"]),
    }


def verdict(rows):
    """Median error over all rows, and in how many cases the measured best is among the predicted best two; in how many
    more the better of these is not slower beyond the noise."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    found = [outcome([row for row in rows if row["case"] == case]) for case in cases]
    errors = [abs(row["error"]) for row in rows]
    return {
        "median_error": statistics.median(errors),
        "largest": max(errors),
        "outcomes": found,
        "hits": sum(one["best"] == one["taken"] for one in found),
        "alike": sum(one["best"] != one["taken"] and one["noise"] for one in found),
    }


def show(rows):
    """A Markdown table, and the verdict."""
    print("| case | algorithm | no comm., ms | measured ms | predicted ms | error |\n|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['case']} | {row['algorithm']} | {row['alone_ms']:.4g} | "
            f"{row['measured_ms']:.4g} | {row['predicted_ms']:.4g} | "
            f"{row['error']:+.0%} |"
        )
    found = verdict(rows)
    print(
        f"\nmedian error {found['median_error']:.1%}, largest {found['largest']:.0%}; the measured best among the "
        f"predicted best {TOP} in {found['hits']} of {len(found['outcomes'])} cases; in {found['alike']} more the "
        "better of them is not slower beyond the noise"
    )
    for one in found["outcomes"]:
        if one["best"] != one["taken"]:
            words = "within the noise" if one["noise"] else "beyond the noise"
            print(f"{one['case']}: {one['best']} is best; {one['taken']} takes {one['cost']:.1%} longer, {words}")


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cases", nargs="+", default=list(CASES), metavar="MODEL@NETWORK[@HOSTS]")
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--warm-up", type=int, default=2)
    options.add_argument(
        "--profiles", type=Path, default=Path("build/advise-profiles"), help="folder; recorded if not there"
    )
    options.add_argument("--save", type=Path, default=Path("build/advise-measured.json"))
    options.add_argument("--read", type=Path, help="measured before: only predicts")
    given = options.parse_args()
    measured = json.loads(given.read.read_text()) if given.read else {}
    rows = []
    for case in list(measured) or given.cases:
        model, _, _ = parts_of(case)
        file = given.profiles / f"{model}.json"
        profile = StepProfile.load(file) if file.exists() else record_model(model, given.profiles, 12)
        if case not in measured:
            try:
                measured[case] = measure_case(case, given.seconds, given.rounds, given.warm_up)
            except BaguaError as error:
                print(f"{case} could not be measured, and is left out: {error}", file=sys.stderr)
                continue
            given.save.write_text(json.dumps(measured, indent=1))
        rows += compare(case, measured[case], profile)
    show(rows)


if __name__ == "__main__":
    main()
