"""Ties this process to the ephemeral cluster of its host: a socket that the kernel closes when the process ends.

The cluster stays as long as one of its processes lives, so that each further world of them begins at once: whoever is
its rank 0 asks for a job over this socket.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from bagua.base import parent_socket
from bagua.base.errors import ServiceError
from bagua.base.job_token import first_of


class Lifeline:
    """A process has one at most. ``daemon``: path of this host's daemon's socket for ranks. ``first_job``: id of the
    cluster's first job, by which its hosts know that they are of one cluster. ``host``, ``hosts``: index of this host,
    and their number."""

    held: ClassVar[Lifeline | None] = None

    def __init__(self, end: socket.socket, daemon: str, first_job: str, host: int, hosts: int) -> None:
        self.daemon = daemon
        self.first_job = first_job
        self.place = (host, hosts)
        self._end = end

    @classmethod
    def hold(cls, daemon: str, job_id: str, host: int, hosts: int, end: socket.socket | None = None) -> None:
        """Keeps the cluster in which this process joins a job from now on, and no other. ``end``: a socket to it, if
        there is one. Raises ServiceError if it has gone."""
        if cls.held is not None and cls.held.daemon == daemon:
            return
        cls.let_go()
        made = end if end is not None else _connect(daemon)
        cls.held = cls(made, daemon, first_of(job_id), host, hosts)

    @classmethod
    def let_go(cls) -> None:
        """The cluster does not stay for this process."""
        held, cls.held = cls.held, None
        if held is not None:
            held._end.close()

    @classmethod
    def at(cls, host: int, hosts: int) -> Lifeline | None:
        """The lifeline to a cluster in which this host has this place; None if there is none that lives."""
        if cls.held is None or cls.held.place != (host, hosts):
            return None
        try:
            cls.held._end.setblocking(False)
            cls.held._end.recv(1, socket.MSG_PEEK)  # MSG_PEEK: an answer that comes must stay to be read
        except BlockingIOError:
            return cls.held
        except OSError:
            pass
        cls.let_go()  # it says nothing unasked: this was its end
        return None

    def tell_joined(self, job_id: str) -> None:
        """Tells the cluster that this process has joined the job, as its rank 0. Nothing if the cluster has gone."""
        self._end.setblocking(True)
        with suppress(OSError):
            parent_socket.send(self._end, {parent_socket.JOINED: job_id})

    def ask_job(self, ranks: int, deadline_s: float) -> str | None:
        """The id of a new job of so many ranks on each host. None if the cluster has gone. Raises ServiceError with its
        reason, or if nothing comes in time."""
        self._end.settimeout(deadline_s)
        try:
            parent_socket.send(self._end, {"ranks": ranks})
            reply: dict[str, Any] | None = parent_socket.receive(self._end)
        except TimeoutError:  # before OSError, of which it is a kind
            raise ServiceError(f"The daemon did not answer within {deadline_s:.0f} s. [BG910]") from None
        except OSError:
            return None
        if reply is not None and "error" in reply:
            raise ServiceError(str(reply["error"]))
        return None if reply is None else str(reply["job_id"])


# A child that outlives this process must not keep the cluster.
os.register_at_fork(after_in_child=Lifeline.let_go)


def _connect(daemon: str) -> socket.socket:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end.connect(str(Path(daemon).with_name(parent_socket.CLUSTER_SOCKET)))
    except OSError as error:
        end.close()
        raise ServiceError(
            f"The cluster of the node daemon at {daemon} does not answer ({error.strerror}). Did it end just now? "
            "[BG914]"
        ) from None
    return end
