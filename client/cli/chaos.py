"""``bagua chaos``: faults by chance, and a look whether the promises hold."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bagua.cli.command import command
from bagua.cli.job_options import option
from bagua.cli.options import Output, checked

if TYPE_CHECKING:
    from bagua.cli.faults.campaign import Findings, Wanted


@command()
def chaos(
    *,
    minutes: float = typer.Option(1.0, "--minutes", min=0.01, help="For how long."),
    seed: int = typer.Option(0, "--seed", help="Seed of the faults: the same seed, the same faults."),
    faults: int = typer.Option(0, "--faults", min=0, help="End after so many. 0: when the time is over."),
    kinds: str = typer.Option("", "--kinds", help="With commas. Default: all."),
    nnodes: int = typer.Option(3, "--nnodes", min=1, max=16, help="Node daemons."),
    nproc_per_node: Annotated[int, option("nproc_per_node")] = 2,
    island_size: Annotated[int, option("island_size")] = 0,
    workers: int = typer.Option(0, "--workers", min=0, help="Processes that load samples, for each rank."),
    postgresql: Annotated[
        bool, typer.Option("--postgresql", help="Two coordinators over a PostgreSQL of its own, for more faults.")
    ] = False,
    output: Output,
    log_dir: Path | None = typer.Option(None, help="Copy all logs and diaries there."),
    list_kinds: Annotated[bool, typer.Option("--list", help="Say which faults there are, and end.")] = False,
) -> None:
    """Kills, stops and cuts what an elastic job needs, and checks that it goes on.

    Starts a cluster of its own on this machine and trains a small model that
    counts how often each sample was used. Nobody else's processes are touched.

    Exit code 1: a sample was lost or used twice, replicas differ, or a job did
    not go on. A pause is the longest time between two steps of a rank that is
    left, beyond the step, and beyond the fault itself where nobody can train
    during it.
    """
    from bagua.chaos.plan import KINDS, choose
    from bagua.cli.display.tables import table
    from bagua.cli.faults.campaign import Wanted, what_is_there

    if list_kinds:
        table(("kind", "fault"), [(name, kind.words) for name, kind in KINDS.items()])
        return
    chosen, left_out = checked(choose, kinds, what_is_there(postgresql))
    for name, why in left_out.items():
        print(f"{name} is left out: {why}", file=sys.stderr)
    islands = max(island_size, 1)
    wanted = Wanted(60 * minutes, faults, seed, tuple(chosen), nnodes, nproc_per_node, workers, postgresql, islands)
    found = _run(wanted, log_dir.absolute() if log_dir else None)
    output.show({"settings": vars(wanted), **found.document()}, lambda: _show(found))
    raise typer.Exit(1 if found.broken else 0)


def _run(wanted: Wanted, log_dir: Path | None) -> Findings:
    from bagua.chaos.plan import KINDS
    from bagua.cli.cluster.local_cluster import RunFolder, forget_other_service
    from bagua.cli.cluster.native import NativeBuild
    from bagua.cli.display.terminal import Terminal
    from bagua.cli.faults.campaign import Chaos
    from bagua.cli.faults.cluster import ChaosCluster, copy_logs, private_disk

    forget_other_service()
    state = RunFolder()
    needs = {KINDS[kind].needs for kind in wanted.kinds}
    try:
        with (
            private_disk(state.path) if "root" in needs else contextlib.nullcontext(),
            tempfile.TemporaryDirectory(prefix="bagua-chaos-") as folder,
            ChaosCluster(state.path, wanted.nproc_per_node, wanted.postgresql, "firewall" in needs) as cluster,
            NativeBuild() as build,
        ):
            build.wait(Terminal().advance)
            tell = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
            try:
                return Chaos(wanted, cluster, Path(folder), tell).run()
            finally:
                if log_dir is not None:
                    copy_logs(state.path, log_dir, "*.log*")
                    copy_logs(Path(folder), log_dir, "diary-*")
    finally:
        state.remove()


def _show(found: Findings) -> None:
    from bagua.chaos.plan import JOIN
    from bagua.chaos.report import by_kind
    from bagua.cli.display.tables import table

    headings = ("kind", "times", "lost", "doubled", "different", "stuck", "pause, ms", "longest")  # fit in 80 columns
    rows = [row.cells() for row in by_kind(found.played)]
    table(headings, [[kind, *numbers] for kind, _, *numbers in rows])
    count = sum(one.kind != JOIN for one in found.played)
    print(
        f"\n{count} faults in {found.seconds / 60:.1f} minutes; {found.jobs} jobs, {found.steps} steps, "
        f"{found.epochs} epochs. {sum(map(len, found.broken.values())) or 'No'} promises broken."
    )
    for lines in found.broken.values():
        for line in lines:
            print(f"BROKEN: {line}")
