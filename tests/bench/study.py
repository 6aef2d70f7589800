#!/usr/bin/env python3
"""The study of docs/study.md: which algorithm pays on which network with how many hosts. Writes results and pictures.

    python tests/bench/study.py                               # from the recorded profiles and measurements: a minute
    python tests/bench/study.py --record --models mlp resnet  # records profiles on this machine first
    python tests/bench/study.py --measure --seconds 20        # measures again between two emulated hosts; needs root

``results.json`` has every algorithm and codec of ``bagua advise`` on every network with every number of hosts;
``table.md`` joins step times with the accuracy of docs/accuracy.md; ``many.md`` has all-reduces of several emulated
hosts beside the model. The recordings lie in ``tradeoff/recorded.tar.xz`` and are unpacked to ``build/recorded``.
"""

import argparse
import json
import sys
import tarfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # whatever PYTHONSAFEPATH says

import advise
from tradeoff import grid as grids
from tradeoff import many, pictures, table

from bagua.tuning.profile import StepProfile

ARCHIVE = Path(__file__).parent / "tradeoff" / "recorded.tar.xz"
RECORDED = Path("build/recorded")
MEASURED = RECORDED / "measured.json"
MANY = RECORDED / "allreduce"
MODELS = ("mlp", "resnet", "transformer", "tiny")
CASES = tuple(f"{model}@{network}" for model in MODELS[:2] for network in ("1gbit", "1gbit,5ms", "100mbit"))
ROUNDS, WARM_UP, RECORDED_STEPS = 4, 2, 12


def unpack():
    """Unpacks the recordings for docs/study.md into a folder."""
    if not RECORDED.exists():
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(RECORDED.parent, filter="data")


def profiles_of(models, folder, record):
    """By model; ``record``: anew, into the folder."""
    found = {}
    for model in models:
        file = folder / f"{model}.json"
        found[model] = advise.record_model(model, folder, RECORDED_STEPS) if record else StepProfile.load(file)
    return found


def compare(measured, profiles):
    """A row for each measured step time with its prediction."""
    return [
        row
        for case, times in measured.items()
        if case.partition("@")[0] in profiles
        for row in advise.compare(case, times, profiles[case.partition("@")[0]])
    ]


def measure(cases, seconds, file):
    """Step times between two emulated hosts, into the file after each case."""
    times = {}
    for case in cases:
        times[case] = advise.measure_case(case, seconds, ROUNDS, WARM_UP)
        file.write_text(json.dumps(times))


def parse():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("build/study"), help="folder for results and pictures")
    options.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL")
    options.add_argument("--profiles", type=Path, default=RECORDED, help="folder of step profiles")
    options.add_argument("--record", action="store_true", help="record the profiles now, into --profiles")
    options.add_argument("--measured", type=Path, default=MEASURED, help="step times that were measured")
    options.add_argument("--measure", action="store_true", help="measure --cases now, into --measured")
    options.add_argument("--cases", nargs="+", default=list(CASES), metavar="MODEL@NETWORK[@HOSTS]")
    options.add_argument("--seconds", type=float, default=20.0, help="for each case, about")
    options.add_argument(
        "--many", type=Path, default=MANY, help="folder of reports of bagua bench allreduce --save with several hosts"
    )
    options.add_argument("--small", action="store_true", help="a corner of the grid, as tests draw it")
    return options.parse_args()


def main():
    given = parse()
    unpack()
    grid = grids.Grid(grids.RATES[:3], grids.DELAYS[:2], grids.HOSTS[:2]) if given.small else grids.Grid()
    given.out.mkdir(parents=True, exist_ok=True)
    profiles = profiles_of(given.models, given.profiles, given.record)
    if given.measure:
        measure(given.cases, given.seconds, given.measured)
    pictures.draw_all(profiles, grid, given.out)
    rows = []
    if given.measured.exists():
        rows = compare(json.loads(given.measured.read_text()), profiles)
        pictures.measured(rows, given.out / "study-measured.png")
        advise.show(rows)
    (given.out / "table.md").write_text(table.joined(profiles["resnet" if "resnet" in profiles else given.models[0]]))
    if given.many.is_dir():
        (given.out / "many.md").write_text(many.table(given.many, next(iter(profiles.values())).speeds))
    found = grids.results(profiles, grid) | {"measured": rows}
    (given.out / "results.json").write_text(json.dumps(found))
    print(f"{len(found['cells'])} cells, pictures and tables: {given.out}")


if __name__ == "__main__":
    main()
