"""PostgreSQL as the system has it: its programs, and a user that may run a server."""

import os
import pwd
import shutil
from pathlib import Path


def binaries():
    """The newest PostgreSQL of the system."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    if found:
        return found[-1].parent
    initdb = shutil.which("initdb")
    return Path(initdb).parent if initdb else None


def as_postgres():
    """How to run a command as a user that PostgreSQL accepts: it refuses root. None: there is no such user."""
    if os.geteuid() != 0:
        return []
    try:
        pwd.getpwnam("postgres")
    except KeyError:
        return None
    return ["runuser", "-u", "postgres", "--"] if shutil.which("runuser") else None
