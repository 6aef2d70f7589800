"""Section: a rank is killed in an all-reduce. The others are freed and say why, soon; nothing stays on the card."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rig.engine_hosts import make_ranks
from rig.placing import environment

from gpu import machine, training_rank
from gpu.engine_run import over_bagua_net
from gpu.findings import Findings, section
from gpu.section_options import options

VICTIM = 1
SOON_S = 5.0
LEFT_MIB = 8
SETTLE_S = 5.0
CASES = (
    ("flat", False, ((0, 1, 2),)),
    ("flat", True, ((0,), (1,), (2,))),
    ("hierarchical", False, ((0, 1), (2, 3))),
    ("staged", False, ((0, 1), (2,))),
)
"""(route, whether NCCL goes over Bagua-Net, ranks of each host)"""


def one_case(findings: Findings, device: str, case: Any, limit_s: float) -> None:
    """One kill: who was freed with which words, how soon, and what is left."""
    route, over_plugin, hosts = case
    name = f"{route}{' over Bagua-Net' if over_plugin else ''}, {' + '.join(str(len(host)) for host in hosts)}"
    before = machine.memory_used_mib() if device == "cuda" else None
    count = 64 << 20 if device == "cuda" else 1 << 20  # takes a while: the kill comes in the middle
    with tempfile.TemporaryDirectory() as folder, make_ranks(Path(folder)) as ranks:
        started = ranks.start(
            training_rank.until_killed,
            hosts=hosts,
            environment={**environment(device, route), **(over_bagua_net(device) if over_plugin else {})},
            kind=device,
            count=count,
            victim=VICTIM,
            after=3,
        )
        ranks.wait(limit_s)
        killed = float(started[VICTIM].output.partition("KILLED ")[2].split()[0])
        for rank in started:
            if rank.rank == VICTIM:
                continue
            found = rank.result()
            seconds = found["when"] - killed
            findings.check(
                f"{name}, rank {rank.rank}: freed within {SOON_S:.0f} s", seconds <= SOON_S, f"{seconds:.2f} s"
            )
            findings.check(
                f"{name}, rank {rank.rank}: says why", f"rank {VICTIM}" in found["error"], found["error"][:300]
            )
            findings.row("from the kill to the error", case=name, rank=rank.rank, s=seconds)
    if before is not None:
        nothing_left(findings, name, before)


def nothing_left(findings: Findings, name: str, before: int) -> None:
    """The card's memory is what it was. The driver takes a moment to clear up after a process."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        after = machine.memory_used_mib()
        if after is None or after <= before + LEFT_MIB or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    ok = after is not None and after <= before + LEFT_MIB
    findings.check(f"{name}: nothing is left on the card", ok, f"{before} MiB before, {after} MiB after")


def work(findings: Findings, given: Any) -> None:
    """All cases."""
    begun = time.monotonic()
    if given.device == "cuda" and machine.memory_used_mib() is None:
        findings.note("nvidia-smi does not say how much memory is used: what is left on the card was not looked at.")
    for index, case in enumerate(CASES):
        share = (given.seconds - (time.monotonic() - begun)) / (len(CASES) - index)
        with findings.guarded(str(case)):
            one_case(findings, given.device, case, max(10.0, share))


if __name__ == "__main__":
    sys.exit(section("faults", work, options(__doc__)))
