"""Which commands ``bagua`` has."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

from bagua.base.spelling import COMMAND_SETTINGS
from bagua.cli import (
    advise,
    bench,
    bench_accuracy,
    bench_net,
    chaos,
    dashboard,
    doctor,
    explain,
    explain_code,
    job,
    membership,
    net,
    run,
    support,
    token,
    trace,
    tune,
)

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


def _execute(module: str, arguments: list[str]) -> NoReturn:
    """Becomes ``python -m module``: signals, exit code and --help are that program's own."""
    # -P: a folder named like one of our packages in the working directory must not shadow it.
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])


@app.command(context_settings=FOREIGN, add_help_option=False)
def coordinator(context: typer.Context) -> None:
    """Serves a coordinator: one per cluster."""
    _execute("bagua.daemon.coordinator", context.args)


@app.command(context_settings=FOREIGN, add_help_option=False)
def daemon(context: typer.Context) -> None:
    """Serves a node daemon: one per host."""
    _execute("bagua.daemon.node", context.args)


@app.command(context_settings=FOREIGN, add_help_option=False)
def certs(context: typer.Context) -> None:
    """Makes certificates for a cluster beyond one machine."""
    _execute("bagua.daemon.certs", context.args)


@app.command(context_settings=FOREIGN, add_help_option=False)
def operator(context: typer.Context) -> None:
    """Serves BaguaJobs of a Kubernetes cluster."""
    _execute("bagua.operator", context.args)


@app.command("convert-manifest", context_settings=FOREIGN, add_help_option=False)
def convert_manifest(context: typer.Context) -> None:
    """Makes BaguaJobs out of the original's manifests of kind Bagua."""
    _execute("bagua.operator.convert", context.args)


app.command()(dashboard.dashboard)
app.command()(dashboard.top)
app.command()(doctor.doctor)
app.command("explain")(explain_code.explain_code)
app.command("support-bundle")(support.support_bundle)
app.command()(chaos.chaos)


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="Show the version and exit.", is_eager=True),
) -> None:
    if version:
        import bagua

        print(f"bagua {bagua.__version__}")
        raise typer.Exit
