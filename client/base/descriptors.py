"""Lack of file descriptors: which errors mean it, and words for users."""

from __future__ import annotations

import errno
import resource

SCARCE = (errno.EMFILE, errno.ENFILE)  # No file descriptor is left: for this process, for the machine


def descriptor_words(error: OSError, who: str) -> str:
    """``the keeper has no file descriptor left (its limit is 1024): raise it with …``; ``who`` is this process."""
    if error.errno == errno.ENFILE:
        return f"{who} gets no file descriptor: the machine has none left; raise fs.file-max"
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"{who} has no file descriptor left (its limit is {limit}): raise it with ulimit -n, or LimitNOFILE= of its "
        "systemd unit"
    )
