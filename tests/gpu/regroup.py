"""Section: an elastic job loses a rank in a training step. How soon do the others go on, and with right results?"""

import itertools
import sys
import tempfile
import time
from pathlib import Path

import torch
from rig.ranks.engine_hosts import make_ranks
from rig.ranks.placing import environment

from gpu import regroup_rank
from gpu.common import median
from gpu.faults import killed_at
from gpu.findings import section

HOSTS = ((0, 1), (2,))
VICTIM, WAITER = 1, 2
CUT, STEPS = 6, 12
TARGET_S = 1.0
"""From the kill to the end of the step that it cut off, which the others have repeated."""
APART = 1e-3
SIZE, REHEARSED = (1448, 12, 128), (32, 4, 8)  # width, layers, batch; 96 MiB of parameters
SEVERAL_BUCKETS = {"BAGUA_DEFAULT_BUCKET_SIZE": "5000"}  # where the model is small
AFTER_S = 10.0
"""More than the others need to come to their end: a hang costs no more than this."""
ROUTES = ("flat", "staged")


def run(findings, name, given, route, limit_s, function, **more):
    """Returns when the victim was killed, and the results of the others."""
    real = given.device == "cuda"
    with tempfile.TemporaryDirectory() as folder, make_ranks(Path(folder)) as ranks:
        ranks.start(
            function,
            hosts=HOSTS,
            elastic=True,
            environment=environment(given.device, route) | ({} if real else SEVERAL_BUCKETS),
            kind=given.device,
            size=SIZE if real else REHEARSED,
            victim=VICTIM,
            **more,
        )
        killed = killed_at(ranks, limit_s - AFTER_S)
        ranks.wait(AFTER_S + limit_s / 4)
        return killed, [one.result() for one in ranks.started if one.rank != VICTIM]


def step_is_repeated(findings, given, route, limit_s):
    """All gradients are averaged in each step."""
    killed, found = run(findings, route, given, route, limit_s, regroup_rank.loses_one, cut=CUT, steps=STEPS)
    worlds = [3] * CUT + [2] * (STEPS - CUT)
    for one in found:
        findings.check(
            f"{route}: the step counts with those that are left", one["worlds"] == worlds, str(one["worlds"])
        )
        findings.check(
            f"{route}: as one process with their batches", one["apart"] <= APART, f"apart {one['apart']:.3g}"
        )
    same = all(torch.equal(one["parameters"], found[0]["parameters"]) for one in found)
    findings.check(f"{route}: the same parameters on all ranks", same)
    pause = max(one["ended"][CUT + 1] for one in found) - killed
    lasted = [after - before for before, after in itertools.pairwise(found[0]["ended"])]
    findings.row(
        "from the kill to the end of the repeated step",
        route=route,
        s=pause,
        target="met" if pause <= TARGET_S else "missed",
        **{"a step before, ms": median(lasted[2:CUT]) * 1e3, "the step after, ms": lasted[CUT + 1] * 1e3},
    )


def averages_go_on(findings, given, route, limit_s):
    """Weights are averaged in the background; one rank is in a barrier when another one is lost."""
    name = f"{route}, asynchronous averages"
    killed, found = run(findings, name, given, route, limit_s, regroup_rank.averages, waiter=WAITER, steps=5)
    for one in found:
        findings.check(f"{name}: averages go on with those that are left", one["world"] == 2 and one["finite"])
    met = max(one["met"] for one in found) - killed
    findings.row("asynchronous averages: from the kill to the end of a barrier", route=route, s=met)


def work(findings, given):
    begun = time.monotonic()
    cases = [(case, route) for case in (step_is_repeated, averages_go_on) for route in ROUTES]
    for index, (case, route) in enumerate(cases):
        share = (given.seconds - (time.monotonic() - begun)) / (len(cases) - index)
        with findings.guarded(f"{case.__name__}, {route}"):
            case(findings, given, route, max(20.0, share))
    findings.note(f"Target: {TARGET_S} s from the kill to the end of the step. All ranks share the card.")


if __name__ == "__main__":
    sys.exit(section("regroup", work, __doc__))
