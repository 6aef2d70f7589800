"""Section: as ``net``, with both ranks in one process, so that their kernels run on the card at the same time."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rig.ranks.placing import environment as environment_of

from gpu.common import run_beside
from gpu.findings import Findings, section
from gpu.net import in_turns
from gpu.net_pair_ranks import MARK
from gpu.section_options import options

TABLE = "all-reduce, 2 ranks on one card, in one process"


def one_turn(environment: dict[str, str], device: str, sizes: list[int], limit_s: float) -> tuple[dict[str, Any], str]:
    """The measured rows, and the printed output."""
    # A module that is loaded late may wait for a kernel that waits for this one.
    environment = {**environment, "CUDA_MODULE_LOADING": "EAGER"}
    if device != "cuda":
        environment |= environment_of("fake")
    with tempfile.TemporaryDirectory() as folder:
        words = ["--seconds", f"{limit_s:.0f}", "--folder", folder, "--sizes", *map(str, sizes)]
        (output,) = run_beside("gpu.net_pair_ranks", environment, [words], limit_s + 15, Path(folder))
    found = json.loads(output.partition(MARK)[2].splitlines()[0])
    return {**found, "seconds": {int(size): seconds for size, seconds in found["seconds"].items()}}, output


def work(findings: Findings, given: Any) -> None:
    """Both networks in turns."""
    in_turns(findings, given, TABLE, one_turn)


if __name__ == "__main__":
    sys.exit(section("net_pair", work, options(__doc__)))
