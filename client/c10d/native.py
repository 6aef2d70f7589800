"""The C++ backend (csrc/c10d): built when it is first asked for, and made with this rank's channel to the daemon."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from bagua import csrc
from bagua.base.errors import BuildError, ServiceError
from bagua.c10d.joining import Member
from bagua.torch_api.join.session import Session


def load() -> Any:
    """The module ``bagua_c10d_native``. Raises BuildError."""
    try:
        return csrc.load_c10d()
    except csrc.BuildError as error:
        raise BuildError(str(error)) from error


def create(rank: int, size: int, timeout: timedelta, member: Member) -> Any:
    """A ``c10d::Backend`` for one group."""
    communicator = member.communicator
    hosts = member.session.membership.hosts
    return load().make(
        member.session.keep(_host),
        rank=rank,
        size=size,
        comm=communicator.id,
        generation=member.session.membership.generation,
        one_host=any(set(communicator.ranks) <= set(ranks) for ranks in hosts),
        timeout=timeout,
        keeper=communicator,
        shut_down=member.shut_down,
    )


def _host(session: Session) -> Any:
    """One for the session."""

    def describe() -> str:
        try:
            return session.daemon.describe_waits() if session.daemon is not None else ""
        except ServiceError:
            return ""

    return load().Host(session.connection.native, describe)
