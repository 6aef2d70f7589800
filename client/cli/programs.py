"""Commands that are programs of their own, with their own options: ``bagua daemon`` becomes
``python -m bagua.daemon.node``."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True)
class Program:
    """``about``: its line in the help of ``bagua``."""

    module: str
    about: str

    def become(self, arguments: list[str]) -> NoReturn:
        """Signals, exit code and --help are that program's own from here on."""
        # -P: a folder named like one of our packages in the working directory must not shadow it.
        os.execv(sys.executable, [sys.executable, "-P", "-m", self.module, *arguments])


PROGRAMS = {
    "coordinator": Program("bagua.daemon.coordinator", "Serves a coordinator: one per cluster."),
    "daemon": Program("bagua.daemon.node", "Serves a node daemon: one per host."),
    "certs": Program("bagua.daemon.certs", "Makes certificates for a cluster beyond one machine."),
    "operator": Program("bagua.operator", "Serves BaguaJobs of a Kubernetes cluster."),
    "convert-manifest": Program(
        "bagua.operator.convert", "Makes BaguaJobs out of the original's manifests of kind Bagua."
    ),
}
