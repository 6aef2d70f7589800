"""The commands of ``bagua``: a file for each, named as the command is called, in a folder for each group."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import typer

from bagua.base.option_names import COMMAND_SETTINGS, hyphens
from bagua.cli.programs import PROGRAMS, Program

app = typer.Typer(
    help="Data-parallel training for PyTorch: run scripts, serve a cluster, control jobs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=COMMAND_SETTINGS,
)


def add(to: typer.Typer, folder: str, *files: str) -> None:
    """Adds the commands of these files: the function of each that ``@command`` decorates."""
    for file in files:
        module = import_module(f"bagua.cli{folder}.{file}")
        decorated = (one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__)
        [function] = (one for one in decorated if hasattr(one, "settings"))
        to.command(hyphens(file), **function.settings)(function)


def group(name: str, words: str, *files: str) -> None:
    """Adds a group of commands, from the folder of this name."""
    made = typer.Typer(help=words, no_args_is_help=True)
    add(made, f".{name}", *files)
    app.add_typer(made, name=name)


# Options, and --help, are those of the program that it becomes.
FOREIGN = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}


def _program(program: Program) -> Callable[[typer.Context], None]:
    def become(context: typer.Context) -> None:
        program.become(context.args)

    return become


add(app, "", "run", "advise", "audit")
for _name, _one in PROGRAMS.items():
    app.command(_name, help=_one.about, context_settings=FOREIGN, add_help_option=False)(_program(_one))
add(app, "", "dashboard", "top", "doctor", "explain", "support_bundle", "chaos", "convert")
group(
    *("job", "Submit, show, change and cancel jobs of a service."),
    *("submit", "list", "show", "logs", "cancel", "trace", "explain", "scale", "pause", "resume"),
)
group("node", "The node daemons of a service.", "list", "drain", "undrain", "upgrade")
group(
    *("bench", "Measure: all-reduce, codecs, training steps, networks."),
    *("allreduce", "codec", "train", "network", "accuracy", "net"),
)
group("net", "Bagua-Net: faster TCP for every program that uses NCCL.", "path", "env", "show")
group("tune", "Settings that jobs have found with --autotune.", "list", "show", "forget")
group("token", "Accounts of a service: tokens with a role.", "create", "list", "revoke", "whoami")
slurm = typer.Typer(help="Jobs over the nodes of an allocation of Slurm.", no_args_is_help=True)
add(slurm, "", "run")
app.add_typer(slurm, name="slurm")


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="Show the version and exit.", is_eager=True),
) -> None:
    if version:
        import bagua

        print(f"bagua {bagua.__version__}")
        raise typer.Exit
