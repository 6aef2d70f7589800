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
import os
import secrets
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from queue import SimpleQueue

from bagua.base.errors import ConfigError, UsageError
from bagua.base.job_options import MAX_RANKS
from bagua.cli.main import guarded
from bagua.distributed import flags
from bagua.hosts.end import Order
from bagua.hosts.remote import Remote
from bagua.hosts.ssh import COMMAND_VARIABLE, PORT_VARIABLE, default_command, hint, parse_host, ssh_command

HOSTS_VARIABLE = "BAGUA_NODE_DOMAIN_NAMES"
SECRET = "BAGUA_JOB_SECRET"
# Variables that say how hosts know each other. With none of them the job gets a secret of its own.
ADMISSION = (SECRET, "BAGUA_JOB_SECRET_FILE", "BAGUA_INSECURE_RENDEZVOUS")
AS_HERE = ("PATH", "LD_LIBRARY_PATH", *ADMISSION)  # Variables of this process that every host gets, if they are set


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
    parser.option("--ssh", default=default_command(), help=f"the ssh command; default: ${COMMAND_VARIABLE}, ssh")
    flags.add_entry(parser)
    parser.script()
    return parser


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked. Ends the process (2) for what is wrong with it; raises UsageError for the hosts."""
    options = get_args_parser().parse_args(arguments)
    port = options.ssh_port or flags.whole(0, 65535)(os.environ.get(PORT_VARIABLE) or "0")
    listed = options.host_list or os.environ.get(HOSTS_VARIABLE, "")
    try:
        options.hosts = [parse_host(text, port, "--host_list") for text in listed.split(",") if text.strip()]
    except ConfigError as error:
        raise UsageError(str(error)) from None
    if not options.hosts:
        raise UsageError(f"There is no host: give --host_list h1,h2 or set {HOSTS_VARIABLE}. [BG101]")
    return options


def environment(options: argparse.Namespace, here: Mapping[str, str]) -> dict[str, str]:
    """Variables for every host; ``here``: those of this process. Raises UsageError for an -x that names none."""
    found = {name: here[name] for name in AS_HERE if name in here}
    for word in options.x:
        name, given, value = word.partition("=")
        if not name or (not given and name not in here):
            raise UsageError(
                f"-x {word}: there is no such variable here. Write -x NAME=VALUE to give it a value. [BG107]"
            )
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


def pssh_bagua_launch(args: argparse.Namespace, script_cmd: str = "", env: Mapping[str, str] | None = None) -> int:
    """Starts the job that ``parse_args`` has read on all hosts and waits for its end.

    Returns the exit code: that of the first host that failed, or 128 and the number of the signal that ended us.
    ``script_cmd``: another script, with its arguments, as in a shell. ``env``: more variables for all hosts. Raises
    UsageError, ConfigError.
    """
    options = argparse.Namespace(**vars(args))
    if script_cmd:
        options.training_script, *options.training_script_args = shlex.split(script_cmd)
    order = environment(options, os.environ) | dict(env or {})
    ended: SimpleQueue[object] = SimpleQueue()

    def interrupt(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # the second one ends us at once
        ended.put(number)

    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, interrupt)
    width = max(len(host.login) for host in options.hosts)
    running: list[Remote] = []
    try:
        for number, host in enumerate(options.hosts):
            label = f"[{host.login:<{width}}] " if len(options.hosts) > 1 else ""
            words = Order("bagua.distributed.launch", launch_arguments(options, number), order).line()
            command = ssh_command(host, options.ssh, os.getcwd(), sys.executable)
            running.append(Remote(host.login, command, words, label, on_end=ended.put))
        return _wait(running, ended)
    finally:
        for remote in running:
            remote.release()  # first all, then each is waited for: they end side by side
        for remote in running:
            remote.end()


def _wait(running: Sequence[Remote], ended: SimpleQueue[object]) -> int:
    for _ in running:
        first = ended.get()
        if not isinstance(first, Remote):
            return 128 + int(str(first))
        if first.code:
            why = hint(first.code, sys.executable)
            print(f"error: {first.login} ended with code {first.code}{why}.", file=sys.stderr)
            return first.code
    return 0


def main() -> None:
    """Runs the original's launcher for several hosts."""
    guarded(lambda: sys.exit(pssh_bagua_launch(parse_args())))


if __name__ == "__main__":
    main()
