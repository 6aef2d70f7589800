"""``python -m bagua.distributed.run``: torchrun with the original's options.

    python -m bagua.distributed.run --standalone --nproc_per_node=2 train.py
    python -m bagua.distributed.run --nnodes=1:4 --nproc_per_node=8 --rdzv_id=JOB \\
        --rdzv_backend=c10d --rdzv_endpoint=h1:29400 train.py

A job on one host is a job of ``bagua run``. One with a rendezvous, or with an option that only torchrun has, is
torchrun's: its ranks start Bagua's daemon by themselves. See docs/launchers.md.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

import typer

from bagua.base.errors import ConfigError, UsageError
from bagua.base.job_options import MAX_NODES, parse_nodes
from bagua.base.launchers import DEFAULT_PORT
from bagua.base.option_names import hyphens
from bagua.cli.main import guarded
from bagua.cli.run import count_ranks
from bagua.distributed import flags
from bagua.distributed.flags import set_bagua_env

__all__ = [
    "config_from_args",
    "determine_local_world_size",
    "get_args_parser",
    "get_rdzv_endpoint",
    "main",
    "parse_args",
    "parse_min_max_nnodes",
    "run",
    "run_script_path",
    "set_bagua_env",
]

MAX_RESTARTS = 3  # the original's default

# Options that only torchrun has -> the value that asks for nothing. With another value the job is torchrun's.
OF_TORCHRUN = {
    "rdzv_endpoint": "",
    "rdzv_conf": "",
    "redirects": "0",
    "tee": "0",
    "role": "default",
    "start_method": "spawn",
    "run_path": False,
}

PASSED_ON = (*OF_TORCHRUN, "rdzv_backend", "rdzv_id", "max_restarts", "monitor_interval", "log_dir", "nproc_per_node")


def get_args_parser() -> flags.Parser:
    """Options of this command, with the original's names."""
    parser = flags.Parser(prog="bagua.distributed.run", description=__doc__)
    parser.option("--nnodes", default="1:1", metavar="N|MIN:MAX", help="hosts of the job; default: 1")
    parser.option("--nproc_per_node", default="auto", metavar="N|auto|gpu|cpu", help="ranks on each; default: auto")
    parser.option("--rdzv_backend", default="static", help="static, c10d or etcd-v2; default: static")
    parser.option("--rdzv_endpoint", default="", metavar="HOST:PORT", help="where the hosts meet")
    parser.option("--rdzv_id", default="none", help="name of the job among those that meet there")
    parser.option("--rdzv_conf", default="", metavar="K=V,...", help="settings of the rendezvous")
    parser.option("--standalone", action="store_true", help="a job on this host, whatever else runs here")
    parser.option("--max_restarts", type=flags.whole(0, 1000), default=MAX_RESTARTS, help="of a failed job; default: 3")
    parser.option("--monitor_interval", type=flags.seconds, help="of torchrun; here a rank's end is seen at once")
    parser.option("--start_method", default="spawn", choices=("spawn", "fork", "forkserver"))
    parser.option("--role", default="default", help="a name that the ranks see in ROLE_NAME")
    parser.option("--run_path", action="store_true", help="the script runs by runpy.run_path, in torchrun's way")
    parser.option("--log_dir", metavar="DIR", help="the ranks' output goes there, too")
    parser.option("--redirects", "-r", default="0", help="1: standard output to files, 2: standard error, 3: both")
    parser.option("--tee", "-t", default="0", help="the same, and on the screen, too")
    parser.option("--node_rank", type=flags.whole(0, MAX_NODES - 1), default=0, help="number of this host, if static")
    parser.option("--master_addr", default="127.0.0.1", help="address of host 0, if static")
    parser.option("--master_port", type=flags.whole(0, 65535), help="its port; default: 29500, on one host a free one")
    parser.option("--use_env", action="store_true", help="accepted; ranks always read their environment")
    flags.add_entry(parser)
    flags.add_bagua(parser)
    parser.script()
    return parser


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked. Ends the process (2) for what is wrong with it; raises UsageError for --nnodes."""
    options = get_args_parser().parse_args(args)
    try:
        parse_nodes(options.nnodes)
        count_ranks(options.nproc_per_node)
    except (ConfigError, typer.BadParameter) as error:
        raise UsageError(str(error)) from error
    if options.run_path and (options.module or options.no_python):
        raise UsageError("--run_path runs a script: leave -m and --no_python out. [BG103]")
    return options


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """``"1:4"`` -> (1, 4), ``"2"`` -> (2, 2). Raises ValueError."""
    try:
        nodes = parse_nodes(nnodes)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return nodes.least or nodes.count, nodes.count


def determine_local_world_size(nproc_per_node: str) -> int:
    """``"4"`` -> 4; ``"cpu"``, ``"gpu"`` and ``"auto"``: as many as this host has. Raises ValueError."""
    try:
        return count_ranks(nproc_per_node)
    except typer.BadParameter as error:
        raise ValueError(str(error)) from error


def get_rdzv_endpoint(args: argparse.Namespace) -> str:
    """Returns where the hosts meet: host 0's address and port, if that is all they know."""
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        return f"{args.master_addr}:{args.master_port or DEFAULT_PORT}"
    return str(args.rdzv_endpoint)


def config_from_args(args: argparse.Namespace) -> tuple[Any, Any, list[str]]:
    """A job for ``torch.distributed.launcher.elastic_launch``: its configuration, what each rank runs, and arguments of
    that."""
    torchs = importlib.import_module("torch.distributed.run")
    found: tuple[Any, Any, list[str]] = torchs.config_from_args(torchs.parse_args(torchrun_arguments(args)))
    return found


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Runs a script in this process, with these arguments."""
    importlib.import_module("torch.distributed.run").run_script_path(training_script, *training_script_args)


def on_this_host(options: argparse.Namespace) -> bool:
    """True if ``bagua run`` on this host does all of it."""
    if options.standalone:  # as with torchrun it outweighs options of a rendezvous
        options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id = "static", "", "none"
    alone = parse_nodes(options.nnodes).count == 1 and options.rdzv_backend == "static"
    return alone and all(getattr(options, name) == value for name, value in OF_TORCHRUN.items())


def notes(options: argparse.Namespace) -> list[str]:
    """Says, for each given option that has nothing to do, what does its work."""
    idle = {
        flags.SERVICE_PORT: options.bagua_service_port is not None,
        "--use_env: ranks always find RANK, LOCAL_RANK and WORLD_SIZE in their environment": options.use_env,
        "--monitor_interval: the node daemon sees a rank's end at once, it does not look now and then": (
            options.monitor_interval is not None and on_this_host(options)
        ),
    }
    return [note for note, given in idle.items() if given]


def run_arguments(options: argparse.Namespace) -> list[str]:
    """The command line of ``bagua run`` for a job on this host alone."""
    port = ["--master-port", str(options.master_port)] if options.master_port else []
    logs = ["--log-dir", options.log_dir] if options.log_dir else []
    net = ["--enable-bagua-net"] if options.enable_bagua_net else []
    ranks = count_ranks(options.nproc_per_node)
    numbers = ["--nproc-per-node", str(ranks), "--max-restarts", str(options.max_restarts)]
    return [*numbers, *port, *logs, *net, *flags.entry(options)]


def torchrun_arguments(options: argparse.Namespace) -> list[str]:
    """The command line of torchrun for this host's ranks."""
    given = {name: getattr(options, name) for name in PASSED_ON}
    given = {name: value for name, value in given.items() if value not in (None, "", False, OF_TORCHRUN.get(name))}
    words = [f"--{hyphens(name)}" + ("" if value is True else f"={value}") for name, value in given.items()]
    if options.rdzv_backend == "static":
        port = options.master_port or DEFAULT_PORT
        words += [f"--node-rank={options.node_rank}", f"--master-addr={options.master_addr}", f"--master-port={port}"]
    return [f"--nnodes={options.nnodes}", *words, *flags.entry(options)]


def run(args: argparse.Namespace) -> None:
    """Starts the job that ``parse_args`` has read, and returns when it has succeeded. Raises SystemExit with its code,
    or torchrun's ChildFailedError."""
    _start(args, become=False)


def _start(options: argparse.Namespace, become: bool) -> None:
    flags.print_notes(*notes(options))
    if on_this_host(options):
        # Scripts written for torchrun read these.
        shown = {"TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts), "TORCHELASTIC_RUN_ID": options.rdzv_id}
        flags.bagua_run(run_arguments(options), {**shown, **flags.variables(options)})
    else:
        flags.torchrun(torchrun_arguments(options), options, become)


def main(args: Sequence[str] | None = None) -> None:
    """``run`` for a command line; None: that of this process. Raises UsageError, too."""
    run(parse_args(args))


if __name__ == "__main__":
    guarded(lambda: _start(parse_args(), become=True))
