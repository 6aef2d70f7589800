"""Section: does the host wait for the card in a training step? Counted three ways: calls of the CUDA runtime in a
profile, torch's own debug mode (which raises where torch waits), and the GPU leg's counter. The profile also tells in
which calls of CUDA the time goes that the host needs to hand over a bucket."""

from __future__ import annotations

import sys
from typing import Any

from gpu import training_rank
from gpu.engine_run import run_ranks
from gpu.findings import Findings, section
from gpu.section_options import options

STEPS = 20
MADE = 2  # the leg counts what it has to make, too: memory that is not given back in time, once in a while


def work(findings: Findings, given: Any) -> None:
    """By each route."""
    width, layers, batch = (1024, 8, 256) if given.device == "cuda" else (32, 2, 8)
    for route in ("flat", "staged"):
        with findings.guarded(route):
            found = run_ranks(
                training_rank.profiled,
                ((0,), (1,)),
                given.device,
                route,
                given.seconds / 2,
                width=width,
                layers=layers,
                batch=batch,
                steps=STEPS,
            )
            for name, (count, us) in sorted(found[0]["submit"].items(), key=lambda item: -item[1][1]):
                what = name or "all, CUDA and others"
                findings.row("to hand over a bucket, in a profile", route=route, what=what, calls=count, us=us)
            for rank, one in enumerate(found):
                findings.row(
                    f"waits in {STEPS} steps", route=route, rank=rank, waits=sum(one["waits"].values()), leg=one["leg"]
                )
                if given.device == "cuda":
                    findings.check(
                        f"{route}, rank {rank}: the profile sees the CUDA runtime", one["runtime_calls"] > STEPS
                    )
                findings.check(f"{route}, rank {rank}: the host never waits", not one["waits"], str(one["waits"]))
                findings.check(f"{route}, rank {rank}: the leg makes nothing new", one["leg"] <= MADE, str(one["leg"]))


if __name__ == "__main__":
    sys.exit(section("waits", work, options(__doc__)))
