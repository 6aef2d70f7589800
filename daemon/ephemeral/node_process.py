"""The node daemon of an ephemeral cluster's first host, as a child of this process."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bagua.base import parent_socket
from bagua.base.child_service import ServiceProcess

if TYPE_CHECKING:
    from bagua.daemon.ephemeral.admission import Admission

NAME = "node-00000"
START_DEADLINE_S = 240.0
STOP_DEADLINE_S = 4.0


class NodeProcess:
    """Starts at once, and waits for the coordinator's address. Leaving the context ends it."""

    def __init__(self, state: Path, admission: Admission | None) -> None:
        """``admission``: of other hosts, None if there are none. Raises ConfigError."""
        command = ["--coordinator", "-", "--token-file", str(state / "token"), "--state-dir", str(state / "node")]
        command += ["--name", NAME, "--node-id", NAME, "--slots", str(parent_socket.SLOTS)]
        if admission is not None:
            tls = admission.write_certificates(state / "tls")
            command += ["--tls", str(tls), "--data-host", admission.address]
        self._leash, theirs = parent_socket.pair()
        with theirs:  # closed here once the child has it: else its end would not be seen
            command += ["--leash", str(theirs.fileno())]
            log = state / "node.log"
            self._service = ServiceProcess("node daemon", "bagua.daemon.node", command, log, passed=[theirs.fileno()])

    def __enter__(self) -> NodeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def begin(self, coordinator: str) -> str:
        """Tells it the coordinator's address, and waits until it is known there; returns the path of its socket for
        ranks. Raises ServiceError with the reason why it can't start."""
        try:
            parent_socket.send(self._leash, {"coordinator": coordinator})
        except OSError:
            pass  # it has ended, and says why
        return self._service.wait_ready(time.monotonic() + START_DEADLINE_S)["socket"]

    def describe_end(self) -> str:
        """Waits for its end and says how it ended."""
        return self._service.describe_end()

    def stop(self) -> None:
        """Ends it, with the jobs that it holds. Idempotent."""
        self._service.signal_group(signal.SIGTERM)
        self._service.wait(time.monotonic() + STOP_DEADLINE_S)
        self._leash.close()
