"""``bagua bench``: what communication costs on this machine, beside its floor and its peers."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from bagua.base.algorithm_choice import CODECS, check
from bagua.base.errors import ConfigError, UsageError
from bagua.base.text import json_text
from bagua.bench import plots, report
from bagua.bench.emulation import DEVICE, MOST_HOSTS, check_possible
from bagua.bench.units import choose, parse_sizes
from bagua.cli import options
from bagua.cli.job_options import option
from bagua.cli.options import Output
from bagua.tuning.network import Network, parse_network

bench = typer.Typer(help="Measure: all-reduce, codecs, training steps, networks.", no_args_is_help=True)

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
GLOO = "gloo"
ALONE = "no communication"
MODELS = ("mlp", "resnet", "transformer", "tiny", "mlp-s", "resnet-s", "transformer-s")
PEERS = ("ddp", "fp16", "bf16", "powersgd1", "powersgd2")
ALGORITHM = "gradient_allreduce"
OWN_OPTIMIZER = ("qadam", "one_bit_adam", "zero_one_adam")
DEFAULT_ALGORITHMS = {False: ALGORITHM, True: f"{ALGORITHM},{ALGORITHM}:fp16,{ALGORITHM}:minmax8"}
T = TypeVar("T")

EmulateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--emulate",
        metavar="RATE[,DELAY]",
        help="Two hosts (or --nnodes) as network namespaces with such a wire between them, for example 1gbit, "
        "100mbit,5ms (one way) or none; may be repeated. Needs root.",
        show_default=False,
    ),
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the result (pip install bagua\\[bench]).")
]
SaveOption = Annotated[Path | None, typer.Option("--save", metavar="FILE.json", help="Write the result as JSON.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result and errors.")]
SecondsOption = Annotated[float, typer.Option("--seconds", min=0.0, help="Time for each row of systems, about.")]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, help="Rounds at the least, whatever they take.")]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, help="Computing threads of a rank.")]


def checked(parse: Callable[..., T], *arguments: Any) -> T:
    """``parse(*arguments)``; what it refuses becomes a UsageError."""
    from bagua.base.errors import ConfigError

    try:
        return parse(*arguments)
    except ConfigError as error:
        raise UsageError(str(error)) from error


def networks_of(emulate: list[str] | None, nnodes: int | None) -> tuple[list[Network | None], int]:
    """(networks to measure in, nodes): [None] is this machine as it is. Raises UsageError, also without rights."""
    if not emulate:
        return [None], nnodes or 1
    if nnodes is not None and not 2 <= nnodes <= MOST_HOSTS:
        raise UsageError(f"--emulate makes 2 to {MOST_HOSTS} hosts: --nnodes {nnodes} does not fit. [BG102]")
    found = [checked(parse_network, text) for text in emulate]
    for network in found:
        checked(check_possible, network, nnodes or 2)
    return list(found), nnodes or 2


def command_line() -> str:
    """The command that was called, for the report."""
    return shlex.join(["bagua", *sys.argv[1:]])


def finish(
    found: dict[str, Any],
    columns: Sequence[report.Column],
    output: Output,
    save: Path | None,
    plot: Path | None,
    draw: Callable[[dict[str, Any], Path], None],
    shape: Callable[[list[report.Row]], tuple[list[str], list[list[str]]]] | None = None,
) -> None:
    """Shows the report as it was asked for: a row of ``columns`` for each row, or headings and cells by ``shape``."""
    from bagua.cli.display.tables import table

    if save is not None:
        report.save(found, save)
    if plot is not None:
        draw(found, plot)
    if output is Output.json:
        print(json_text(found), flush=True)
        return
    if shape is not None:
        table(*shape(found["rows"]))
        return
    shown = report.present(found["rows"], columns)
    table([column.heading for column in shown], report.cells(found["rows"], shown))


@bench.command()
def allreduce(
    sizes: str = typer.Option("4K,64K,1M,16M,64M", help="Bytes of the vector, with commas."),
    nnodes: int | None = typer.Option(
        None, "--nnodes", min=1, max=64, help="Node daemons. Default: 1.", show_default=False
    ),
    nproc_per_node: Annotated[int, option("nproc_per_node")] = 2,
    dtype: str = typer.Option("float32", help=f"One of {', '.join(DTYPES)}."),
    codec: str = typer.Option(
        "none", help=f"How vectors cross between hosts, with commas: {', '.join(CODECS)}. One system for each."
    ),
    memory: str = typer.Option(
        "bucket", help="bucket (of bagua.empty, as gradients are), ordinary, or both with commas."
    ),
    peers: str = typer.Option(GLOO, help="gloo, or none."),
    seconds: SecondsOption = 3.0,
    rounds: RoundsOption = 3,
    threads: ThreadsOption = 1,
    emulate: EmulateOption = None,
    output: options.OutputOption = Output.text,
    plot: PlotOption = None,
    save: SaveOption = None,
    quiet: QuietOption = False,
) -> None:
    """All-reduce over sizes: Bagua and Gloo in the same processes, turn by turn;
    medians, of the slowest rank.

    GB/s is algorithm bandwidth: bytes of one rank's vector / time. bus GB/s is
    that times 2(n-1)/n for n ranks, as in nccl-tests: what crosses each rank's
    boundary at the least.

    floor, on one host: a native loop measured in the same run, one pass over
    memory (every rank sums its slice of all vectors into all results). Between
    emulated hosts: 2(h-1)/h of the (encoded) bytes at the rate, as TCP payload
    in Ethernet frames, less what fits into the shaper's bucket, plus one delay.
    "of floor" is floor / time.
    """
    from bagua.cli.bench.tasks import Task, measure

    systems = [
        {"name": _system_name(place, name), "memory": place, "codec": name}
        for place in checked(choose, memory, ("bucket", "ordinary"), "--memory")
        for name in checked(choose, codec, CODECS, "--codec")
    ]
    if checked(choose, peers, (GLOO, "none"), "--peers") == [GLOO]:
        systems.append({"name": GLOO, "memory": GLOO, "codec": "none"})
    checked(choose, dtype, DTYPES, "--dtype")
    if dtype != "float32" and codec != "none":
        raise UsageError(f"--codec {codec} encodes float32: leave --dtype {dtype} out. [BG102]")
    if plot is not None:
        checked(plots.check, plot)
    networks, nodes = networks_of(emulate, nnodes)
    settings = {
        "nnodes": nodes,
        "nproc_per_node": nproc_per_node,
        "dtype": dtype,
        "seconds": seconds,
        "rounds": rounds,
        "threads": threads,
    }
    rows: list[report.Row] = []
    for network in networks:
        config = {
            "sizes": checked(parse_sizes, sizes),
            "systems": systems,
            "nodes": nodes,
            "emulated": network is not None,
            "rate": network.rate if network else 0.0,
            "delay_s": network.delay_s if network else 0.0,
            **settings,
        }
        task = Task(
            module="bagua.bench.ranks.allreduce",
            config=config,
            nnodes=nodes,
            nproc_per_node=nproc_per_node,
            env={"OMP_NUM_THREADS": str(threads)},
            quiet=quiet,
        )
        found = measure(task, network)["rows"]
        rows += report.allreduce_rows(found, network.name if network else None, nodes * nproc_per_node, GLOO)
    made = report.document("allreduce", command_line(), settings, rows)
    finish(made, report.ALLREDUCE, output, save, plot, plots.plot_allreduce)


def _system_name(memory: str, codec: str) -> str:
    parts = ["bagua", *(["ordinary"] if memory == "ordinary" else []), *([codec] if codec != "none" else [])]
    return " ".join(parts)


@bench.command()
def codec(
    codecs: str = typer.Option(",".join(CODECS[1:]), "--codecs", help="With commas."),
    sizes: str = typer.Option("1M,64M", help="Bytes of float32, with commas."),
    seconds: SecondsOption = 5.0,
    rounds: RoundsOption = 3,
    output: options.OutputOption = Output.text,
    plot: PlotOption = None,
    save: SaveOption = None,
    quiet: QuietOption = False,
) -> None:
    """Codecs on one thread, beside memcpy. GB/s count bytes of float32, whatever
    becomes of them.

    encode: a vector into a message. decode-and-add: a message onto a vector.
    recode: both in one pass, (vector + message) / 2 into a message and its
    decoded values, with error feedback where the codec has it by default.
    ratio: bytes of float32 per byte of message. error: of one encoding of
    normal data, relative, L2.
    """
    from bagua.cli.bench.tasks import Task, measure

    config = {
        "codecs": checked(choose, codecs, CODECS[1:], "--codecs"),
        "sizes": checked(parse_sizes, sizes),
        "seconds": seconds,
        "rounds": rounds,
    }
    if plot is not None:
        checked(plots.check, plot)
    task = Task("bagua.bench.ranks.codec", config, 1, 1, {"OMP_NUM_THREADS": "1"}, quiet)
    rows = report.codec_rows(measure(task, None)["rows"])
    finish(report.document("codec", command_line(), config, rows), report.CODEC, output, save, plot, plots.plot_codec)


@bench.command()
def train(
    models: str = typer.Option("mlp,resnet,transformer", help=f"With commas: {', '.join(MODELS)}."),
    algorithms: str = typer.Option(
        "",
        help="With commas: NAME, NAME:key=value,..., or gradient_allreduce:CODEC. Default: gradient_allreduce, and "
        "between hosts with fp16 and minmax8 as well.",
        show_default=False,
    ),
    peers: str = typer.Option("ddp,fp16", help=f"With commas: {', '.join(PEERS)} (hooks of DDP), or none."),
    nnodes: int | None = typer.Option(
        None, "--nnodes", min=1, max=64, help="Node daemons. Default: 1.", show_default=False
    ),
    nproc_per_node: int | None = typer.Option(
        None, "--nproc-per-node", min=1, max=1024, help="Default: 2; with --emulate 1.", show_default=False
    ),
    malloc: str = typer.Option(
        "raised",
        help="raised: mmap and trim thresholds as daemons set them for ranks; default: glibc's. For all systems.",
    ),
    seconds: SecondsOption = 15.0,
    rounds: RoundsOption = 3,
    warm_up: int = typer.Option(4, "--warm-up", min=1, help="Steps of each system that are not counted."),
    threads: ThreadsOption = 1,
    emulate: EmulateOption = None,
    output: options.OutputOption = Output.text,
    plot: PlotOption = None,
    save: SaveOption = None,
    quiet: QuietOption = False,
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
    if plot is not None:
        checked(plots.check, plot)
    chosen = checked(choose, models, MODELS, "--models")
    networks, nodes = networks_of(emulate, nnodes)
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
    rows: list[report.Row] = []
    for network in networks:
        for model in chosen:
            config = {**settings, "model": model}
            env = {"OMP_NUM_THREADS": str(threads)}
            found = measure(Task("bagua.bench.ranks.train", config, nodes, ranks, env, quiet), network)["rows"]
            rows += report.train_rows(found, network.name if network else None, model, "ddp", ALONE)
    settings |= {"nnodes": nodes, "nproc_per_node": ranks}
    made = report.document("train", command_line(), settings, rows)
    if output is not Output.json and not quiet:
        print(f"{nodes} x {ranks} ranks; malloc's thresholds: {malloc}, for all systems")
    finish(made, report.TRAIN, output, save, plot, plots.plot_train)


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


@bench.command()
def network(
    nnodes: int | None = typer.Option(
        None, "--nnodes", min=2, max=256, help="Node daemons. Default: 2; of a cluster: all.", show_default=False
    ),
    size: str = typer.Option("16M", help="Bytes of one message that measures bandwidth."),
    seconds: SecondsOption = 1.0,
    rounds: RoundsOption = 5,
    emulate: EmulateOption = None,
    output: options.OutputOption = Output.text,
    plot: PlotOption = None,
    save: SaveOption = None,
    quiet: QuietOption = False,
    coordinator: options.CoordinatorOption = None,
    token_file: options.TokenFileOption = None,
    tls: options.TlsOption = None,
) -> None:
    """Bandwidth and latency from every daemon to every other, on the path that
    gradients take; pair after pair, while the others are silent.

    us one way: half a round trip of 8 bytes between ranks, so both daemons are
    on the way. Gbit/s: payload of a message over the time until its answer of 8
    bytes is back, less such a round trip. With --coordinator, on the nodes of
    that cluster; else on daemons started here.
    """
    from bagua.cli.bench.tasks import Task, measure, measure_on_cluster

    if plot is not None:
        checked(plots.check, plot)
    if coordinator and emulate:
        raise UsageError("--coordinator and --emulate exclude each other. [BG103]")
    sizes = checked(parse_sizes, size)
    settings = {"size": sizes[0], "seconds": seconds, "rounds": rounds}
    rows: list[report.Row] = []
    if coordinator:
        found, names = measure_on_cluster(
            lambda nodes: Task("bagua.bench.ranks.network", settings, nodes, 1, quiet=quiet, result="-"),
            nnodes,
            (coordinator, token_file, tls),
        )
        rows = report.network_rows(found["rows"], None, names)
    else:
        networks, nodes = networks_of(emulate, nnodes or 2)
        for wire in networks:
            task = Task("bagua.bench.ranks.network", settings, nodes, 1, quiet=quiet)
            names = {rank: f"node-{rank}" for rank in range(nodes)}
            rows += report.network_rows(measure(task, wire)["rows"], wire.name if wire else None, names)
    made = report.document("network", command_line(), settings, rows)
    show = None if any(row["network"] for row in rows) else report.matrix
    finish(made, report.NETWORK, output, save, plot, plots.plot_network, show)
