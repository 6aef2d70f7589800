"""Hosts that ssh reaches: how they are written, and the command that logs in there."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from bagua.base.errors import ConfigError

COMMAND_VARIABLE, PORT_VARIABLE = "BAGUA_SSH", "BAGUA_SSH_PORT"
DEFAULT_COMMAND = "ssh"


@dataclass(frozen=True)
class Host:
    """Host to log in to. ``port`` 0: as ssh is configured for it."""

    login: str
    port: int = 0

    @property
    def address(self) -> str:
        """Address without the user's name."""
        return self.login.rpartition("@")[2]


def default_command(environment: Mapping[str, str] = os.environ) -> str:
    """The ssh client: BAGUA_SSH, else ``ssh``."""
    return environment.get(COMMAND_VARIABLE) or DEFAULT_COMMAND


def parse_host(text: str, default_port: int, option: str) -> Host:
    """``h1``, ``user@h1:2222`` and ``[fe80::1]:2222``. Raises ConfigError, which names ``option``."""
    name, port = text.strip(), ""
    if name.endswith("]") or name.count(":") != 1:  # several colons: an address of IPv6
        bracket = name.rfind("]:")
        name, port = (name[: bracket + 1], name[bracket + 2 :]) if bracket >= 0 else (name, "")
    else:
        name, _, port = name.partition(":")
    name = name.replace("[", "").replace("]", "")  # ssh takes addresses without brackets
    # Ssh would take it for an option.
    if not name.rpartition("@")[2] or name.startswith("-") or any(letter.isspace() for letter in name):
        raise ConfigError(f"{option}: {text!r} is no host. Write HOST, HOST:PORT or USER@HOST:PORT. [BG101]")
    if port and not (port.isdecimal() and 1 <= int(port) <= 65535):
        raise ConfigError(f"{option} {text}: {port!r} is no port. [BG101]")
    return Host(name, int(port) if port else default_port)


def ssh_command(host: Host, ssh: str, folder: str, python: str) -> list[str]:
    """Logs in, goes to the folder and waits there for what to run."""
    port = ["-p", str(host.port)] if host.port else []
    # Exec: no shell stays between ssh and the program.
    remote = f"cd {shlex.quote(folder)} && exec {shlex.quote(python)} -P -m bagua.hosts.end"
    # BatchMode: nobody could answer ssh's questions.
    return [*shlex.split(ssh), "-T", "-o", "BatchMode=yes", *port, "--", host.login, remote]


def hint(code: int, python: str) -> str:
    """Words for exit codes that are those of ssh, or of the shell there."""
    if code == 255:
        return " (ssh's own: no connection, or no login without a password)"
    if code == 127:
        return f" (there is no {python}: all hosts need this environment at the same path)"
    return ""
