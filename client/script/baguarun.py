"""``baguarun``: starts a job on several hosts from one of them, through ssh.

    baguarun --host_list h1,h2 --nproc_per_node=8 --master_port=1234 train.py --epochs 3
    baguarun --host_list h1:2222,alice@h2 -x NCCL_DEBUG -x LR=0.1 --nproc_per_node=8 train.py

Each host needs this Python environment and the working directory at the same paths, and lets you in without a password.
Every host runs ``bagua.distributed.launch``. The first failure ends all; so does Ctrl-C. Nothing survives a connection
that breaks. Variables, and the secret by which the hosts know each other, travel inside the connection: no list of
processes shows them.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock, Thread
from typing import IO

from bagua.base.errors import ConfigError
from bagua.cli.main import guarded
from bagua.cli.options import MAX_RANKS, UsageError
from bagua.distributed import flags

HOSTS_VARIABLE, PORT_VARIABLE = "BAGUA_NODE_DOMAIN_NAMES", "BAGUA_SSH_PORT"
SECRET = "BAGUA_JOB_SECRET"
ADMISSION = (SECRET, "BAGUA_JOB_SECRET_FILE", "BAGUA_INSECURE_RENDEZVOUS")
"""Variables that say how hosts know each other. With none of them the job gets a secret of its own."""
AS_HERE = ("PATH", "LD_LIBRARY_PATH", *ADMISSION)
"""Variables of this process that every host gets, if they are set."""
END_PATIENCE_S = 20.0
"""For the ranks of a host to end once they were told to."""


@dataclass(frozen=True)
class Host:
    """Where to log in. ``port`` 0: as ssh is configured for it."""

    login: str
    port: int = 0

    @property
    def address(self) -> str:
        """Without the user's name."""
        return self.login.rpartition("@")[2]


def parse_host(text: str, default_port: int) -> Host:
    """``h1``, ``user@h1:2222`` and ``[fe80::1]:2222``. Raises UsageError."""
    name, port = text.strip(), ""
    if name.endswith("]") or name.count(":") != 1:
        bracket = name.rfind("]:")
        name, port = (name[: bracket + 1], name[bracket + 2 :]) if bracket >= 0 else (name, "")
    else:
        name, _, port = name.partition(":")
    name = name.replace("[", "").replace("]", "")
    if not name.rpartition("@")[2] or name.startswith("-") or any(letter.isspace() for letter in name):
        raise UsageError(f"--host_list: {text!r} is no host. Write HOST, HOST:PORT or USER@HOST:PORT.")
    if port and not (port.isdecimal() and 1 <= int(port) <= 65535):
        raise UsageError(f"--host_list {text}: {port!r} is no port.")
    return Host(name, int(port) if port else default_port)


def get_args_parser() -> flags.Parser:
    """Options of this command, with the original's names."""
    parser = flags.Parser(prog="baguarun", description=__doc__)
    parser.option("--host_list", metavar="H1[:PORT],H2", help=f"default: ${HOSTS_VARIABLE}")
    parser.option("--ssh_port", type=flags.whole(1, 65535), help=f"of hosts without a port; default: ${PORT_VARIABLE}")
    parser.option("--nproc_per_node", type=flags.whole(1, MAX_RANKS), required=True, help="ranks on each host")
    parser.option("--master_addr", help="address of the first host for the others; default: its name in the list")
    parser.option("--master_port", type=flags.whole(1, 65535), help="where the hosts meet; default: 29500")
    parser.option("--bagua_service_port", type=flags.whole(0, 65535), help="accepted; nothing needs a port")
    parser.add_argument("-x", action="append", metavar="VAR[=VALUE]", default=[], help="a variable for all hosts")
    parser.option("--ssh", default=os.environ.get("BAGUA_SSH", "ssh"), help="the ssh command; default: $BAGUA_SSH, ssh")
    flags.add_entry(parser)
    parser.script()
    return parser


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked. Ends the process (2) for what is wrong with it; raises UsageError for the hosts."""
    options = get_args_parser().parse_args(arguments)
    port = options.ssh_port or flags.whole(0, 65535)(os.environ.get(PORT_VARIABLE) or "0")
    listed = options.host_list or os.environ.get(HOSTS_VARIABLE, "")
    options.hosts = [parse_host(text, port) for text in listed.split(",") if text.strip()]
    if not options.hosts:
        raise UsageError(f"There is no host: give --host_list h1,h2 or set {HOSTS_VARIABLE}.")
    return options


def environment(options: argparse.Namespace, here: Mapping[str, str]) -> dict[str, str]:
    """Variables for every host; ``here``: those of this process. Raises UsageError for an -x that names none."""
    found = {name: here[name] for name in AS_HERE if name in here}
    for word in options.x:
        name, given, value = word.partition("=")
        if not name or (not given and name not in here):
            raise UsageError(f"-x {word}: there is no such variable here. Write -x NAME=VALUE to give it a value.")
        found[name] = value if given else here[name]
    if len(options.hosts) > 1 and not any(name in found for name in ADMISSION):
        found[SECRET] = secrets.token_hex(32)
    return found


def launch_arguments(options: argparse.Namespace, number: int) -> list[str]:
    """The command line of bagua.distributed.launch on the host of that number."""
    master = options.master_addr or options.hosts[0].address
    port = [f"--master_port={options.master_port}"] if options.master_port else []
    place = [f"--nnodes={len(options.hosts)}", f"--node_rank={number}", f"--master_addr={master}", *port]
    net = ["--enable_bagua_net"] if options.enable_bagua_net else []
    return [f"--nproc_per_node={options.nproc_per_node}", *place, *net, *flags.entry(options)]


def ssh_command(host: Host, ssh: str, folder: str, python: str) -> list[str]:
    """Logs in, goes to the folder and waits there for what to run."""
    port = ["-p", str(host.port)] if host.port else []
    remote = f"cd {shlex.quote(folder)} && exec {shlex.quote(python)} -P -m bagua.distributed.remote"
    return [*shlex.split(ssh), "-T", "-o", "BatchMode=yes", *port, "--", host.login, remote]


class RemoteHost:
    """One host's part of the job, at the other end of an ssh connection. Closing our end ends it."""

    def __init__(self, host: Host, label: str, command: Sequence[str], order: str, ended: SimpleQueue[object]) -> None:
        self.host = host
        try:
            # A session of its own: Ctrl-C reaches only us, and we end the ranks in good order.
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except OSError as error:
            raise ConfigError(
                f"{command[0]} can't be started: {error.strerror}. baguarun needs an ssh client."
            ) from None
        streams = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self._copies = [Thread(target=_copy, args=(label, *pair), daemon=True) for pair in streams]
        for copy in self._copies:
            copy.start()
        Thread(target=self._watch, args=(ended,), daemon=True).start()
        self._write(order)

    def _write(self, order: str) -> None:
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(order.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return  # it has ended, and says why

    def _watch(self, ended: SimpleQueue[object]) -> None:
        self.process.wait()
        for copy in self._copies:
            copy.join()
        ended.put(self)

    def release(self) -> None:
        """Tells the host to end its ranks."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            return

    def end(self) -> None:
        """Waits for its end; cuts the connection if that does not come."""
        try:
            self.process.wait(END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            print(f"{self.host.login} does not end: the connection is cut.", file=sys.stderr)
            self.process.kill()
            self.process.wait()
        for copy in self._copies:
            copy.join()

    @property
    def code(self) -> int:
        """By the shell's convention."""
        found = self.process.returncode
        return 128 - found if found < 0 else found


_SCREEN = Lock()


def _copy(label: str, source: IO[bytes], target: IO[str]) -> None:
    for line in source:
        with _SCREEN:
            target.write(label + line.decode(errors="replace"))
            target.flush()


def pssh_bagua_launch(options: argparse.Namespace) -> int:
    """Starts the job on all hosts and waits for its end; returns the exit code: that of the first host that failed, or
    128 and the number of the signal that ended us. Raises UsageError, ConfigError."""
    order = environment(options, os.environ)
    ended: SimpleQueue[object] = SimpleQueue()

    def interrupt(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # the second one ends us at once
        ended.put(number)

    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, interrupt)
    width = max(len(host.login) for host in options.hosts)
    running: list[RemoteHost] = []
    try:
        for number, host in enumerate(options.hosts):
            label = f"[{host.login:<{width}}] " if len(options.hosts) > 1 else ""
            words = json.dumps({"arguments": launch_arguments(options, number), "environment": order})
            command = ssh_command(host, options.ssh, os.getcwd(), sys.executable)
            running.append(RemoteHost(host, label, command, words, ended))
        return _wait(running, ended)
    finally:
        for remote in running:
            remote.release()
        for remote in running:
            remote.end()


def _wait(running: Sequence[RemoteHost], ended: SimpleQueue[object]) -> int:
    for _ in running:
        first = ended.get()
        if not isinstance(first, RemoteHost):
            return 128 + int(str(first))
        if first.code:
            print(f"error: {first.host.login} ended with code {first.code}{_hint(first)}.", file=sys.stderr)
            return first.code
    return 0


def _hint(remote: RemoteHost) -> str:
    if remote.code == 255:
        return " (ssh's own: no connection, or no login without a password)"
    if remote.code == 127:
        return f" (there is no {sys.executable}: all hosts need this environment at the same path)"
    return ""


def main() -> None:
    """Entry point."""
    guarded(lambda: sys.exit(pssh_bagua_launch(parse_args())))


if __name__ == "__main__":
    main()
