"""Lack of file descriptors: which errors mean it, and words for users."""

from __future__ import annotations

import contextlib
import errno
import resource

SCARCE = (errno.EMFILE, errno.ENFILE)  # No file descriptor is left: for this process, for the machine
_MOST = 1 << 20  # where the system sets no limit


def descriptor_words(error: OSError, who: str) -> str:
    """``the keeper has no file descriptor left (its limit is 1024): raise it with …``; ``who`` is this process."""
    if error.errno == errno.ENFILE:
        return f"{who} gets no file descriptor: the machine has none left; raise fs.file-max"
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"{who} has no file descriptor left (its limit is {limit}): raise it with ulimit -n, or LimitNOFILE= of its "
        "systemd unit"
    )


def raise_descriptor_limit() -> int:
    """The soft limit of open files becomes the hard one; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system whose limit is lower than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
