"""Section: the time of a training step beside DDP with NCCL, in turns in the same processes; two ranks, one card."""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

from gpu import training_rank
from gpu.engine_run import run_ranks
from gpu.findings import Findings, section
from gpu.section_options import options

# (width, layers, batch): 4 MiB in many small tensors, 64 MiB, 512 MiB of parameters
MODELS = ((256, 16, 256), (1024, 16, 512), (2896, 16, 512))
REHEARSED = ((32, 4, 8),)
ROUTES = (("flat", ((0,), (1,))), ("staged", ((0,), (1,))))
APART = 1e-4


def work(findings: Findings, given: Any) -> None:
    """Every model by every route."""
    begun = time.monotonic()
    models = MODELS if given.device == "cuda" else REHEARSED
    for index, (route, hosts) in enumerate(ROUTES):
        share = (given.seconds - (time.monotonic() - begun)) / (len(ROUTES) - index)
        with findings.guarded(route):
            take = functools.partial(tell, findings, route)
            limit_s = max(10.0, share)
            found = run_ranks(training_rank.step_times, hosts, given.device, route, limit_s, partly=take, models=models)
            take(found)
            if len(found[0]) < len(models):
                findings.note(f"{route}: time did not suffice for the largest models.")


def tell(findings: Findings, route: str, found: list[Any]) -> None:
    """Checks and rows of all models."""
    for index, one in enumerate(found[0]):
        tell_one(findings, route, one, max(rank[index]["apart"] for rank in found if index < len(rank)))


def tell_one(findings: Findings, route: str, one: dict[str, Any], apart: float) -> None:
    """A check and a row of one model."""
    seconds, mib = one["seconds"], one["bytes"] / 2**20
    findings.check(f"{route}, {mib:.0f} MiB: the same gradients as DDP's", apart <= APART, f"apart {apart:.3g}")
    findings.row(
        "step, 2 ranks",
        route=route,
        MiB=mib,
        **{"bagua ms": seconds["bagua"] * 1e3, "DDP ms": seconds["ddp"] * 1e3, "alone ms": seconds["alone"] * 1e3},
        **{"times DDP's": seconds["bagua"] / seconds["ddp"]},
    )


if __name__ == "__main__":
    sys.exit(section("step", work, options(__doc__)))
