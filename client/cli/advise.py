"""``bagua advise``: records some steps of the user's script, and predicts every algorithm on any network."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from bagua.base.errors import ServiceError, UsageError
from bagua.base.job_options import MAX_NODES, MAX_RANKS, default_name
from bagua.bench import plots
from bagua.bench.report import Column, cells, text
from bagua.cli import options
from bagua.cli.bench.common import command_line
from bagua.cli.command import command
from bagua.cli.job_options import check_entry, option, parse_env
from bagua.cli.options import Output, checked
from bagua.tuning.advice import Advice, Row, predict
from bagua.tuning.advice import advise as advise_on
from bagua.tuning.exchanges import exchange_of
from bagua.tuning.network import Network, fit_network, parse_network
from bagua.tuning.partition import best_cuts
from bagua.tuning.predict import Cluster
from bagua.tuning.profile import CodecSpeed, StepProfile

DEFAULT_STEPS = 20


@command(**options.TAKES_SCRIPT)
def advise(
    *,
    script: Annotated[
        str,
        typer.Argument(help="Python script; a module with -m. It runs with its arguments for some steps."),
    ] = "",
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Passed to the script.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE.json", help="A profile that --save wrote, instead of a script."),
    ] = None,
    network: Annotated[
        str,
        typer.Option(
            "--network",
            metavar="RATE[,DELAY]",
            help="Between hosts, for example 1gbit, or 100mbit,5ms (one way). Default: as in the profile, if it was "
            "recorded on several hosts.",
        ),
    ] = "",
    nodes: Annotated[int, typer.Option("--nodes", "--nnodes", min=1, max=MAX_NODES, help="Hosts.")] = 2,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(
            "--nproc-per-node",
            min=1,
            max=MAX_RANKS,
            help="Ranks on every host. Default: 1; with --profile as it was recorded.",
        ),
    ] = None,
    island_size: Annotated[int, option("island_size")] = 0,
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="Training steps to record.")] = DEFAULT_STEPS,
    algorithms: Annotated[
        list[str] | None,
        typer.Option(
            "--algorithm",
            metavar="NAME[:KEY=VALUE,...]",
            help="Predict this one; may be repeated. Default: all of the library, with all codecs.",
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every codec of every algorithm.")] = False,
    module: Annotated[bool, option("module")] = False,
    env: Annotated[list[str] | None, option("env")] = None,
    workdir: Annotated[Path | None, option("workdir")] = None,
    save: Annotated[Path | None, typer.Option("--save", metavar="FILE.json", help="Keep the recorded profile.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Draw the trade-off (pip install bagua\\[bench])."),
    ] = None,
    output: Output,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the result and errors.")] = False,
) -> None:
    """Predicts what a training step costs with every algorithm and codec, on any
    network and number of hosts, from a short profile of your own script.

    The script runs on this machine as under bagua run, until enough steps are
    recorded, and exchanges gradients as they are. No step leaves this machine.

    exposed: communication that ranks wait for. result: whether it is that of
    gradient all-reduce. Algorithms with a warm-up are predicted after it.
    """
    wire = checked(parse_network, network) if network else None
    chosen = [checked(exchange_of, name).text for name in algorithms] if algorithms else None
    if plot is not None:
        checked(plots.check, plot)
    if (profile is None) == (not script):
        raise UsageError("Name a script to record, or a recorded profile with --profile FILE; not both. [BG103]")
    if profile is not None:
        if save is not None:
            raise UsageError("--save keeps what is recorded now, and --profile records nothing. [BG103]")
        found = checked(StepProfile.load, profile)
        if island_size not in (0, found.island_size):
            raise UsageError(
                f"{profile} was recorded on islands of {found.island_size}: leave --island-size out. [BG103]"
            )
    else:
        if wire is None:
            raise UsageError(
                "Say what is between the hosts, as in --network 1gbit,5ms: one host does not show it. [BG004]"
            )
        ranks = nproc_per_node or max(1, island_size)
        found = record(script, args or [], module, ranks, island_size, steps, env, workdir, quiet)
        if save is not None:
            found.save(save)
    cluster = Cluster.of(found, wire or measured_network(found), nodes, nproc_per_node)
    if cluster.ranks % found.island_size:
        raise UsageError(
            f"{cluster.ranks} ranks on a host hold no whole islands of {found.island_size}, and what FSDP moves "
            "between hosts is not predicted: choose a multiple with --nproc-per-node. [BG114]"
        )
    made = checked(advise_on, found, cluster, chosen)
    document = describe(found, cluster, made) | {"command": command_line()}
    if plot is not None:
        plots.plot_advice(document, plot)
    output.show(document, lambda: show(document, everything or bool(algorithms)))


def record(
    script: str,
    args: list[str],
    module: bool,
    ranks: int,
    island_size: int,
    steps: int,
    env: list[str] | None,
    workdir: Path | None,
    quiet: bool,
) -> StepProfile:
    """Runs the script until its profile is there, then measures the machine. Raises BaguaError; ends the command if the
    script fails."""
    from bagua.cli.run import RunOptions, check_script, local_spec, run_embedded

    check_entry(script, module, no_python=False)
    folder = options.resolve_workdir(workdir)
    if not module:
        check_script(script, folder)
    with tempfile.TemporaryDirectory(prefix="bagua-advise-") as temporary:
        file = Path(temporary) / "profile.json"
        variables = {"BAGUA_PROFILE_FILE": str(file), "BAGUA_PROFILE_STEPS": str(steps), "BAGUA_PROFILE_END": "1"}
        ended = run_embedded(
            RunOptions(
                local_spec(
                    script,
                    args=args,
                    module=module,
                    nproc_per_node=ranks,
                    island_size=island_size,
                    name=f"advise {default_name(script, module)}",
                    workdir=folder,
                    env=parse_env(env) | variables,
                ),
                quiet=quiet,
                aside=True,
            ),
            restarts_left=0,
        )
        if ended.code:
            raise typer.Exit(ended.code)
        if not file.exists():
            raise ServiceError(
                f"{script} ended before {steps} training steps of a model wrapped by with_bagua were recorded (the "
                "first 5 do not count): let it train longer, or ask for fewer with --steps. [BG614]"
            )
        found = StepProfile.load(file)
    return dataclasses.replace(found, speeds=speeds_of_machine(found, quiet))


def speeds_of_machine(profile: StepProfile, quiet: bool) -> Any:
    """Speeds that a profile has room for, measured now."""
    from bagua.cli.bench.tasks import Task, measure
    from bagua.cli.checks.crypto_checks import ask

    task = Task("bagua.bench.ranks.machine", {}, 2, 1, quiet=quiet)
    measured = measure(task, None)
    cipher = ask().gb_per_s * 1e9
    plain = measured["socket"]
    return dataclasses.replace(
        profile.speeds,
        memory=measured["memory"],
        # Connections between hosts are encrypted: the one that sends seals, the other one opens.
        socket=1 / (1 / plain + 2 / cipher) if cipher else plain,
        operation_s=measured["operation_s"],
        codecs={name: CodecSpeed(**speed) for name, speed in measured["codecs"].items()},
    )


def measured_network(profile: StepProfile) -> Network:
    """The network on which the profile was recorded. Raises UsageError where it does not show."""
    if profile.hosts > 1:
        share = 2 * (profile.hosts - 1) / profile.hosts  # of its bytes a host sends so much in an all-reduce
        # With islands a bucket of each of their places shares the wire.
        samples = [(cost.bytes * share * profile.island_size, cost.wire_s) for cost in profile.buckets]
        try:
            return fit_network(samples, trips=2)
        except ValueError:
            pass
    raise UsageError(
        "The profile does not show a network: say what is between hosts, as in --network 1gbit,5ms. [BG004]"
    )


def describe(profile: StepProfile, cluster: Cluster, made: Advice) -> dict[str, Any]:
    """The document: keys are an interface. Milliseconds, and bytes that one host sends in a step."""
    cuts = best_cuts(profile, cluster.network, cluster.hosts, cluster.ranks)
    cut = predict(profile, cluster, exchange_of("gradient_allreduce"), cuts)
    return {
        "network": cluster.network.name,
        "nodes": cluster.hosts,
        "nproc_per_node": cluster.ranks,
        "model_bytes": profile.bytes,
        "compute_ms": profile.compute_s * 1e3,
        "recorded_steps": profile.steps,
        "rows": [_row(row) for row in made.rows],
        "recommended": [_row(row) for row in made.recommended],
        **(_of_islands(profile) if profile.island_size > 1 else {}),
        "best_cuts": {"buckets": cuts, "step_ms": cut.step_s * 1e3, "exposed_ms": cut.exposed_s * 1e3},
    }


def _of_islands(profile: StepProfile) -> dict[str, Any]:
    """``fsdp_bytes``: parameters come twice from the others of the island, and gradients go to them once."""
    return {"island_size": profile.island_size, "fsdp_bytes": 3 * (profile.island_size - 1) * profile.bytes}


def _row(row: Row) -> dict[str, Any]:
    return {
        "algorithm": row.exchange.text,
        "step_ms": row.prediction.step_s * 1e3,
        "exposed_ms": row.prediction.exposed_s * 1e3,
        "sent_bytes": row.prediction.sent_bytes,
        "keeps_result": row.exchange.keeps,
        "optimizer": row.exchange.optimizer or None,
    }


COLUMNS = (
    Column("algorithm", "algorithm", text),
    Column("step_ms", "ms/step"),
    Column("slower", "/ no comm."),
    Column("exposed_ms", "exposed ms"),
    Column("sent_mb", "sent MB/step"),
    Column("result", "result", text),
    Column("note", "", text),
)


def show(document: dict[str, Any], everything: bool) -> None:
    """The table, the fastest first, and the recommendation."""
    from bagua.cli.display.tables import table

    chosen = {row["algorithm"] for row in document["recommended"]}
    rows = [
        {
            **row,
            "slower": row["step_ms"] / document["compute_ms"] if document["compute_ms"] else None,
            "sent_mb": row["sent_bytes"] / 1e6,
            "result": row["keeps_result"],
            "note": "recommended"
            if row["algorithm"] in chosen
            else f"needs {row['optimizer']}"
            if row["optimizer"]
            else "",
        }
        for row in document["rows"]
        if everything or row["algorithm"] in chosen or _shown(row, document["rows"])
    ]
    print(
        f"{document['nodes']} x {document['nproc_per_node']} ranks, {document['network']}; "
        f"{document['model_bytes'] / 1e6:.1f} MB of gradients; {document['compute_ms']:.1f} ms without communication "
        f"(median of {document['recorded_steps']} steps)"
    )
    table([column.heading for column in COLUMNS], cells(rows, COLUMNS))
    print(words(document))


def _shown(row: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """True for each algorithm without a codec, and with its fastest codec."""
    name, _, rest = row["algorithm"].partition(":")
    if "codec=" not in rest:
        return True
    mode = rest.rpartition("codec=")[0]
    fastest = next(one for one in rows if one["algorithm"].startswith(f"{name}:{mode}codec="))
    return fastest is row


def words(document: dict[str, Any]) -> str:
    lines = []
    for row in document["recommended"]:
        kept = {
            "yes": "Keeps the result of gradient all-reduce",
            "rounded": "Rounds gradients, with the same replicas",
            "no": "Trains in another way (see docs/accuracy.md)",
        }[row["keeps_result"]]
        lines.append(f"{kept}: --algorithm {row['algorithm']}, {row['step_ms']:.1f} ms a step.")
    if size := document.get("island_size"):
        lines.append(
            f"Islands of {size} ranks: MB of gradients are those of one rank's shard, which travel between islands. "
            f"Inside one, FSDP moves up to {document['fsdp_bytes'] / 1e6:.1f} MB for each rank and step: it is part of "
            "the computation, as it was recorded on one host."
        )
    best = document["best_cuts"]
    same = next(row for row in document["rows"] if row["keeps_result"] == "yes")
    if best["step_ms"] < 0.98 * same["step_ms"]:
        lines.append(
            f"With the best cut into buckets ({len(best['buckets'])}) gradient all-reduce would take "
            f"{best['step_ms']:.1f} ms a step" + ("." if size else "; --autotune finds it.")  # not between islands
        )
    return "\n".join(lines)
