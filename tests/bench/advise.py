#!/usr/bin/env python3
"""Step times that ``bagua advise`` predicts beside measured ones, between two emulated hosts. Needs root.

    python tests/bench/advise.py                                              # all cases, about half an hour
    python tests/bench/advise.py --cases resnet@1gbit mlp@1gbit,5ms --save found.json
    python tests/bench/advise.py --read found.json --profiles found.profiles  # predicts again what was measured before

A case is a model of ``bagua bench train`` on a network. Two emulated hosts share this machine's cores, so each has half
of them, and the profile is recorded with two ranks, which share them in the same way. Other work on the machine
changes from minute to minute: so the profile's times are multiplied by the step without communication, as it was
measured among the others, over the recorded one. ``--raw`` leaves that out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagua.bench.emulation import DEVICE
from bagua.cli.advise import record
from bagua.cli.bench import train_systems
from bagua.cli.bench_run import Task, measure
from bagua.tuning.advice import advise
from bagua.tuning.network import parse_network
from bagua.tuning.predict import Cluster
from bagua.tuning.profile import CodecSpeed, StepProfile

ALGORITHMS = (
    *("gradient_allreduce", "gradient_allreduce:codec=fp16", "bytegrad", "top_k", "power_sgd"),
    *(
        "decentralized:codec=minmax8",
        "low_precision_decentralized",
        "local_sgd",
        "diloco:codec=int4",
        "streaming_diloco",
    ),
)
CASES = (
    *("resnet@1gbit", "resnet@1gbit,5ms", "resnet@100mbit", "resnet@100mbit,5ms", "resnet@50mbit"),
    *("mlp@1gbit", "mlp@1gbit,5ms", "transformer@100mbit", "tiny@1gbit,5ms", "tiny@100mbit,20ms"),
)
ALONE = "no communication"
TOP = 2


def record_model(model: str, folder: Path, steps: int) -> StepProfile:
    """The model's profile, of two ranks with one computing thread each."""
    script = str(Path(__file__).with_name("advise_rank.py"))
    profile = record(script, [model], False, 2, steps, ["OMP_NUM_THREADS=1"], None, quiet=True)
    folder.mkdir(parents=True, exist_ok=True)
    profile.save(folder / f"{model}.json")
    return profile


def measure_case(model: str, network: str, seconds: float, rounds: int, warm_up: int) -> dict[str, float]:
    """Seconds of a step by algorithm, and of one without communication."""
    config = {
        "systems": train_systems(",".join(ALGORITHMS), "none"),
        "device": DEVICE,
        "malloc": "raised",
        "seconds": seconds,
        "rounds": rounds,
        "warm_up": warm_up,
        "threads": 1,
        "model": model,
    }
    task = Task("bagua.bench.ranks.train", config, 2, 1, {"OMP_NUM_THREADS": "1"}, quiet=True)
    rows = measure(task, parse_network(network))["rows"]
    found = {row["system"]: row["s"] for row in rows if row["kind"] == "alone"}
    texts = {system["name"]: system["algorithm"] for system in config["systems"] if system["kind"] == "bagua"}
    return found | {texts[row["system"]]: row["s"] for row in rows if row["kind"] == "bagua"}


def at_load(profile: StepProfile, times: float) -> StepProfile:
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


def compare(case: str, measured: dict[str, float], profile: StepProfile) -> list[dict[str, Any]]:
    """A row for each algorithm, the fastest measured one first."""
    network = parse_network(case.partition("@")[2])
    half = dataclasses.replace(profile, cores=max(1, profile.cores // 2))
    made = advise(half, Cluster.of(half, network, hosts=2, ranks=1), ALGORITHMS)
    predicted = {row.exchange.text: row.prediction.step_s for row in made.rows}
    return [
        {
            "case": case,
            "algorithm": text,
            "measured_ms": measured[text] * 1e3,
            "predicted_ms": predicted[text] * 1e3,
            "error": predicted[text] / measured[text] - 1,
        }
        for text in sorted(ALGORITHMS, key=lambda text: measured[text])
    ]


def verdict(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median error over all rows, and in how many cases the measured best is among the predicted best two."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    hits = 0
    for case in cases:
        mine = [row for row in rows if row["case"] == case]
        best = min(mine, key=lambda row: row["measured_ms"])
        hits += best in sorted(mine, key=lambda row: row["predicted_ms"])[:TOP]
    errors = [abs(row["error"]) for row in rows]
    return {"median_error": statistics.median(errors), "largest": max(errors), "hits": hits, "cases": len(cases)}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A Markdown table, and the verdict."""
    print("| case | algorithm | measured ms | predicted ms | error |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['case']} | {row['algorithm']} | {row['measured_ms']:.0f} | {row['predicted_ms']:.0f} | "
            f"{row['error']:+.0%} |"
        )
    found = verdict(rows)
    print(
        f"\nmedian error {found['median_error']:.1%}, largest {found['largest']:.0%}; the measured best among the "
        f"predicted best {TOP} in {found['hits']} of {found['cases']} cases"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cases", nargs="+", default=list(CASES), metavar="MODEL@NETWORK")
    options.add_argument("--steps", type=int, default=12, help="to record")
    options.add_argument("--seconds", type=float, default=8.0)
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--warm-up", type=int, default=2)
    options.add_argument("--profiles", type=Path, default=Path("advise-profiles"), help="folder; recorded if not there")
    options.add_argument("--save", type=Path, default=Path("advise-measured.json"))
    options.add_argument("--read", type=Path, help="measured before: only predicts")
    options.add_argument("--raw", action="store_true", help="predict from the profile as it was recorded")
    given = options.parse_args()
    measured: dict[str, dict[str, float]] = json.loads(given.read.read_text()) if given.read else {}
    rows: list[dict[str, Any]] = []
    for case in list(measured) or given.cases:
        model, _, network = case.partition("@")
        file = given.profiles / f"{model}.json"
        profile = StepProfile.load(file) if file.exists() else record_model(model, given.profiles, given.steps)
        if case not in measured:
            measured[case] = measure_case(model, network, given.seconds, given.rounds, given.warm_up)
            given.save.write_text(json.dumps(measured, indent=1))
        alone = measured[case][ALONE]
        print(
            f"{case}: without communication {alone * 1e3:.0f} ms, recorded {profile.compute_s * 1e3:.0f}",
            file=sys.stderr,
        )
        slower = 1.0 if given.raw else alone / profile.compute_s
        rows += compare(case, measured[case], at_load(profile, slower))
    show(rows)


if __name__ == "__main__":
    main()
