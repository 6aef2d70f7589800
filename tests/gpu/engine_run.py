"""Starts ranks of a section on real engines in the section's process, as the tests of the repository do."""

import os
import tempfile
from pathlib import Path

from rig.ranks.engine_hosts import make_ranks
from rig.ranks.placing import environment

import bagua.csrc
from bagua.base.net_plugin import variables
from gpu.common import KEPT, free_port, kept


def over_bagua_net(device):
    """Variables that send NCCL's traffic through the network plugin; none where there is no NCCL. Raises BuildError."""
    return variables(bagua.csrc.net_plugin(), os.environ) if device == "cuda" else {}


def run_ranks(function, hosts, device, route, limit_s, *, also=None, partly=None, **more):
    """Results of ``function`` in all ranks. It gets ``kind`` (the device), ``port`` (a free one) and ``limit_s``
    beside ``more``. ``also``: more variables of the ranks. Raises what the rig raises, with the ranks' outputs; before
    that ``partly`` gets what the ranks kept."""
    with tempfile.TemporaryDirectory() as name, make_ranks(Path(name)) as ranks:
        folder = Path(name)
        merged = {**environment(device, route), KEPT: str(folder), **(also or {})}
        ranks.start(function, hosts=hosts, environment=merged, kind=device, port=free_port(), limit_s=limit_s, **more)
        try:
            ranks.wait(limit_s)
            return [rank.result() for rank in ranks.started]
        except BaseException:  # pytest.fail of the rig is no Exception
            found = kept(folder, len(ranks.started))
            if partly and found:
                partly(found)
            raise
