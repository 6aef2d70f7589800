"""``bagua bench codec``: codecs on one thread, beside memcpy."""

from __future__ import annotations

import typer

from bagua.base.algorithm_choice import CODECS
from bagua.bench import plots
from bagua.bench.report import CODEC, codec_rows
from bagua.bench.units import choose, parse_sizes
from bagua.cli.bench import common
from bagua.cli.command import command
from bagua.cli.options import checked


@command()
def codec(
    *,
    codecs: str = typer.Option(",".join(CODECS[1:]), "--codecs", help="With commas."),
    sizes: str = typer.Option("1M,64M", help="Bytes of float32, with commas."),
    seconds: common.SecondsOption = 5.0,
    rounds: common.RoundsOption = 3,
    report: common.Report,
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
    task = Task("bagua.bench.ranks.codec", config, 1, 1, quiet=report.quiet)
    rows = codec_rows(measure(task, None)["rows"])
    report.show_table("codec", config, rows, CODEC, plots.plot_codec)
