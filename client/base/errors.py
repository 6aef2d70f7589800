"""Exceptions that users may catch. Every message says what was wrong, where, and what to do."""

from __future__ import annotations

import re

_CODE = re.compile(r"\[(BG\d{3})\]")
_TWICE = re.compile(r"(\[BG\d{3}\])(?:\.? \1)+")


class BaguaError(RuntimeError):
    """Root of all exceptions that bagua raises on purpose."""

    def __init__(self, *args: object, **more: object) -> None:
        # A text may end with the words of another error, and so with the code that is put behind it.
        super().__init__(*(_TWICE.sub(r"\1", one) if isinstance(one, str) else one for one in args), **more)

    @property
    def code(self) -> str:
        """The code in the text, such as "BG101": ``bagua explain BG101`` says more. Empty if there is none. A text that
        quotes another error has that one's code first, and its own last: this is the last one."""
        return next(reversed(_CODE.findall(str(self))), "")


class CommunicationError(BaguaError):
    """A collective operation failed: a rank or host was lost, ranks called different things, or the job was stopped."""


class MembershipChanged(CommunicationError):
    """The job is elastic and its members have changed, in the middle of something that can't be repeated by itself. The
    process is a member of the new generation, and may go on: rank, world size and environment are current."""


class ServiceError(BaguaError):
    """The coordinator or the node daemon refused or could not be reached."""


class NotFoundError(ServiceError):
    """There is no such job, or no such rank."""


class InvalidRequestError(ServiceError):
    """A field of a request can't be accepted; the message names it."""


class ConflictError(ServiceError):
    """The request does not fit what is there: a node id in use, a job of another generation."""


class TooMuchError(ServiceError):
    """A limit of the service was reached."""


class UnauthenticatedError(ServiceError):
    """The credential is missing or wrong."""


class ForbiddenError(ServiceError):
    """The credential is good, but not for this."""


class UnavailableError(ServiceError):
    """The other end does not answer, or not in time. Trying again later may help."""


class BuildError(BaguaError):
    """The native core could not be built or loaded."""


class ConfigError(BaguaError, ValueError):
    """A setting, address, folder or argument that can't be used."""


class UsageError(ConfigError):
    """An argument of a command that can't be used: one line and exit code 2."""


class PlatformError(BaguaError, ImportError):
    """An operating system that Bagua does not run on."""
