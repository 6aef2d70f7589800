"""``bagua bench train``: training steps, beside DDP and no communication."""

from __future__ import annotations

import re

import typer

from bagua.base.algorithm_choice import CODECS, check
from bagua.base.errors import ConfigError, UsageError
from bagua.bench import plots
from bagua.bench.emulation import DEVICE
from bagua.bench.report import TRAIN, Row, train_rows
from bagua.bench.units import choose
from bagua.cli.bench import common
from bagua.cli.command import command
from bagua.cli.options import Output, checked
from bagua.tuning.exchanges import OWN_OPTIMIZER

ALONE = "no communication"
MODELS = ("mlp", "resnet", "transformer", "tiny", "mlp-s", "resnet-s", "transformer-s")
PEERS = ("ddp", "fp16", "bf16", "powersgd1", "powersgd2")
ALGORITHM = "gradient_allreduce"
DEFAULT_ALGORITHMS = {False: ALGORITHM, True: f"{ALGORITHM},{ALGORITHM}:fp16,{ALGORITHM}:minmax8"}


@command()
def train(
    *,
    models: str = typer.Option("mlp,resnet,transformer", help=f"With commas: {', '.join(MODELS)}."),
    algorithms: str = typer.Option(
        "",
        help="With commas: NAME, NAME:key=value,..., or gradient_allreduce:CODEC. Default: gradient_allreduce, and "
        "between hosts with fp16 and minmax8 as well.",
    ),
    peers: str = typer.Option("ddp,fp16", help=f"With commas: {', '.join(PEERS)} (hooks of DDP), or none."),
    nnodes: int | None = typer.Option(None, "--nnodes", min=1, max=64, help="Node daemons. Default: 1."),
    nproc_per_node: int | None = typer.Option(
        None, "--nproc-per-node", min=1, max=1024, help="Default: 2; with --emulate 1."
    ),
    malloc: str = typer.Option(
        "raised",
        help="raised: mmap and trim thresholds as daemons set them for ranks; default: glibc's. For all systems.",
    ),
    seconds: common.SecondsOption = 15.0,
    rounds: common.RoundsOption = 3,
    warm_up: int = typer.Option(4, "--warm-up", min=1, help="Steps of each system that are not counted."),
    threads: common.ThreadsOption = 1,
    emulate: common.EmulateOption = None,
    report: common.Report,
) -> None:
    """Training steps: Bagua, DDP over Gloo with its hooks, and no communication,
    in the same processes, turn by turn; medians of the slowest rank.

    mlp: 4 layers of 4096, 67.1 M parameters, batch 32. resnet: ResNet-18, 11.2
    M, 32 images of 3x32x32. transformer: 6 layers of 512, 26.3 M, 8 sequences
    of 128 tokens. tiny: 1,000 parameters.

    x DDP: how many times as fast as DDP at its defaults; x best DDP: as the
    fastest DDP variant of the run. / no comm.: time over that of the step
    without communication. exposed: communication that a rank waited for;
    hidden: that ran beside its computation. sent MB/step: by one host; of
    emulated networks as the device counts them, with headers.
    """
    from bagua.cli.bench.tasks import Task, measure

    if malloc not in ("raised", "default"):
        raise UsageError(f"--malloc {malloc!r}: choose from raised, default. [BG102]")
    chosen = checked(choose, models, MODELS, "--models")
    networks, nodes = common.networks_of(emulate, nnodes)
    ranks = nproc_per_node or (1 if emulate else 2)
    settings = {
        "systems": train_systems(algorithms or DEFAULT_ALGORITHMS[nodes > 1], peers),
        "device": DEVICE if emulate else "",
        "malloc": malloc,
        "seconds": seconds,
        "rounds": rounds,
        "warm_up": warm_up,
        "threads": threads,
    }
    rows: list[Row] = []
    for network in networks:
        for model in chosen:
            config = {**settings, "model": model}
            task = Task("bagua.bench.ranks.train", config, nodes, ranks, quiet=report.quiet)
            found = measure(task, network)["rows"]
            rows += train_rows(found, network.name if network else None, model, "ddp", ALONE)
    settings |= {"nnodes": nodes, "nproc_per_node": ranks}
    if report.output is not Output.json and not report.quiet:
        print(f"{nodes} x {ranks} ranks; malloc's thresholds: {malloc}, for all systems")
    report.show_table("train", settings, rows, TRAIN, plots.plot_train)


def train_systems(algorithms: str, peers: str) -> list[dict[str, str]]:
    """The systems to train with, the baselines first. Raises UsageError."""
    systems = [{"name": ALONE, "kind": "alone"}]
    for peer in checked(choose, peers, (*PEERS, "none"), "--peers"):
        if peer != "none":
            systems.append({"name": peer if peer == "ddp" else f"ddp {peer}", "kind": "ddp", "hook": peer})
    for label, text in checked(parse_algorithms, algorithms).items():
        systems.append({"name": f"bagua {label}".strip(), "kind": "bagua", "algorithm": text})
    return systems


def parse_algorithms(text: str) -> dict[str, str]:
    """``"a,b:x=1,y=2"`` -> the two algorithms by their labels; gradient all-reduce's is its codec.

    Raises ConfigError for what can't be trained with here.
    """
    found = {}
    for part in re.split(r",(?!\w+=)", text):
        name, _, rest = part.strip().partition(":")
        if rest in CODECS[1:]:
            rest = f"codec={rest}"
        if name in OWN_OPTIMIZER:
            raise ConfigError(
                f"--algorithms: {name} brings its own optimizer; bagua bench accuracy trains with it. [BG305]"
            )
        label = part.strip().removeprefix(ALGORITHM).lstrip(":")
        try:
            found[label] = check(f"{name}:{rest}" if rest else name)
        except ConfigError as error:
            raise ConfigError(f"--algorithms: {error}") from error
    return found
