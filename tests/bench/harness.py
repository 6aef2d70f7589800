"""What the benchmarks share: ranks are started by ``bagua run``, write one JSON file, and a table is printed from it.

A benchmark is one script in two roles: started by hand it is the launcher, started by ``bagua run`` (with the option
``--worker FILE``) a rank. Times are medians of interleaved rounds; ratios hold better than milliseconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

JOB_DEADLINE_S = 1800.0


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", choices=("text", "json"), default="text")
    made.add_argument("--smoke", action="store_true", help="seconds only: does it run at all?")
    made.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return made


def launch(script: str, nproc: int, arguments: Sequence[str], nnodes: int = 1) -> Any:
    """Runs ``script --worker FILE ARGUMENTS`` on ``nproc`` ranks per node; returns what rank 0 wrote to FILE."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-P", "-m", "bagua.cli.main", "run", "--quiet", "--nnodes", str(nnodes)]
        command += ["--nproc-per-node", str(nproc), script, "--worker", str(result), *arguments]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=JOB_DEADLINE_S
        )
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\n{done.stdout}\nended with exit code {done.returncode}")
        return json.loads(result.read_text())


def interleave(variants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Runs every variant once per round, in an order that turns; returns their values without the first round."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for turn in range(rounds + 1):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            value = variants[name]()
            if turn:
                found[name].append(value)
    return found


def timed(action: Callable[[], object]) -> float:
    """Milliseconds that ``action`` takes."""
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1e3


def slowest(value: float) -> float:
    """The largest of all ranks' values: an operation is over when the last rank has it."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def medians(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: round(statistics.median(values), 4) for name, values in found.items()}


def finish(options: argparse.Namespace, rows: Sequence[Mapping[str, Any]], unit: str) -> None:
    """Prints rows as a table, or as one JSON document."""
    if options.output == "json":
        machine = {"system": platform.platform(), "python": platform.python_version()}
        print(json.dumps({"unit": unit, "machine": machine, "rows": list(rows)}))
        return
    headings = list(rows[0])
    cells = [headings, *([_cell(row[heading]) for heading in headings] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    print(f"({unit})")
    for row in cells:
        print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))


def _cell(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 100
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )
