"""The socket between a service and the process that started it. It carries short messages; it ends with the process.

Messages are JSON documents, one per packet. Only the two processes have the socket: nothing of it has a name.
"""

from __future__ import annotations

import json
import socket
from typing import Any

MAX_BYTES = 64 << 10
# Variables with settings of a service that runs elsewhere: services that we start must not meet it.
FOREIGN_SETTINGS = (
    *("BAGUA_COORDINATOR", "BAGUA_DATABASE_URL", "BAGUA_STATE_DIR"),
    *("BAGUA_TOKEN", "BAGUA_TOKEN_FILE", "BAGUA_TLS"),
)
# Beside the daemon's socket for ranks: processes of an ephemeral cluster's host show there that they live, and ask for
# jobs.
CLUSTER_SOCKET = "cluster.sock"
# From rank 0 of several hosts: it has joined the job of that id, which may outlast this host's processes.
JOINED = "joined"
SLOTS = 4_096  # Slots of each node of an ephemeral cluster: more than all worlds need that a program may begin


def pair() -> tuple[socket.socket, socket.socket]:
    """Returns (the starter's end, the service's end)."""
    # SEQPACKET keeps the bounds of messages, and ends with the process.
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: dict[str, Any]) -> None:
    """Raises OSError if the other process has gone."""
    end.sendall(json.dumps(message).encode())


def receive(end: socket.socket) -> dict[str, Any] | None:
    """The next message; None when the other process has gone. Waits."""
    try:
        data = end.recv(MAX_BYTES)
    except ConnectionResetError:  # the other process closed its end with words unread
        return None
    message: dict[str, Any] | None = json.loads(data) if data else None
    return message
