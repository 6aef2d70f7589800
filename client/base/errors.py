"""Exceptions that users may catch. Every message says what was wrong, where, and what to do."""

from __future__ import annotations


class BaguaError(RuntimeError):
    """Root of all exceptions that bagua raises on purpose."""


class CommunicationError(BaguaError):
    """A collective operation failed: a rank or host was lost, ranks called different things, or the job was stopped."""


class ServiceError(BaguaError):
    """The coordinator or the node daemon refused or could not be reached."""


class BuildError(BaguaError):
    """The native core could not be built or loaded."""


class ConfigError(BaguaError, ValueError):
    """A setting, address, folder or argument that can't be used."""
