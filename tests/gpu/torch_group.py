"""Section: could torch's NCCL process group carry the route ``flat`` in the place of the GPU leg's own communicators?
The host's time to hand over an all-reduce, the making of another group, and what comes after a killed rank."""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

from rig.ranks.engine_hosts import make_ranks
from rig.ranks.placing import environment

from gpu import torch_group_rank
from gpu.common import KEPT, free_port
from gpu.engine_run import run_ranks
from gpu.findings import Findings, section
from gpu.section_options import options

SIZES = (4 << 10, 4 << 20, 25 << 20)
HOSTS = ((0, 1, 2),)
VICTIM = 1
LEFT_ALONE = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""torch's watchdog would end the processes that are left."""


def tell(findings: Findings, table: str, found: list[Any]) -> None:
    """A row of each figure, of the slowest rank."""
    for name in found[0]:
        findings.row(table, what=name, us=max(one[name] for one in found) * 1e6)


def beside(findings: Findings, given: Any, limit_s: float) -> None:
    """Both in the same processes."""
    sizes = SIZES if given.device == "cuda" else SIZES[:1]
    take = functools.partial(tell, findings, "torch's group beside the leg")
    found = run_ranks(torch_group_rank.beside, HOSTS, given.device, "flat", limit_s, partly=take, sizes=sizes)
    take(found)
    findings.check("both were measured in all sizes", all(len(one) >= 4 * len(sizes) for one in found))


def killed(findings: Findings, given: Any, limit_s: float) -> None:
    """torch's alone."""
    with tempfile.TemporaryDirectory() as folder, make_ranks(Path(folder)) as ranks:
        ranks.start(
            torch_group_rank.loses_one,
            hosts=HOSTS,
            environment={**environment(given.device, "flat"), **LEFT_ALONE, KEPT: folder},
            kind=given.device,
            port=free_port(),
            victim=VICTIM,
            limit_s=limit_s,
        )
        survivors = [rank for rank in ranks.started if rank.rank != VICTIM]
        table = "torch's group, from the end of a killed rank"
        try:
            ranks.wait(limit_s)
            found = [rank.result() for rank in survivors]
            wrong = sum(one.pop("wrong") for one in found)
            findings.check("another group has the sum of those that are left", not wrong, f"{wrong} are wrong")
            tell(findings, table, found)
        except BaseException:  # pytest.fail of the rig is no Exception
            files = [Path(folder, f"{rank.rank}.json") for rank in survivors]
            for file in filter(Path.exists, files):
                findings.note(f"{table}: {file.read_text()}")
            raise


def work(findings: Findings, given: Any) -> None:
    """Both parts."""
    for part, share in ((beside, 0.65), (killed, 0.35)):
        with findings.guarded(part.__name__):
            part(findings, given, given.seconds * share)


if __name__ == "__main__":
    sys.exit(section("torch_group", work, options(__doc__)))
