"""The control group (cgroup v2) of this process."""

from __future__ import annotations

import os
from pathlib import Path

PROCESSES = "cgroup.procs"


def own_group(proc: Path = Path("/proc/self")) -> Path | None:
    """The group of this process, as it is mounted. None: version 2 is not mounted here, or not this part of it."""
    try:
        lines, mounts = (proc / "cgroup").read_text().splitlines(), (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return None
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")  # 0 is version 2
    for mount in mounts:
        fields, _, kind = mount.partition(" - ")
        if kind.startswith("cgroup2 "):
            root, folder = fields.split()[3:5]
            # A container sees a part of the tree: paths count from the mounted root.
            found = Path(folder) / os.path.relpath(own or "/", root)
            return found if own and ".." not in found.parts and (found / PROCESSES).exists() else None
    return None
