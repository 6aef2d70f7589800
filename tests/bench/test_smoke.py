"""``bagua bench`` runs, tiny. Nothing is asserted about time. ``e2e/pages/test_pages.py`` has all of its commands."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bagua.algorithms import Algorithm, GlobalAlgorithmRegistry
from bagua.base.algorithm_choice import parse
from bagua.bench import accuracy, emulation

DEADLINE_S = 120.0
TINY = ["--seconds", "0", "--rounds", "1", "--quiet"]


def command(*arguments):
    return [sys.executable, "-P", "-m", "bagua.cli.main", "bench", *arguments]


def bench(*arguments, plot=None):
    """The report of ``bagua bench ARGUMENTS``."""
    draws = plot and importlib.util.find_spec("matplotlib")
    words = command(*arguments, *TINY, "--output", "json", *(["--plot", str(plot)] if draws else []))
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["rows"] and {"benchmark", "command", "machine", "settings", "rows"} == set(report)
    assert not draws or plot.read_bytes().startswith(b"\x89PNG")
    return report["rows"]


@pytest.mark.full
def test_allreduce(tmp_path):
    save = tmp_path / "a.json"
    shape = ("--sizes", "4K,64K", "--nproc-per-node", "2", "--memory", "bucket,ordinary", "--save", str(save))
    rows = bench("allreduce", *shape, "--peers", "gloo,openmpi", plot=tmp_path / "a.png")
    assert {row["system"] for row in rows} == {"bagua", "bagua ordinary", "gloo", "openmpi"}
    assert {row["bytes"] for row in rows} == {4096, 65536}
    assert all(row["ms"] > 0 and row["floor_ms"] > 0 for row in rows)
    assert all((row["times_peer"] is None) == (row["system"] == "gloo") for row in rows)
    assert json.loads(save.read_text())["rows"] == rows


@pytest.mark.full
def test_allreduce_with_a_codec_between_hosts():
    shape = ("--sizes", "64K", "--nnodes", "2", "--nproc-per-node", "1")
    rows = bench("allreduce", *shape, "--codec", "none,minmax8", "--peers", "none")
    assert [row["system"] for row in rows] == ["bagua", "bagua minmax8"]


@pytest.mark.full
def test_train(tmp_path):
    shape = ("--models", "tiny", "--peers", "ddp", "--nnodes", "2", "--nproc-per-node", "1", "--malloc", "default")
    found = bench("train", *shape, "--algorithms", "gradient_allreduce:onebit", plot=tmp_path / "t.png")
    rows = {row["system"]: row for row in found}
    assert list(rows) == ["no communication", "ddp", "bagua onebit"]
    assert all(row["parameters"] == 1000 and row["ms"] > 0 for row in rows.values())
    assert rows["ddp"]["sent_mb"] is None or rows["ddp"]["sent_mb"] > rows["bagua onebit"]["sent_mb"]
    assert rows["bagua onebit"]["sent_mb"] > 0


def test_accuracy_has_every_algorithm():
    made = [parse(setting.algorithm.format(tenth=36, quarter=90)) for setting in accuracy.SETTINGS]
    assert all(isinstance(Algorithm.init(name, **arguments), Algorithm) for name, arguments in made)
    names = {name for name, _ in made}
    assert names == set(GlobalAlgorithmRegistry.available_algorithms()) - {"combine"}  # which makes the others


def run_of(algorithm, value, task="digits", sent=100.0):
    return {
        **{"task": task, "algorithm": algorithm, "value": value, "bytes_per_step": sent, "ms_per_step": 1.0},
        "settings": {"algorithm": algorithm, "optimizer": "one_bit_adam:floor=0.2", "rates": {"charlm": 1.5}},
        "curve": [[1, 0.1, 100, 2.0], [11, 0.2, 100 + 5 * sent, 2.0]],
    }


def test_verdicts_on_accuracy():
    runs = [run_of("gradient_allreduce", value) for value in (0.97, 0.99)]
    runs += [run_of("a", 0.976), run_of("b", 0.974, sent=25.0), run_of("gradient_allreduce", 2.0, "charlm")]
    runs += [run_of("a", 2.03, "charlm"), run_of("b", 2.05, "charlm", sent=0.0)]
    rows = accuracy.rows_of(runs)
    assert [row["verdict"] for row in rows] == ["yes", "yes", "NO", "yes", "yes", "NO"]
    assert [row["share_text"] for row in rows] == ["1", "1", "1/4", "1", "1", "0"]


def needs_namespaces():
    if os.geteuid() != 0:
        pytest.skip("emulated networks need root")
    for program in ("ip", "tc"):
        if shutil.which(program, path=emulation.SEARCH_PATH) is None:
            pytest.skip(f"emulated networks need the program {program} (Debian: iproute2)")
    if not Path("/dev/net/tun").exists():
        pytest.skip("emulated delays need /dev/net/tun")
    probe = f"bgprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=20)
    if made.returncode:
        pytest.skip(f"network namespaces can't be made here: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True, timeout=20)


def namespaces_of(pid):
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith(f"{emulation.PREFIX}{pid}-")}


@pytest.mark.root
@pytest.mark.full
def test_emulated_networks():
    """The rate is really there, and the namespaces go. The next test has a delay."""
    needs_namespaces()
    arguments = ["--sizes", "256K", "--nproc-per-node", "1", "--nnodes", "3", "--emulate", "20mbit"]
    words = command("allreduce", *arguments, *TINY, "--output", "json")
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    times = {(row["network"], row["system"]): row["ms"] for row in json.loads(output)["rows"]}
    # Lower bounds hold on the slowest machine: what is in the bucket passes at once, the rest at 20 Mbit/s.
    assert times["20mbit", "bagua"] > 80 and times["20mbit", "gloo"] > 80
    assert not namespaces_of(process.pid)


@pytest.mark.root
def test_net_between_emulated_hosts():
    """Through the wire, not past it: no system is faster than its rate, or than its delay."""
    needs_namespaces()
    found = bench("net", "--sizes", "1M", "--systems", "bagua,single", "--emulate", "100mbit", "--emulate", "none,10ms")
    rows = {(row["network"], row["system"]): row for row in found}
    for system in ("bagua-net", "1 socket"):
        assert 0 < rows["100mbit", system]["wire_share"] < 1.3, "what fits into the shaper's bucket passes at once"
        assert rows["none,10ms", system]["latency_us"] > 9900


@pytest.mark.root
@pytest.mark.full
def test_ctrl_c_in_an_emulated_network_leaves_nothing():
    needs_namespaces()
    words = command("allreduce", "--sizes", "64M", "--emulate", "10mbit")
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("running"):
            break
    assert len(namespaces_of(process.pid)) == 2
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert not namespaces_of(process.pid)


@pytest.mark.root
def test_what_a_killed_benchmark_left_goes_with_the_next():
    needs_namespaces()
    gone = subprocess.Popen(["true"])
    gone.wait()
    name = emulation.namespace_name(gone.pid, 1, 0)
    subprocess.run(["ip", "netns", "add", name], check=True, timeout=20)
    with emulation.Emulation(emulation.Network()) as made:
        assert namespaces_of(os.getpid()) == set(made.names)
    assert not namespaces_of(gone.pid) and not namespaces_of(os.getpid())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("allreduce --emulate 1gbit --nnodes 17", "2 to 16 hosts"),
        ("allreduce --plot x.doc", "--plot x.doc"),
        ("net --systems pigeons", "choose from"),
        ("allreduce --peers openmpi --nnodes 2", "inside one host: leave --nnodes"),
        ("allreduce --peers openmpi --dtype bfloat16", "has no bfloat16: choose from float32"),
    ],
)
def test_what_can_not_be_is_refused_before_anything_starts(arguments, words):
    done = subprocess.run(command(*arguments.split()), capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2 and words in done.stderr
