"""Section: torch.distributed's backend "bagua" on CUDA tensors: operations, DDP and FSDP2 against one process."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

from gpu import c10d_rank
from gpu.engine_run import run_ranks
from gpu.findings import Findings, section
from gpu.section_options import options

APART = 1e-5
CASES = (("cpp", "bagua"), ("python", "bagua"), ("cpp", "cpu:bagua,cuda:nccl"))
"""(implementation, what init_process_group is called with)"""


def work(findings: Findings, given: Any) -> None:
    """Each implementation in ranks of its own."""
    for implementation, backend in CASES:
        if given.device != "cuda" and "nccl" in backend:
            findings.note(f"{backend}: a rehearsal has no NCCL.")
            continue
        name = f"{backend}, {implementation}"
        with findings.guarded(name), tempfile.TemporaryDirectory() as folder:
            also = {"BAGUA_C10D": implementation}
            if "nccl" in backend:  # the ranks share a card
                also["NCCL_SOCKET_IFNAME"] = "lo"
            found = run_ranks(
                c10d_rank.check,
                ((0, 1),),
                given.device,
                "staged",
                given.seconds / len(CASES),
                also=also,
                backend=backend,
                store=os.path.join(folder, "store"),
            )
            for rank, one in enumerate(found):
                findings.check(f"{name}, rank {rank}: operations", not one["wrong"], str(one["wrong"]))
                for model, apart in one["apart"].items():
                    good = isinstance(apart, float) and apart <= APART
                    findings.check(f"{name}, rank {rank}: {model} as one process", good, str(apart))


if __name__ == "__main__":
    sys.exit(section("c10d", work, options(__doc__)))
