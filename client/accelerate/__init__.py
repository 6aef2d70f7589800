"""Hugging Face Accelerate and Trainer on backend "bagua" of ``torch.distributed``: ``import bagua.accelerate`` first.

Both know a closed list of backends, but take a process group that is up already. So the import of this module brings it
up, on the ranks that ``bagua run``, ``accelerate launch`` or torchrun has started. A script need not even be changed:

    bagua run --nproc-per-node 2 -m bagua.accelerate train.py
    accelerate launch --multi_gpu --num_processes 2 -m bagua.accelerate train.py
"""

from bagua.accelerate.beginning import begin
from bagua.accelerate.reports import __getattr__

__all__ = ["BaguaReport", "begin"]

begin()
