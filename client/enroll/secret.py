"""The secret that proves that a host belongs to a job. It reaches the hosts by a way of its own, never by the network.

Nothing that others can read counts as one: ids of jobs, names of hosts, addresses and ports are no secrets.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import time
from pathlib import Path

from bagua.base import launchers
from bagua.base.errors import ConfigError
from bagua.base.paths import make_private_dir
from bagua.base.run_folder import runtime_root
from bagua.base.secrets import read_private
from bagua.base.security import create_token

SECRET = "BAGUA_JOB_SECRET"
SECRET_FILE = "BAGUA_JOB_SECRET_FILE"
INSECURE = "BAGUA_INSECURE_RENDEZVOUS"

MIN_CHARACTERS = 32
MIN_DIFFERENT = 8
MAX_BYTES = 4096
SHARED_PATIENCE_S = 60.0  # for a file that another host made in the shared home

_MAKE = "umask 077; mkdir -p ~/.config/bagua; openssl rand -hex 32 > ~/.config/bagua/job-secret"


def default_file() -> Path:
    """Returns the default file in the user's home, which the hosts of a cluster often share."""
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(config) / "bagua" / "job-secret"


def insecure() -> bool:
    """True if the user has said that the network is closed to others. Raises ConfigError for an unknown value."""
    value = os.environ.get(INSECURE, "0") or "0"
    if value not in ("0", "1"):
        raise ConfigError(f"{INSECURE}={value!r} is neither 0 nor 1. [BG106]")
    return value == "1"


def find_key(master_addr: str, first: bool = False) -> bytes:
    """The pre-shared key of this job's hosts, 32 bytes: from BAGUA_JOB_SECRET, from the file that BAGUA_JOB_SECRET_FILE
    names, or from the default file. Hosts that are one machine (``master_addr`` is its loopback) share a file that is
    made for them. Under srun, mpirun and PBS hosts share the home of the user: there the ``first`` host makes the
    default file, and the others wait for it.

    Raises ConfigError if there is none, or if others could know it.
    """
    given = [name for name in (SECRET, SECRET_FILE) if os.environ.get(name)]
    if insecure():
        given.append(INSECURE)
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are set: choose one. [BG911]")
    if given == [SECRET]:
        return _stretch(os.environ[SECRET], SECRET)
    if given == [SECRET_FILE]:
        return _from_file(Path(os.environ[SECRET_FILE]))
    if given == [INSECURE]:
        return bytes(32)  # a key that everybody knows: the handshake is the same, and proves nothing
    if os.path.lexists(default_file()):
        return _from_file(default_file())
    if names_loopback(master_addr):
        return _stretch(create_token(runtime_root() / "job-secret"), "the secret of this machine")
    if launchers.outer(os.environ) is not None and _wait_for_default_file(first):
        return _from_file(default_file())
    raise ConfigError(
        f"A job of several hosts needs a secret that all of them hold, and nobody else: set {SECRET} or {SECRET_FILE} "
        f"alike on every host, or make the file {default_file()} in a home folder that they share: `{_MAKE}`. "
        f"On a network that is closed to others, {INSECURE}=1 does without. [BG911]"
    )


def _wait_for_default_file(first: bool) -> bool:
    """True if the file is there. The first host makes it; raises ConfigError if it can't."""
    path = default_file()
    if first:
        create_token(make_private_dir(path.parent) / path.name)
    deadline = time.monotonic() + SHARED_PATIENCE_S
    # A list of the folder: network file systems remember for a while that a file was not there.
    while not (path.parent.is_dir() and path.name in os.listdir(path.parent)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def remove_from_environment() -> None:
    """Takes the secret out of the environment: services that are started later need not hold it."""
    for name in (SECRET, SECRET_FILE):
        os.environ.pop(name, None)


def names_loopback(host: str) -> bool:
    """True if ``host`` means the machine itself on whatever machine it is read. A name that only this machine's
    /etc/hosts resolves to loopback does not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _from_file(path: Path) -> bytes:
    try:
        text = read_private(path, "The job's secret", personal=True).decode()
    except OSError as error:
        raise ConfigError(f"The job's secret {path} can't be read: {error.strerror}. [BG911]") from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"The job's secret {path} is no text: write one line of letters and digits. [BG911]"
        ) from None
    return _stretch(text, str(path))


def _stretch(text: str, source: str) -> bytes:
    """Guessing must cost: a listener may try secrets against what he has recorded, as often as he likes."""
    text = text.strip()
    # A word is no secret, nor is a row of zeros.
    if len(text) < MIN_CHARACTERS or len(set(text)) < MIN_DIFFERENT or len(text.encode()) > MAX_BYTES:
        raise ConfigError(
            f"The job's secret in {source} can be guessed: give {MIN_CHARACTERS} characters or more, drawn by chance: "
            "`openssl rand -hex 32`. [BG911]"
        )
    # One salt: hosts share nothing else beforehand.
    return hashlib.scrypt(text.encode(), salt=b"bagua job secret", n=1 << 14, r=8, p=1, maxmem=1 << 26, dklen=32)
