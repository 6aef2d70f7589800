"""Section: torch.distributed's backend "bagua" on CUDA tensors: operations, DDP and FSDP2 against one process."""

import os
import sys
import tempfile

from gpu import c10d_rank
from gpu.engine_run import run_ranks
from gpu.findings import section

APART = 1e-5
BACKENDS = ("bagua", "cpu:bagua,cuda:nccl")


def work(findings, given):
    for backend in BACKENDS:
        if given.device != "cuda" and "nccl" in backend:
            findings.note(f"{backend}: a rehearsal has no NCCL.")
            continue
        with findings.guarded(backend), tempfile.TemporaryDirectory() as folder:
            also = {"NCCL_SOCKET_IFNAME": "lo"} if "nccl" in backend else {}  # the ranks share a card
            found = run_ranks(
                c10d_rank.check,
                ((0, 1),),
                given.device,
                "staged",
                given.seconds / len(BACKENDS),
                also=also,
                backend=backend,
                store=os.path.join(folder, "store"),
            )
            for rank, one in enumerate(found):
                findings.check(f"{backend}, rank {rank}: operations", not one["wrong"], str(one["wrong"]))
                for model, apart in one["apart"].items():
                    good = isinstance(apart, float) and apart <= APART
                    findings.check(f"{backend}, rank {rank}: {model} as one process", good, str(apart))


if __name__ == "__main__":
    sys.exit(section("c10d", work, __doc__))
