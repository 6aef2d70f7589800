"""The programs behind figures of pages run, with little work (--full). Nothing is asserted on time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rig.clusters import kubelet, kubernetes

from tests.bench.test_smoke import DEADLINE_S, TINY, namespaces_of, needs_namespaces

HERE = Path(__file__).parent
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
PROGRAMS = {
    "backward_steps.py --model tiny --network none --steps 2 --warm-up 2": 4,
    "checkpoints.py --model tiny --steps 2 --rounds 2": None,
    "data.py cache --samples 5": 6,
    "data.py idle --samples 96 --turns 1": 5,
    "data.py samplers --samples 1000": 3,
    "elastic_cost.py --shapes 1x2,2x1 --steps 15 --turn 5": 2,
    "elastic_pauses.py --times 1 --megabytes 4 --ranks 2 --hosts 2": 8,
    "fused_steps.py --tensors 5 --elements 7 --steps 2": 8,
    "moe.py --nproc-per-node 2 --tokens 8 --width 4 --experts none,ffn --rounds 1 --turn 0": 2,
    "startup.py --rounds 1 --no-cold": 8,
    "tiny_steps.py --steps 10 --nproc-per-node 2 --only gradient_allreduce": 1,
}
"""How many rows each has."""


def document_of(*command):
    done = subprocess.run(
        [sys.executable, "-P", *map(str, command), "--output", "json"], capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("command", PROGRAMS)
def test_it_runs(command):
    name, *arguments = command.split()
    found = document_of(HERE / name, *arguments)
    if PROGRAMS[command]:
        assert len(found if isinstance(found, list) else found["rows"]) == PROGRAMS[command]


def test_c10d():
    """A torch whose group "fake" has moved has no silent FSDP2: that is seen here."""
    arguments = ["--only", "ddp,fsdp,operations", "--models", "transformer", "--batch", "1", "--length", "8"]
    rows = document_of(HERE / "c10d.py", *arguments, *TINY, "--warm-up", "1")["rows"]
    assert [set(row["seconds"]) for row in rows[:2]] == [{"alone", "silent", "bagua", "gloo"}] * 2
    assert [set(row["seconds"]) for row in rows[2:]] == [{"bagua", "gloo", "bagua.torch_api"}] * 4


def test_elastic_peers(tmp_path):
    size = ("--ranks", "2", "--hosts", "2", "--megabytes", "4", "--rounds", "1", "--steps", "3")
    systems = ("--systems", "bagua,torchrun-5s,torchft", "--log", tmp_path / "log")
    found = document_of(HERE / "elastic_peers.py", *size, *systems)
    cells = {(cell["fault"], cell["system"]): cell for cell in found["cells"]}
    for fault in ("rank", "host", "silent", "daemon", "join"):
        assert cells[fault, "bagua"]["found"][0]["in_vain"] == 0 and (fault, "torchrun-5s") in cells


@pytest.mark.root
def test_a_slow_link():
    """The pair that is limited really is. Nothing can be said about the measured order: this machine may be slower."""
    needs_namespaces()
    arguments = ["--cases", "0-1@8mbit", "--sizes", "1M", "--rate", "100mbit", "--seconds", "0", "--rounds", "1"]
    command = [sys.executable, HERE / "slow_link.py", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    [row] = [line.strip("|").split("|") for line in output.splitlines() if line.startswith("| 0-1")]
    measured, of_hosts = [float(cell.removesuffix(" s ")) for cell in row[2:]]
    # In the order of the hosts each sends 1.5 MiB to the next one: 1.6 s at 8 Mbit/s.
    assert of_hosts > 1.2 and measured > 0.0
    assert not namespaces_of(process.pid)


@pytest.mark.parametrize("words", ["", "--record"])
def test_study(tmp_path, words):
    pytest.importorskip("matplotlib")
    options = ["--small", "--models", "tiny", "--out", tmp_path, *([words, "--profiles", tmp_path] if words else [])]
    command = [sys.executable, "-P", HERE / "study.py", *options]
    done = subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("*.png"))) == 5
    found = json.loads((tmp_path / "results.json").read_text())
    assert len(found["cells"]) == 3 * 2 * 2 and found["measured"] and "| 4 |" in (tmp_path / "many.md").read_text()


def control_plane(*options):
    """The document of a comparison."""
    found = document_of(HERE / "control_plane.py", "--compare", "--times", "1", *options)
    plain, other = found["ways"].values()
    names = [row["what"] for row in plain]
    assert names == [row["what"] for row in other] == [one["what"] for one in found["compared"]]
    assert all(one["times"] > 0 for one in found["compared"])
    return found


def test_control_plane_with_all_that_protects_it(postgres_url):
    """Beside the same without."""
    small = ["--waiting", "20", "--trivial", "8", "--hosts", "8"]
    found = control_plane("--rows", "queue", "wide", "start", *small, "--accounts", "--tls", "--postgres", postgres_url)
    assert list(found["ways"]) == ["SQLite", "accounts, TLS, PostgreSQL"] and len(found["compared"]) > 9


def test_control_plane_with_the_operator():
    if reason := kubernetes.missing() or kubelet.missing():
        pytest.skip(reason)
    assert len(control_plane("--rows", "start", "--operator")["compared"]) == 2
