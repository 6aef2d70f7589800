"""The commands of ``bagua``."""

from __future__ import annotations

from collections.abc import Callable

import typer

from bagua.base.option_names import COMMAND_SETTINGS
from bagua.cli import advise, chaos, convert, dashboard, doctor, run
from bagua.cli import explain as explain_code
from bagua.cli import support_bundle as support
from bagua.cli.bench import accuracy as bench_accuracy
from bagua.cli.bench import common as bench
from bagua.cli.bench import net as bench_net
from bagua.cli.job import explain, trace
from bagua.cli.job import scale as membership
from bagua.cli.job import submit as job
from bagua.cli.net import show as net
from bagua.cli.programs import PROGRAMS, Program
from bagua.cli.token import create as token
from bagua.cli.tune import show as tune

app = typer.Typer(
    help="Data-parallel training for PyTorch: run scripts, serve a cluster, control jobs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=COMMAND_SETTINGS,
)
app.command(context_settings={"allow_interspersed_args": False}, no_args_is_help=True)(run.run)
app.command(context_settings={"allow_interspersed_args": False}, no_args_is_help=True)(advise.advise)
job.jobs.command()(trace.trace)
job.jobs.command()(explain.explain)
job.jobs.command()(membership.scale)
job.jobs.command()(membership.pause)
job.jobs.command()(membership.resume)
job.nodes.command()(membership.drain)
job.nodes.command()(membership.undrain)
job.nodes.command()(membership.upgrade)
app.add_typer(job.jobs, name="job")
app.add_typer(job.nodes, name="node")
bench.bench.command()(bench_accuracy.accuracy)
bench.bench.command("net")(bench_net.bench_net)
app.add_typer(bench.bench, name="bench")
app.add_typer(net.net, name="net")
app.add_typer(tune.tune, name="tune")
app.add_typer(token.tokens, name="token")
app.command()(token.audit)
slurm = typer.Typer(help="Jobs over the nodes of an allocation of Slurm.", no_args_is_help=True)
slurm.command("run", context_settings={"allow_interspersed_args": False}, no_args_is_help=True)(run.run)
app.add_typer(slurm, name="slurm")

FOREIGN = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}


def _program(program: Program) -> Callable[[typer.Context], None]:
    def become(context: typer.Context) -> None:
        program.become(context.args)

    return become


for _name, _one in PROGRAMS.items():
    app.command(_name, help=_one.about, context_settings=FOREIGN, add_help_option=False)(_program(_one))


app.command()(dashboard.dashboard)
app.command()(dashboard.top)
app.command()(doctor.doctor)
app.command("explain")(explain_code.explain_code)
app.command("support-bundle")(support.support_bundle)
app.command()(chaos.chaos)
app.command(no_args_is_help=True)(convert.convert)


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="Show the version and exit.", is_eager=True),
) -> None:
    if version:
        import bagua

        print(f"bagua {bagua.__version__}")
        raise typer.Exit
