"""``python -m bagua.distributed.launch``: the ranks of a job on this host, as the original's launcher starts them.

    python -m bagua.distributed.launch --nproc_per_node=2 train.py --epochs 3
    python -m bagua.distributed.launch --nnodes=2 --node_rank=0 --master_addr=h1 --master_port=1234 train.py

A job on one host is a job of ``bagua run``. One on several is started by torchrun on each of them: see
docs/launchers.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bagua.base.errors import UsageError
from bagua.base.job_options import MAX_NODES, MAX_RANKS, default_name
from bagua.base.launchers import DEFAULT_PORT
from bagua.cli.main import guarded
from bagua.distributed import flags
from bagua.distributed.flags import set_bagua_env

__all__ = ["get_args_parser", "launch", "main", "parse_args", "set_bagua_env"]


def get_args_parser() -> flags.Parser:
    """Options of this command, with the original's names."""
    parser = flags.Parser(prog="bagua.distributed.launch", description=__doc__)
    parser.option("--nnodes", type=flags.whole(1, MAX_NODES), default=1, help="hosts of the job; default: 1")
    parser.option("--node_rank", type=flags.whole(0, MAX_NODES - 1), default=0, help="number of this host")
    parser.option("--nproc_per_node", type=flags.whole(1, MAX_RANKS), default=1, help="ranks on it; default: 1")
    parser.option("--master_addr", default="127.0.0.1", help="address of host 0, for all of them")
    parser.option("--master_port", type=flags.whole(0, 65535), help="default: 29500; on one host a free one")
    parser.option("--set_additional_flag", action="store_true", help="the script gets --local_rank=N first")
    parser.option("--logdir", metavar="DIR", help="the ranks' output goes there, too")
    flags.add_entry(parser)
    flags.add_bagua(parser)
    parser.option("--report_metrics", action="store_true", help="accepted; figures are always there")
    parser.option("--host_list", help="use baguarun")
    parser.option("--ssh_port", help="use baguarun")
    parser.script()
    return parser


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked. Ends the process (2) for what is wrong with it."""
    return get_args_parser().parse_args(arguments)


def notes(options: argparse.Namespace) -> list[str]:
    """Says, for each given option that has nothing to do, what does its work."""
    idle = {
        flags.SERVICE_PORT: options.bagua_service_port is not None,
        flags.REPORT_METRICS: options.report_metrics,
        flags.HOSTS.format("--host_list"): options.host_list is not None,
        flags.HOSTS.format("--ssh_port"): options.ssh_port is not None,
    }
    return [note for note, given in idle.items() if given]


def with_local_rank(options: argparse.Namespace) -> list[str]:
    """The script and its arguments; with --set_additional_flag through a program that adds --local_rank."""
    adder = ["-m", "bagua.distributed.local_rank"] if options.set_additional_flag else []
    return [*adder, *flags.entry(options)]


def run_arguments(options: argparse.Namespace) -> list[str]:
    """The command line of ``bagua run`` for a job on this host alone."""
    port = ["--master-port", str(options.master_port)] if options.master_port else []
    logs = ["--log-dir", options.logdir] if options.logdir else []
    net = ["--enable-bagua-net"] if options.enable_bagua_net else []
    ranks = [
        "--nproc-per-node",
        str(options.nproc_per_node),
        "--name",
        default_name(options.training_script, options.module),
    ]
    return [*ranks, *port, *logs, *net, *with_local_rank(options)]


def torchrun_arguments(options: argparse.Namespace) -> list[str]:
    """The command line of torchrun for this host's ranks of a job on several."""
    place = {
        "nnodes": options.nnodes,
        "node-rank": options.node_rank,
        "nproc-per-node": options.nproc_per_node,
        "master-addr": options.master_addr,
        "master-port": options.master_port or DEFAULT_PORT,
        "max-restarts": 0,
    }
    # 3: standard output and standard error, to files and to the screen.
    logs = [f"--log-dir={options.logdir}", "--redirects=3", "--tee=3"] if options.logdir else []
    return [*(f"--{name}={value}" for name, value in place.items()), *logs, *with_local_rank(options)]


def launch(arguments: Sequence[str] | None = None) -> None:
    """Starts the job, and returns when it has succeeded. Raises UsageError, or SystemExit with the job's code."""
    options = parse_args(arguments)
    flags.print_notes(*notes(options))
    if options.node_rank >= options.nnodes:
        raise UsageError(
            f"--node_rank {options.node_rank}: the job has {options.nnodes} nodes, counted from 0. [BG110]"
        )
    if options.nnodes == 1:
        flags.bagua_run(run_arguments(options), flags.variables(options))
    else:
        flags.torchrun(torchrun_arguments(options), options)


def main() -> None:
    """Runs the original's launcher for one node."""
    guarded(launch)


if __name__ == "__main__":
    main()
