"""The programs behind figures of pages run, with little work (--full). Nothing is asserted on time.

``e2e/pages/test_pages.py`` runs those for operators.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.test_smoke import namespaces_of, needs_namespaces

HERE = Path(__file__).parent
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
PROGRAMS = {
    "backward_steps.py --model tiny --network none --steps 2 --warm-up 2": 6,
    "checkpoints.py --model tiny --steps 2 --rounds 2": 4,
    "data.py cache --samples 5": 6,
    "data.py idle --samples 96 --turns 1": 5,
    "data.py samplers --samples 1000": 3,
    "elastic_cost.py --shapes 1x2,2x1 --steps 15 --turn 5": 3,
    "elastic_pauses.py --times 1 --megabytes 4 --ranks 2 --hosts 2": 9,
    "fused_steps.py --tensors 5 --elements 7 --steps 2": 10,
    "island_steps.py --ranks 4 --width 16 --layers 2 --rounds 1": 4,
    "moe.py --nproc-per-node 2 --tokens 8 --width 4 --experts none,ffn --rounds 1 --turn 0": 4,
    "sharded_losses.py --seeds 1 --steps 4": 6,
    "startup.py --rounds 1 --no-cold": 8,
    "tiny_steps.py --steps 10 --nproc-per-node 2 --only gradient_allreduce": 1,
}
"""How many lines each prints."""


def lines_of(*command):
    process = subprocess.Popen(
        [sys.executable, "-P", *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    output, errors = process.communicate(timeout=800)
    assert process.returncode == 0, output + errors
    assert os.geteuid() or not namespaces_of(process.pid)
    return output.splitlines()


@pytest.mark.parametrize("command", PROGRAMS)
def test_it_runs(command):
    name, *arguments = command.split()
    found = lines_of(HERE / name, *arguments)
    assert len(found) == PROGRAMS[command], found


def test_island_memory():
    """Each of two ranks holds half of a model of 1 MB."""
    run = ("-m", "bagua.cli.main", "run", "--island-size", "2", "--nproc-per-node", "2")
    rows = [json.loads(line[line.index("{") :]) for line in lines_of(*run, HERE / "island_memory.py", "--megabytes", 1)]
    assert [row["shard"] for row in rows] == [0.5, 0.5], rows


def test_c10d():
    """A torch whose group "fake" has moved has no silent FSDP2: that is seen here."""
    arguments = ["--only", "ddp,fsdp,operations", "--models", "transformer", "--batch", "1", "--length", "8"]
    rows = lines_of(HERE / "c10d.py", *arguments, "--seconds", "0", "--rounds", "1", "--warm-up", "1")
    assert all(f"{name} " in row for row in rows[:2] for name in ("alone", "silent", "bagua", "gloo")), rows
    assert len(rows) == 6 and all("us over our own" in row for row in rows[2:]), rows


def test_elastic_peers(tmp_path):
    size = ("--ranks", "2", "--hosts", "2", "--megabytes", "4", "--rounds", "1", "--steps", "3")
    systems = ("--systems", "bagua,torchrun-5s,torchft", "--log", tmp_path / "log")
    rows = [line.split(" | ") for line in lines_of(HERE / "elastic_peers.py", *size, *systems)]
    assert [row[6:] for row in rows if row[1:2] == ["bagua"]] == [["0.0", "1 of 1 |"]] * 5
    assert sum(row[1:2] == ["torchrun-5s"] for row in rows) == 5


@pytest.mark.root
def test_a_slow_link():
    """The pair that is limited really is. Nothing can be said about the measured order: this machine may be slower."""
    needs_namespaces()
    arguments = ["--cases", "0-1@8mbit", "--sizes", "1M", "--rate", "100mbit", "--seconds", "0", "--rounds", "1"]
    [row] = [line.strip("|").split("|") for line in lines_of(HERE / "slow_link.py", *arguments) if "| 0-1" in line]
    measured, of_hosts = [float(cell.removesuffix(" s ")) for cell in row[2:]]
    # In the order of the hosts each sends 1.5 MiB to the next one: 1.6 s at 8 Mbit/s.
    assert of_hosts > 1.2 and measured > 0.0
