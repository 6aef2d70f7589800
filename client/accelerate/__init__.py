"""Hugging Face Accelerate and Trainer on backend "bagua" of ``torch.distributed``: ``import bagua.accelerate`` first.

Both know a closed list of backends, but take a process group that is up already. So the import of this module brings it
up, on the ranks that ``bagua run``, ``accelerate launch`` or torchrun has started. A script need not even be changed:

    bagua run --nproc-per-node 2 -m bagua.accelerate train.py
    accelerate launch --multi_gpu --num_processes 2 -m bagua.accelerate train.py
"""

from __future__ import annotations

from typing import Any

from bagua.accelerate.init import begin
from bagua.accelerate.reports import report_callback

__all__ = ["BaguaReport", "begin"]


def __getattr__(name: str) -> Any:
    """``BaguaReport``, made when it is asked for: transformers takes seconds to import."""
    if name != "BaguaReport":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return report_callback()


begin()
