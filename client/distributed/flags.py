"""Options that the original's launchers share, and their meaning for a job here."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

from bagua.base.option_names import hyphens

SERVICE_PORT = "--bagua_service_port: nothing listens at a port of its own here, the node daemon serves the ranks"
REPORT_METRICS = "--report_metrics: `bagua job show` and the coordinator's /metrics have a job's figures"
HOSTS = "{}: this command starts the ranks of one host; `baguarun --host_list` starts those of all"

# Option -> the variable through which ranks hear of it. An option that is not given leaves the variable alone.
VARIABLES = {
    "autotune_level": "BAGUA_AUTOTUNE",
    "autotune_max_samples": "BAGUA_AUTOTUNE_MAX_SAMPLES",
    "autotune_sampling_confidence_time": "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S",
    "autotune_warmup_time": "BAGUA_AUTOTUNE_WARMUP_TIME_S",
    "default_bucket_size": "BAGUA_DEFAULT_BUCKET_SIZE",
}


class Parser(argparse.ArgumentParser):
    """Takes every option with underscores, as the original has them, and with hyphens."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def option(self, name: str, *shorter: str, **settings: Any) -> None:
        """``add_argument`` for a name in either spelling."""
        # A name of one word has one spelling, which argparse takes once.
        self.add_argument(*dict.fromkeys((*shorter, name, hyphens(name))), **settings)

    def script(self) -> None:
        """The last arguments: a script, and what it gets."""
        self.add_argument("training_script", help="what every rank runs; its own options follow it")
        self.add_argument("training_script_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def whole(least: int, most: int = sys.maxsize) -> Any:
    """A type of argparse: whole numbers in a range."""

    def number(text: str) -> int:
        if not (text.isdecimal() and least <= int(text) <= most):  # int alone takes "+1" and "1_000", too
            limit = f"from {least} to {most}" if most < sys.maxsize else f"of at least {least}"
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number {limit}")
        return int(text)

    return number


def seconds(text: str) -> float:
    """A type of argparse: seconds, not negative."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):  # NaN fails it, too
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return found


def add_entry(parser: Parser) -> None:
    """Adds -m, --no_python and --enable_bagua_net."""
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    kinds.add_argument("--no_python", "--no-python", action="store_true", help="the script is a program")
    parser.option("--enable_bagua_net", action="store_true", help="NCCL of the ranks takes Bagua-Net")


def add_bagua(parser: Parser) -> None:
    """Additions of the original to torch's launchers."""
    parser.option("--bagua_service_port", type=whole(0, 65535), help="accepted; nothing needs a port")
    parser.option("--default_bucket_size", type=whole(1), metavar="BYTES", help="of gradients in a bucket")
    parser.option("--autotune_level", type=whole(0), help="0: no tuning; else the job tunes itself")
    parser.option("--autotune_max_samples", type=whole(1), help="settings to try")
    parser.option("--autotune_sampling_confidence_time", type=seconds, metavar="S", help="per setting")
    parser.option("--autotune_warmup_time", type=seconds, metavar="S", help="before the first setting")
    parser.option("--is_output_autotune_log", action="store_true", help="a line in the log for each setting")


def variables(options: argparse.Namespace) -> dict[str, str]:
    """The ranks' environment, from the options that were given."""
    given = {name: getattr(options, option) for option, name in VARIABLES.items()}
    found = {name: str(value) for name, value in given.items() if value is not None}
    if options.is_output_autotune_log:
        found["BAGUA_IS_OUTPUT_AUTOTUNE_LOG"] = "1"
    return found


def set_bagua_env(args: argparse.Namespace, current_env: MutableMapping[str, str]) -> None:
    """Puts ``variables`` into an environment: the original's way."""
    current_env.update(variables(args))


def print_notes(*notes: str) -> None:
    """A line on standard error for each option that has nothing to do here, with what does its work."""
    for note in notes:
        print(f"note: {note}.", file=sys.stderr)


def entry(options: argparse.Namespace) -> list[str]:
    """The end of a command line: how to run the script, the script, its arguments."""
    how = ["-m"] if options.module else ["--no-python"] if options.no_python else []
    return [*how, options.training_script, *options.training_script_args]


def bagua_run(arguments: list[str], environment: Mapping[str, str]) -> None:
    """``bagua run`` in this process. Returns when the job has succeeded; otherwise raises SystemExit with its code."""
    from bagua.cli.app import app

    pairs = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
    try:
        app(["run", *pairs, *arguments], prog_name="bagua")
    except SystemExit as end:  # typer ends with SystemExit after success, too
        if end.code:
            raise


def torchrun(arguments: list[str], options: argparse.Namespace, become: bool = True) -> None:
    """Replaces this process by torchrun; without ``become``, runs torchrun in it and waits. Its ranks start
    Bagua's daemon by themselves. Raises what torchrun raises when a rank has failed."""
    set_bagua_env(options, os.environ)
    if options.enable_bagua_net:
        from bagua.base import net_plugin
        from bagua.cli.net.plugin import built_plugin

        os.environ.update(net_plugin.variables(built_plugin(), os.environ))
    if become:
        # -P: a folder named like one of our packages in the working directory must not shadow it.
        os.execv(sys.executable, [sys.executable, "-P", "-m", "torch.distributed.run", *arguments])
    importlib.import_module("torch.distributed.run").main(arguments)
