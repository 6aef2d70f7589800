"""Section: the time of a training step beside DDP with NCCL, in turns in the same processes; two ranks, one card."""

import functools
import sys
import time

from gpu import training_rank
from gpu.engine_run import run_ranks
from gpu.findings import section

# (width, layers, batch): 4 MiB in many small tensors, 64 MiB, 512 MiB of parameters; the others: bagua bench train's
MODELS = ((256, 16, 256), "resnet", "transformer", "mlp", (1024, 16, 512), (2896, 16, 512))
REHEARSED = ((32, 4, 8), "tiny")
ROUTES = ("", "flat", "staged")  # empty: as the leg chooses
HOSTS = ((0,), (1,))
APART = 1e-3
TIE = 1.02
MADE = 2  # the leg counts what it has to make, too: memory that is not given back in time, once in a while
HOST_US = 50  # of the host for a bucket


def work(findings, given):
    begun = time.monotonic()
    models = MODELS if given.device == "cuda" else REHEARSED
    for index, route in enumerate(ROUTES):
        share = (given.seconds - (time.monotonic() - begun)) / (len(ROUTES) - index)
        name = route or "chosen"
        with findings.guarded(name):
            take = functools.partial(tell, findings, name)
            limit_s = max(10.0, share)
            found = run_ranks(training_rank.step_times, HOSTS, given.device, route, limit_s, partly=take, models=models)
            take(found)
            if len(found[0]) < len(models):
                findings.note(f"{name}: time did not suffice for the largest models.")


def tell(findings, route, found):
    for index, one in enumerate(found[0]):
        tell_one(findings, route, one, max(rank[index]["apart"] for rank in found if index < len(rank)))


def tell_one(findings, route, one, apart):
    seconds, name = one["seconds"], f"{one['model']}, {one['bytes'] / 2**20:.0f} MiB"
    findings.check(f"{route}, {name}: the same gradients as DDP's", apart <= APART, f"apart {apart:.3g}")
    findings.check(f"{route}, {name}: the leg makes nothing new in a step", one["waits"] <= MADE, str(one["waits"]))
    ratio, us = seconds["bagua"] / seconds["ddp"], {name: value * 1e6 for name, value in one["host_s"].items()}
    findings.row(
        "step, 2 ranks",
        route=route,
        model=name,
        **{"bagua ms": seconds["bagua"] * 1e3, "DDP ms": seconds["ddp"] * 1e3, "alone ms": seconds["alone"] * 1e3},
        **{"times DDP's": ratio, "target": "met" if ratio <= TIE else "missed"},
    )
    findings.row(
        "host's time in Bagua's calls, of a step",
        route=route,
        model=name,
        buckets=one["buckets"],
        **{
            "us": us["all"],
            "in submit": us["submit"],
            "in wait": us["wait"],
            "in start, with submit": us["start"],
            "in results": us["results"],
            "us a bucket": us["all"] / one["buckets"],
        },
        target="met" if us["all"] / one["buckets"] < HOST_US else "missed",
    )
    host = {name: value * 1e6 for name, value in one["host_step_s"].items()}
    findings.row(
        "host's time of a whole step",
        route=route,
        model=name,
        **{"bagua us": host["bagua"], "DDP us": host["ddp"], "alone us": host["alone"]},
        **{"times DDP's": host["bagua"] / host["ddp"]},
    )


if __name__ == "__main__":
    sys.exit(section("step", work, __doc__))
