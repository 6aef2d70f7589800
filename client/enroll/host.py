"""``python -m bagua.enroll.host``: joins this host to an ephemeral cluster, then becomes its node daemon.

The first rank of the host starts it, and carries its messages to the first host and back (``base/parent_socket.py``).
"""

from __future__ import annotations

import argparse
import os
import socket
import sys

from bagua.base import parent_socket
from bagua.base.address import own_address
from bagua.base.errors import BaguaError, ServiceError
from bagua.base.paths import make_private_dir, write_private
from bagua.base.run_folder import RunFolder
from bagua.base.security import TlsFiles
from bagua.enroll import secret
from bagua.enroll.exchange import Applicant, Grant


def main() -> None:
    """Ends with code 1 if the rank that started it ends before, or if the host can't join; the rank is told why."""
    parser = argparse.ArgumentParser()
    for name, kind in (("leash", int), ("host", int), ("context", str), ("master-addr", str)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    given = parser.parse_args()
    rank = socket.socket(fileno=given.leash)
    try:
        key = secret.find_key(given.master_addr)
        secret.remove_from_environment()
        applicant = Applicant(key, given.context, given.host)
        parent_socket.send(rank, {"hello": applicant.hello()})
        answer = parent_socket.receive(rank)
        if answer is None:
            raise ServiceError("The rank that started this process has gone. [BG910]")
        command = _prepare(applicant, applicant.finish(answer["welcome"]))
    except BaguaError as error:
        _send_error(rank, str(error))
        raise SystemExit(f"error: {error}") from None
    os.set_inheritable(rank.fileno(), True)
    ready = os.dup(rank.fileno())  # the daemon closes it after its ready line
    os.set_inheritable(ready, True)
    os.execv(sys.executable, [*command, "--leash", str(rank.fileno()), "--ready-fd", str(ready)])


def _prepare(applicant: Applicant, grant: Grant) -> list[str]:
    """Writes what the daemon needs into a folder of its own; returns the daemon's command. Raises ConfigError."""
    state = RunFolder()
    state.hand_on()  # locked as long as the daemon lives
    files = TlsFiles.in_folder(make_private_dir(state.path / "tls"))
    token = state.path / "token"
    for path, data in (
        (files.ca, grant.ca.encode()),
        (files.cert, grant.cert.encode()),
        (files.key, applicant.key_pem()),
        (token, grant.token.encode()),
    ):
        write_private(path, data)
    return [
        *(sys.executable, "-P", "-m", "bagua.daemon.node", "--coordinator", grant.coordinator),
        *("--node-id", grant.node_id, "--name", grant.node_id, "--slots", str(parent_socket.SLOTS)),
        *("--data-host", own_address(grant.coordinator), "--state-dir", str(state.path)),
        *("--token-file", str(token), "--tls", str(files.ca.parent), "--exit-when-idle", "5"),
    ]


def _send_error(rank: socket.socket, reason: str) -> None:
    try:
        parent_socket.send(rank, {"error": reason})
    except OSError:
        return  # the rank has gone


if __name__ == "__main__":
    main()
