"""``python -m bagua.daemon.ephemeral``: the cluster behind scripts that torchrun or torch.multiprocessing started.

The first rank starts this process in a session of its own. It holds the coordinator, and has one node daemon as a
child. It submits a job whose ranks join by themselves, and tells the rank the daemon's socket and the job.

The cluster serves as many such jobs as its processes ask for, one after the other or at once, and ends with the last of
these processes on this host (``users.py``). With several hosts the first host's cluster admits the others
(``admission.py``); their messages travel through the rank. Then it stays until none of their jobs can still run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import socket
from types import FrameType
from typing import TYPE_CHECKING

# Before gRPC is imported: its own log has a line for each handshake of TLS that fails.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from bagua.base import parent_socket
from bagua.base.errors import BaguaError
from bagua.base.run_folder import RunFolder
from bagua.daemon.ephemeral.node_process import NodeProcess

if TYPE_CHECKING:
    from bagua.daemon.ephemeral.admission import Admission


def main() -> None:
    """Ends with code 1 if the cluster can't start, or a part of it ends; the rank is told why."""
    gc.disable()  # what is imported stays: collections would only look at it. ``serve`` turns it on again
    _survive_terminal()
    parser = argparse.ArgumentParser()
    for name, kind in (("leash", int), ("nnodes", int), ("nproc-per-node", int), ("context", str)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--master-addr", default="127.0.0.1")
    given = parser.parse_args()
    starter = socket.socket(fileno=given.leash)
    try:
        admission = None
        if given.nnodes > 1:
            from bagua.daemon.ephemeral.admission import Admission

            admission = Admission(given.nnodes, given.master_addr, given.context)
        _run(starter, given.nnodes, given.nproc_per_node, admission)
    except BaguaError as error:
        try:
            parent_socket.send(starter, {"error": str(error)})
        except OSError:
            pass  # the rank has gone
        raise SystemExit(f"error: {error}") from None


def _survive_terminal() -> None:
    """The process that started us may end before the other ranks are done; a SIGTERM ends us in good order."""

    def stop(number: int, _: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: the end must not be interrupted
        raise SystemExit(128 + number)

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop)


def _run(starter: socket.socket, nnodes: int, nproc_per_node: int, admission: Admission | None) -> None:
    """Runs the cluster. Raises ServiceError, ConfigError."""
    state = RunFolder()
    try:
        with NodeProcess(state.path, admission) as node:
            # The coordinator's modules take longer than the start of the daemon, which goes on beside.
            from bagua.daemon.coordinator.host.event_loop import EventLoop
            from bagua.daemon.ephemeral.cluster import Cluster

            with asyncio.Runner(loop_factory=EventLoop) as runner:
                runner.run(Cluster(state.path, node, nnodes, admission).serve(starter, nproc_per_node))
    finally:
        state.remove()


if __name__ == "__main__":
    main()
