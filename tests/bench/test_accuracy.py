"""`bagua bench accuracy`, and the program for tiny steps, run; nothing is asserted about time."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bagua.algorithms import Algorithm, GlobalAlgorithmRegistry
from bagua.base.algorithm_choice import parse
from bagua.bench import accuracy
from bagua.bench.report import Row

DEADLINE_S = 200.0


def output_of(*command: str) -> Any:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full  # it trains two models; the rest of this file needs no ranks
def test_accuracy(tmp_path: Path) -> None:
    plot = tmp_path / "a.png"
    options = ["--only", "local_sgd", "--tasks", "digits", "--share", "0.04", "--seeds", "1", "--quiet"]
    options += ["--nproc-per-node", "1"]
    if importlib.util.find_spec("matplotlib"):
        options += ["--plot", str(plot)]
    found = output_of("-P", "-m", "bagua.cli.main", "bench", "accuracy", *options, "--output", "json")
    rows = {row["algorithm"]: row for row in found["rows"]}
    assert set(rows) == {"gradient_allreduce", "local_sgd"}
    assert 0 < rows["local_sgd"]["share"] < 0.9
    assert rows["gradient_allreduce"]["difference"] == 0 and rows["gradient_allreduce"]["equal"]
    assert all(0.05 < row["value"] <= 1 and row["curves"][0] for row in rows.values())
    assert not plot.exists() or plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full  # no command of bagua's, and the others train, too
def test_tiny_steps() -> None:
    script = str(Path(__file__).with_name("tiny_steps.py"))
    found = output_of(
        script, "--steps", "10", "--nproc-per-node", "2", "--only", "ddp (gloo),gradient_allreduce", "--output", "json"
    )
    assert {row["algorithm"] for row in found["rows"]} == {"ddp (gloo)", "gradient_allreduce"}


@pytest.mark.parametrize("setting", accuracy.SETTINGS, ids=lambda setting: setting.name)
def test_settings_can_be_made(setting: accuracy.Setting) -> None:
    name, arguments = parse(setting.algorithm.format(tenth=36, quarter=90))
    assert isinstance(Algorithm.init(name, **arguments), Algorithm)


def test_every_algorithm_is_trained() -> None:
    names = {parse(setting.algorithm.format(tenth=1, quarter=1))[0] for setting in accuracy.SETTINGS}
    assert names == set(GlobalAlgorithmRegistry.available_algorithms()) - {"combine"}  # which makes the others


def run(algorithm: str, value: float, task: str = "digits", sent: float = 100.0) -> Row:
    return {
        "task": task,
        "algorithm": algorithm,
        "settings": {"algorithm": algorithm, "optimizer": "one_bit_adam:floor=0.2", "rates": {"charlm": 1.5}},
        "value": value,
        "bytes_per_step": sent,
        "ms_per_step": 1.0,
        "curve": [[1, 0.1, 100, 2.0], [11, 0.2, 100 + 5 * sent, 2.0]],
    }


def test_verdicts() -> None:
    runs = [run("gradient_allreduce", value) for value in (0.97, 0.99)] + [run("a", 0.976), run("b", 0.974, sent=25.0)]
    runs += [run("gradient_allreduce", 2.0, "charlm"), run("a", 2.03, "charlm"), run("b", 2.05, "charlm", sent=0.0)]
    rows = accuracy.rows_of(runs)
    assert [row["verdict"] for row in rows] == ["yes", "yes", "NO", "yes", "yes", "NO"]
    assert [row["share_text"] for row in rows] == ["1", "1", "1/4", "1", "1", "0"]
    assert rows[0]["spread_text"] == "2.00 points" and rows[4]["difference_text"] == "-1.50 %"
    table = accuracy.markdown(rows).splitlines()
    assert table[0].startswith("| algorithm") and table[0].count("|") == table[1].count("|") == table[2].count("|")
    cells = ["`b`, `one_bit_adam:floor=0.2`, charlm: rate x 1.5", "97.40%", "**-0.60 points**", "1/4", "1/8"]
    assert table[-1] == f"| {' | '.join([*cells, '2.0500', '**-2.50 %**', '0', '0'])} |"
