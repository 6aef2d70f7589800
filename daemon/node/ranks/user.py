"""Chooses the Unix user of a job's ranks where a daemon of root's runs them as their submitter (``--run-as``)."""

from __future__ import annotations

import os
import pwd
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from bagua.base.errors import ConfigError
from bagua.daemon.node.ranks.launch import LaunchError
from bagua.daemon.node.rules.job_specification import JobSpecification

Limit = tuple[int, int, int]  # as for ``setrlimit``: what is limited, soft, hard
# As ``core.spawn`` takes it: uid, gid, groups, umask, limits.
SpawnUser = tuple[int, int, tuple[int, ...], int, tuple[Limit, ...]]

# Variables of the daemon that name what is root's: another user's ranks don't get them.
_ROOTS_OWN = (
    *("XDG_*", "TMPDIR", "TMP", "TEMP", "MAIL", "TERM", "PYTHONUSERBASE", "PYTHONPYCACHEPREFIX"),
    *("BAGUA_STATE_DIR", "BAGUA_CACHE_DIR", "BAGUA_RUNTIME_DIR", "BAGUA_LOG_DIR", "BAGUA_RANK_DIR"),
    *("BAGUA_TOKEN_FILE", "BAGUA_TLS", "BAGUA_RUN_AS", "BAGUA_ALLOW_ROOT", "BAGUA_RANK_UMASK", "BAGUA_RANK_LIMITS"),
)


@dataclass(frozen=True)
class RankUser:
    """The user of a job's ranks. ``groups``: all of them."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str
    umask: int
    limits: tuple[Limit, ...]

    @property
    def spawn(self) -> SpawnUser:
        """The same as ``core.spawn`` takes it."""
        return self.uid, self.gid, self.groups, self.umask, self.limits

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """``base``, which the daemon passes on, as that of this user."""
        kept = {
            name: value for name, value in base.items() if not any(fnmatchcase(name, pattern) for pattern in _ROOTS_OWN)
        }
        return {**kept, "HOME": self.home, "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell}


@dataclass(frozen=True)
class RunAs:
    """Ranks run as the Unix user that their job was submitted with. ``folder``: where each job has a place for sockets
    and code."""

    folder: Path
    allow_root: bool = False
    umask: int = 0o022
    limits: tuple[Limit, ...] = ()

    def check(self) -> None:
        """Raises ConfigError where this process can't change users."""
        if os.geteuid() != 0:
            raise ConfigError(
                f"--run-as submitter needs a daemon that root starts: this one runs as user {os.geteuid()}, who can't "
                "become another. Start it as root, or leave the option out: then ranks run as this user. [BG906]"
            )

    def user_of(self, spec: JobSpecification) -> RankUser:
        """Blocks on the system's list of users. Raises LaunchError with words for a job that may not run here."""
        if spec.adopt:
            raise LaunchError(
                "a daemon with --run-as submitter takes no jobs whose ranks are started by others [BG906]"
            )
        if not spec.unix_user:
            raise LaunchError(
                "ranks run as the Unix user of the account that submits them, and this job has none. An administrator "
                "makes a token with one (`bagua token create … --unix-user NAME`), or submits with --as-user [BG906]"
            )
        try:
            found = pwd.getpwnam(spec.unix_user)
        except KeyError:
            raise LaunchError(f"there is no Unix user {spec.unix_user} on this node [BG906]") from None
        if found.pw_uid == 0 and not self.allow_root:
            raise LaunchError(f"the job would run as {spec.unix_user}, which is root: not without --allow-root [BG906]")
        return RankUser(
            name=found.pw_name,
            uid=found.pw_uid,
            gid=found.pw_gid,
            groups=tuple(os.getgrouplist(found.pw_name, found.pw_gid)),
            home=found.pw_dir or "/",
            shell=found.pw_shell or "/bin/sh",  # as passwd(5) says of an empty one
            umask=self.umask,
            limits=self.limits,
        )


def parse_umask(text: str) -> int:
    """``022`` -> 18. Raises ConfigError."""
    if not re.fullmatch(r"0?[0-7]{3}", text):
        raise ConfigError(f"--rank-umask {text!r}: write three octal digits, such as 022 or 077. [BG906]")
    return int(text, 8)


def parse_limits(text: str) -> tuple[Limit, ...]:
    """``nofile=65536,memlock=unlimited,core=0``; empty: none. Raises ConfigError."""
    return tuple(_limit(part) for part in text.replace(" ", "").split(",") if part)


def _limit(text: str) -> Limit:
    name, _, value = text.partition("=")
    known = {one[7:].lower(): getattr(resource, one) for one in dir(resource) if one.startswith("RLIMIT_")}
    if name not in known or not (value == "unlimited" or value.isdecimal()):
        raise ConfigError(
            f"--rank-limits {text!r}: write NAME=NUMBER or NAME=unlimited, with a name of {', '.join(sorted(known))}. "
            "[BG906]"
        )
    number = resource.RLIM_INFINITY if value == "unlimited" else int(value)
    return known[name], number, number
