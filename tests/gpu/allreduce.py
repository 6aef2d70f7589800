"""Section: the engine's all-reduce on one card, by every route, between ranks of one host and of several; its results
against float64 and from rank to rank, its time beside plain NCCL's in the same processes."""

from __future__ import annotations

import functools
import sys
import time
from dataclasses import dataclass

from gpu import allreduce_rank
from gpu.engine_run import run_ranks
from gpu.findings import section

SIZES = [4 << 10, 256 << 10, 4 << 20, 64 << 20, 256 << 20]
REHEARSED = [4 << 10, 256 << 10]
TARGET = 1.02  # times plain NCCL, of the flat route


@dataclass(frozen=True)
class World:
    route: str
    hosts: tuple[tuple[int, ...], ...]
    codecs: tuple[str, ...] = ("none",)

    @property
    def name(self):
        return f"{self.route}, {len(self.hosts)} x {len(self.hosts[0])}"


ENCODED = ("none", "minmax8", "fp16", "bf16", "fp8_e4m3", "int4", "onebit")
WORLDS = (
    World("flat", ((0, 1),)),
    World("staged", ((0, 1),)),
    World("flat", ((0,), (1,)), ENCODED),
    World("hierarchical", ((0, 1), (2, 3)), ENCODED),
    World("staged", ((0,), (1,)), ENCODED),
)


def tell(findings, world, found):
    for codec in world.codecs if found[0]["errors"] else ():
        worst = max(one["errors"][count][codec] for one in found for count in one["errors"])
        bound = allreduce_rank.BOUNDS[codec]
        findings.check(f"{world.name}, {codec}: result", worst <= bound, f"relative error {worst:.3g}, 9: bits differ")
    for codec, sizes in found[0]["seconds"].items():
        for size, seconds in sizes.items():
            ratio = seconds["bagua"] / seconds["nccl"]
            judged = world.route == "flat" and codec == "none"
            findings.row(
                "all-reduce beside NCCL",
                world=world.name,
                codec=codec,
                bytes=int(size),
                **{"bagua us": seconds["bagua"] * 1e6, "nccl us": seconds["nccl"] * 1e6, "times NCCL's": ratio},
                target=("met" if ratio <= TARGET else "missed") if judged else "",
            )


def work(findings, given):
    begun = time.monotonic()
    sizes = SIZES if given.device == "cuda" else REHEARSED
    for index, world in enumerate(WORLDS):
        share = (given.seconds - (time.monotonic() - begun)) / (len(WORLDS) - index)
        with findings.guarded(world.name):
            take = functools.partial(tell, findings, world)
            found = run_ranks(
                allreduce_rank.measure,
                world.hosts,
                given.device,
                world.route,
                max(12.0, share),
                partly=take,
                sizes=sizes,
                codecs=list(world.codecs),
            )
            take(found)
            if len(found[0]["seconds"].get("none", ())) < len(sizes):
                findings.note(f"{world.name}: time did not suffice for the largest vectors.")
    findings.note(f"Target of the flat route: {TARGET} times plain NCCL's time. All ranks share the card.")


if __name__ == "__main__":
    sys.exit(section("allreduce", work, __doc__))
