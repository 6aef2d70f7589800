"""Section: what torch offers beside a plain step: bf16, autocast, scaled gradients, graphs, expandable segments."""

from __future__ import annotations

import sys
import time
from typing import Any

from gpu import features_rank
from gpu.engine_run import over_bagua_net, run_ranks
from gpu.findings import Findings, section
from gpu.section_options import options

HOSTS = ((0,), (1,))
APART = {"bf16 parameters": 0.1}
USUALLY_APART = 0.02
"""By the way that the parameters went: without an exchange it is 0.27, with a sum for the mean 0.61."""
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def tell_precisions(findings: Findings, name: str, found: list[dict[str, Any]], modes: tuple[str, ...]) -> None:
    """Checks of what all ranks found."""
    for mode in modes:
        ranks = [one[mode] for one in found]
        same = all(bool((one["weights"] == ranks[0]["weights"]).all()) for one in ranks)
        worst = max(one["apart"] for one in ranks)
        findings.check(f"{name}, {mode}: the same parameters on all ranks", same)
        findings.check(
            f"{name}, {mode}: as one process that sees all batches",
            worst <= APART.get(mode, USUALLY_APART),
            f"apart {worst:.3g}",
        )
        if mode.endswith("scaled"):
            scales = [one["scale"] for one in ranks]
            wanted = [features_rank.SCALE / 2] * len(ranks)
            findings.check(f"{name}, {mode}: all ranks left out the infinite step", scales == wanted, str(scales))


def tell_graphs(findings: Findings, found: list[dict[str, Any]]) -> None:
    """A captured step is refused with words; captured passes train."""
    for rank, one in enumerate(found):
        words = one["refusal"]
        findings.check(f"rank {rank}: capture of a whole step is refused with words", "CUDA graph" in words, words)
        findings.check(
            f"rank {rank}: captured passes train as plain ones", one["apart"] <= USUALLY_APART, f"{one['apart']:.3g}"
        )
        findings.note(f"rank {rank}, the step after the refused capture: {one['after'] or 'as before'}")


def work(findings: Findings, given: Any) -> None:
    """Each part in ranks of its own."""
    begun = time.monotonic()

    def limit(parts_left: int) -> float:
        return max(12.0, (given.seconds - (time.monotonic() - begun)) / parts_left)

    modes = features_rank.MODES
    with findings.guarded("flat over Bagua-Net"):
        also = over_bagua_net(given.device)
        found = run_ranks(features_rank.precisions, HOSTS, given.device, "flat", limit(4), also=also, modes=list(modes))
        tell_precisions(findings, "flat over Bagua-Net", found, modes)
    with findings.guarded("staged"):
        found = run_ranks(features_rank.precisions, HOSTS, given.device, "staged", limit(3), modes=list(modes))
        tell_precisions(findings, "staged", found, modes)
    for route in ("flat", "staged"):
        with findings.guarded(f"expandable segments, {route}"):
            found = run_ranks(
                features_rank.precisions, HOSTS, given.device, route, limit(2), also=EXPANDABLE, modes=["float32"]
            )
            tell_precisions(findings, f"expandable segments, {route}", found, ("float32",))
            if given.device == "cuda":
                used = all(one["expandable"] for one in found)
                findings.check(f"expandable segments, {route}: torch uses them", used)
    if given.device != "cuda":
        findings.note("CUDA graphs: nothing can be captured without a GPU.")
        return
    with findings.guarded("CUDA graphs"):
        tell_graphs(findings, run_ranks(features_rank.graphs, HOSTS, given.device, "flat", limit(1)))


if __name__ == "__main__":
    sys.exit(section("features", work, options(__doc__)))
