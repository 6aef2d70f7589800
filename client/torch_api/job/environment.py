"""Reads settings of this process from environment variables. It works before ``init_process_group``.

A session knows its rank's place better than they do, and tells it here (``set_place``). The environment gets it only
where a program asked for the session (``show``), and is as it was before when the session has ended (``clear_place``).
"""

from __future__ import annotations

import math
import os
import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from bagua.base import islands, launchers, replica_check
from bagua.base.errors import ConfigError
from bagua.base.replica_check import CheckReplicas
from bagua.tuning.grouping import DEFAULT_BYTES

DEFAULT_BUCKET_BYTES = DEFAULT_BYTES
DEFAULT_WAIT_TIMEOUT_S = 1800


class _Place:
    """Place of this rank, as its session says. ``told``: values by variable, before the environment's; an empty one
    hides that. ``shown``: (value before, value) of variables of the environment that process ``shown_in`` has set."""

    told: ClassVar[dict[str, str]] = {}
    shown: ClassVar[dict[str, tuple[str | None, str]]] = {}
    shown_in = 0


def set_place(variables: Mapping[str, str]) -> None:
    """Sets the rank's place from now on, whatever the environment says."""
    _Place.told.update(variables)


def show() -> None:
    """Puts the rank's place into the environment, for programs that read it and processes that they start."""
    for name, value in _Place.told.items():
        before = os.environ.get(name)
        if value and value != before:
            # A second session keeps what was there before the first.
            _Place.shown[name] = (_Place.shown[name][0] if name in _Place.shown else before, value)
            os.environ[name] = value
    _Place.shown_in = os.getpid()


def clear_place() -> None:
    """Forgets the place, when the session has ended or another one begins in a fork of its process. The environment
    is as before, but for variables that a program has changed since."""
    # A forked child must not change what it has inherited.
    for name, (before, value) in _Place.shown.items() if _Place.shown_in == os.getpid() else ():
        if os.environ.get(name) == value:  # the program has set it anew: that stays
            del os.environ[name]
            if before is not None:
                os.environ[name] = before
    _Place.told.clear()
    _Place.shown.clear()


@contextmanager
def for_a_moment(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable in the block; the user's own setting wins."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


def look(name: str) -> str:
    """The value that counts; empty if there is none."""
    return _Place.told.get(name, os.environ.get(name, ""))


def read_int(name: str, default: int) -> int:
    """The number in environment variable ``name``, or ``default``. Raises ConfigError naming the variable."""
    text = look(name)
    if not text.strip():
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"Environment variable {name} is {text!r}: it must be a whole number. [BG106]") from None


def _read_place(name: str, default: int) -> int:
    """A place in the job: from the variable that torch has for it, else from those of srun, mpirun or PBS."""
    return read_int(name, default) if look(name) else int(_launchers_place().get(name, default))


def _launchers_place() -> dict[str, str]:
    return launchers.placement({**os.environ, **_Place.told})


def complete() -> None:
    """Tells torch's variables (RANK and so on) from those of srun, mpirun or PBS, where these started this process.
    Raises ConfigError for a place that can't be."""
    found = _launchers_place()
    if "LOCAL_WORLD_SIZE" not in found:
        found.pop("LOCAL_RANK", None)  # the ranks find out which of them share a host
    set_place(found)


def get_rank() -> int:
    """Rank of this process in the job: RANK, or what srun, mpirun or PBS say (``base/launchers.py``), else 0."""
    return _read_place("RANK", 0)


def get_world_size() -> int:
    """Number of ranks in the job: WORLD_SIZE, or what srun, mpirun or PBS say, else 1."""
    return _read_place("WORLD_SIZE", 1)


def get_island_size() -> int:
    """Number of ranks that hold one copy of a sharded model together: BAGUA_ISLAND_SIZE, else 1. Raises ConfigError if
    it is no whole number from 1."""
    return islands.size_in({islands.VARIABLE: look(islands.VARIABLE)})


def get_island() -> int:
    """Number of this rank's island, counted from 0."""
    return get_rank() // get_island_size()


def get_replica_count() -> int:
    """Number of copies of a sharded model: of islands."""
    return get_world_size() // get_island_size()


def get_local_rank() -> int:
    """Rank among the processes of this host: LOCAL_RANK, or what srun, mpirun or PBS say, else 0."""
    return _read_place("LOCAL_RANK", 0)


def get_local_size() -> int:
    """Number of ranks on this host: LOCAL_WORLD_SIZE, or what srun, mpirun or PBS say, else 1. ``init_process_group``
    sets it where it was absent."""
    return _read_place("LOCAL_WORLD_SIZE", 1)


def get_node_rank() -> int:
    """Index of this host: GROUP_RANK under torchrun (which sets the other variables too), else NODE_RANK, else 0."""
    torchrun = ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if all(map(look, torchrun)):
        return read_int("GROUP_RANK", 0)
    return _read_place("NODE_RANK", 0)


def get_master_addr() -> str:
    """Address at which the ranks meet: MASTER_ADDR, else this machine."""
    return look("MASTER_ADDR") or "127.0.0.1"


def get_default_bucket_size() -> int:
    """Bytes of gradients per bucket: BAGUA_DEFAULT_BUCKET_SIZE, else 10 MiB. Raises ConfigError if it isn't
    positive."""
    found = read_int("BAGUA_DEFAULT_BUCKET_SIZE", DEFAULT_BUCKET_BYTES)
    if found <= 0:
        raise ConfigError(f"BAGUA_DEFAULT_BUCKET_SIZE is {found}: it must be a positive number of bytes. [BG106]")
    return found


def get_check_replicas() -> CheckReplicas:
    """The answer to replicas that differ: BAGUA_CHECK_REPLICAS, else ``warn``. Raises ConfigError for an unknown
    word."""
    return replica_check.read(os.environ)


def get_wait_timeout() -> float:
    """Seconds after which a rank gives up waiting for others that are alive: BAGUA_WAIT_TIMEOUT_S, else half an hour,
    as with torch.distributed. 0: it waits for ever. Raises ConfigError if it is negative."""
    found = read_int("BAGUA_WAIT_TIMEOUT_S", DEFAULT_WAIT_TIMEOUT_S)
    if found < 0:
        raise ConfigError(
            f"BAGUA_WAIT_TIMEOUT_S is {found}: it must be a number of seconds, or 0 for no limit. [BG106]"
        )
    return found or math.inf


def find_free_network_port() -> int:
    """A TCP port of this machine that was free a moment ago. If possible one that the system gives to no connection by
    itself, so that it stays free until it is used."""
    # 0: whichever the system chooses, at last.
    for port in (*random.SystemRandom().sample(range(10000, _first_given_port()), 64), 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind(("", port))
            found: int = probe.getsockname()[1]
            return found
    raise OSError("No free TCP port on this machine.")


def _first_given_port() -> int:
    """The first port that connections get without asking for one."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        first = 32768
    return max(first, 10064)  # 64 ports are sampled from 10000 on
