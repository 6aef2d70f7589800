"""Reasons why a process may have died of SIGKILL: what its cgroup knows about the kernel's out-of-memory killer."""

from __future__ import annotations

from pathlib import Path

KILLER = "The kernel's out-of-memory killer"  # how each explanation begins

OTHERS = "Or another process sent the signal; which one is not known."

GIB = 1 << 30
UNLIMITED = 1 << 60


class MemoryWatch:
    """The cgroup of a process, from now on. ``root``: where cgroups are mounted; ``proc``: where /proc is."""

    def __init__(self, pid: int, proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> None:
        self._files = _files(pid, proc, root)
        self._before = self._kills()  # earlier kills in the cgroup are none of this process's

    @property
    def killed(self) -> bool:
        """True if the kernel has ended a process of the cgroup for memory meanwhile."""
        now = self._kills()
        return now is not None and self._before is not None and now > self._before

    def explain(self) -> str:
        """Returns one line for a process of the cgroup that has just died of a SIGKILL which nobody here sent."""
        if self._before is None:
            return f"{KILLER} may have ended it: `dmesg` on that host tells. {OTHERS}"
        if self.killed:
            return f"{KILLER} ended a process of its cgroup meanwhile{self._limit()}. Give it more memory, or use less."
        return f"{KILLER} may have ended it, but its cgroup counts none{self._limit()}. {OTHERS}"

    def _kills(self) -> int | None:
        """Number of processes of the cgroup that the kernel killed for memory."""
        lines = _read(self._files[0]).splitlines() if self._files else []
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)

    def _limit(self) -> str:
        assert self._files is not None
        limit, peak = (_number(_read(file)) for file in self._files[1:])
        if limit is None or limit >= UNLIMITED:
            return ""
        used = f", of which {peak / GIB:.2f} GiB were used" if peak is not None else ""
        return f" (limit {limit / GIB:.2f} GiB{used})"


def _files(pid: int, proc: Path, root: Path) -> tuple[Path, Path, Path] | None:
    """Counter of kills, limit and peak of the memory cgroup of ``pid``, by version 1 or 2; None where there is none."""
    for line in _read(proc / str(pid) / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):  # version 1 names the controller
            folder = _folder(root / "memory", path, "memory.oom_control")
            return folder / "memory.oom_control", folder / "memory.limit_in_bytes", folder / "memory.max_usage_in_bytes"
        if (
            number == "0"
            and not controllers
            and _folder(root, path, "memory.events").joinpath("memory.events").exists()
        ):
            folder = _folder(root, path, "memory.events")
            return folder / "memory.events", folder / "memory.max", folder / "memory.peak"
    return None


def _folder(root: Path, path: str, file: str) -> Path:
    """The nearest one above that counts: not each has a controller. A container may see its own cgroup as the root, by
    a path that only the host has."""
    found = root / path.lstrip("/")
    return next((folder for folder in (found, *found.parents) if (folder / file).exists()), root)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None
