"""Every benchmark runs, tiny. Nothing is asserted about time."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rig.clusters import kubelet, kubernetes

from bagua.bench import emulation

HERE = Path(__file__).parent
DEADLINE_S = 120.0
TINY = ["--seconds", "0", "--rounds", "1", "--quiet"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "bagua.cli.main", "bench", *arguments]


def bench(*arguments: str) -> dict[str, Any]:
    """The report of ``bagua bench ARGUMENTS``."""
    done = subprocess.run(
        command(*arguments, *TINY, "--output", "json"), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["rows"]
    assert {"benchmark", "command", "machine", "settings", "rows"} == set(report)
    return report


def picture(path: Path) -> list[str]:
    """Options that draw, where that is possible."""
    return ["--plot", str(path)] if importlib.util.find_spec("matplotlib") else []


def check_picture(path: Path) -> None:
    if importlib.util.find_spec("matplotlib"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_allreduce(tmp_path: Path) -> None:
    plot, save = tmp_path / "a.png", tmp_path / "a.json"
    found = bench(
        "allreduce",
        "--sizes",
        "4K,64K",
        "--nproc-per-node",
        "2",
        "--memory",
        "bucket,ordinary",
        "--save",
        str(save),
        *picture(plot),
    )
    assert {row["system"] for row in found["rows"]} == {"bagua", "bagua ordinary", "gloo"}
    assert {row["bytes"] for row in found["rows"]} == {4096, 65536}
    assert all(row["ms"] > 0 and row["floor_ms"] > 0 for row in found["rows"])
    assert all((row["times_peer"] is None) == (row["system"] == "gloo") for row in found["rows"])
    assert json.loads(save.read_text())["rows"] == found["rows"]
    check_picture(plot)


@pytest.mark.full
def test_c10d() -> None:
    """A torch whose group "fake" has moved has no silent FSDP2: that is seen here."""
    arguments = ["--only", "ddp,fsdp,operations", "--models", "transformer", "--batch", "1", "--length", "8"]
    done = subprocess.run(
        [sys.executable, str(HERE / "c10d.py"), *arguments, *TINY, "--warm-up", "1", "--output", "json"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    steps, operations = rows[:2], rows[2:]
    assert [set(row["seconds"]) for row in steps] == [{"alone", "silent", "bagua", "gloo"}] * 2
    assert [set(row["seconds"]) for row in operations] == [{"bagua", "gloo", "bagua.torch_api"}] * 4


@pytest.mark.full
def test_allreduce_with_a_codec_between_hosts() -> None:
    found = bench(
        "allreduce",
        "--sizes",
        "64K",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--codec",
        "none,minmax8",
        "--peers",
        "none",
    )
    assert [row["system"] for row in found["rows"]] == ["bagua", "bagua minmax8"]
    assert all(row["floor_ms"] is None for row in found["rows"])


@pytest.mark.full
def test_codec(tmp_path: Path) -> None:
    found = bench("codec", "--sizes", "64K", *picture(tmp_path / "c.png"))
    assert len(found["rows"]) == 8
    assert all(row["ratio"] > 1 and 0 < row["error"] < 1 and row["encode"] > 0 for row in found["rows"])
    check_picture(tmp_path / "c.png")


@pytest.mark.full
def test_train(tmp_path: Path) -> None:
    found = bench(
        *("train", "--models", "tiny", "--peers", "ddp", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--algorithms", "gradient_allreduce:onebit", "--malloc", "default"),
        *picture(tmp_path / "t.png"),
    )
    rows = {row["system"]: row for row in found["rows"]}
    assert list(rows) == ["no communication", "ddp", "bagua onebit"]
    assert all(row["parameters"] == 1000 and row["ms"] > 0 for row in rows.values())
    assert rows["ddp"]["sent_mb"] is None or rows["ddp"]["sent_mb"] > rows["bagua onebit"]["sent_mb"]
    assert rows["bagua onebit"]["sent_mb"] > 0
    assert rows["bagua onebit"]["times_best_ddp"] <= rows["bagua onebit"]["times_ddp"]
    check_picture(tmp_path / "t.png")


@pytest.mark.full  # test_net_between_emulated_hosts measures networks
def test_network(tmp_path: Path) -> None:
    found = bench("network", "--size", "64K", *picture(tmp_path / "n.png"))
    assert [(row["source"], row["target"]) for row in found["rows"]] == [("node-0", "node-1"), ("node-1", "node-0")]
    assert all(row["gbits"] > 0 and row["latency_us"] > 0 for row in found["rows"])
    check_picture(tmp_path / "n.png")


def test_net(tmp_path: Path) -> None:
    plot = tmp_path / "n.png"
    found = bench("net", "--sizes", "1K,200K", "--systems", "bagua,single,polling,multiple", *picture(plot))
    rows = {(row["bytes"], row["system"]): row for row in found["rows"]}
    names = ("bagua-net", "1 socket", "1 socket, polling", "4 sockets")
    assert list(rows) == [(size, name) for size in (1024, 204800) for name in names]
    assert all(row["gbits"] > 0 and row["latency_us"] > 0 for row in rows.values())
    assert all((row["times_single"] is None) == (row["system"] == "1 socket") for row in rows.values())
    check_picture(plot)


def needs_namespaces() -> None:
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


def namespaces_of(pid: int) -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith(f"{emulation.PREFIX}{pid}-")}


@pytest.mark.root
@pytest.mark.full
@pytest.mark.parametrize("hosts", [2, 3])
def test_emulated_networks(hosts: int) -> None:
    """The rate is really there, and the namespaces go. The next test has a delay."""
    needs_namespaces()
    arguments = ["--sizes", "256K", "--nproc-per-node", "1", "--nnodes", str(hosts), "--emulate", "20mbit"]
    process = subprocess.Popen(
        command("allreduce", *arguments, *TINY, "--output", "json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    times = {(row["network"], row["system"]): row["ms"] for row in json.loads(output)["rows"]}
    # Lower bounds hold on the slowest machine: what is in the bucket passes at once, the rest at 20 Mbit/s.
    assert times["20mbit", "bagua"] > 80
    assert times["20mbit", "gloo"] > 80
    assert not namespaces_of(process.pid)


@pytest.mark.root
@pytest.mark.full
def test_a_slow_link() -> None:
    """The pair that is limited really is. Nothing can be said about the measured order: this machine may be slower."""
    needs_namespaces()
    arguments = ["--cases", "0-1@8mbit", "--sizes", "1M", "--rate", "100mbit", "--seconds", "0", "--rounds", "1"]
    process = subprocess.Popen(
        [sys.executable, str(HERE / "slow_link.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    [row] = [line.strip("|").split("|") for line in output.splitlines() if line.startswith("| 0-1")]
    measured, of_hosts = [float(cell.removesuffix(" s ")) for cell in row[2:]]
    # In the order of the hosts each sends 1.5 MiB to the next one: 1.6 s at 8 Mbit/s.
    assert of_hosts > 1.2 and measured > 0.0
    assert not namespaces_of(process.pid)


@pytest.mark.root
def test_net_between_emulated_hosts() -> None:
    """Through the wire, not past it: no system is faster than its rate."""
    needs_namespaces()
    found = bench("net", "--sizes", "1M", "--systems", "bagua,single", "--emulate", "100mbit", "--emulate", "none,10ms")
    rows = {(row["network"], row["system"]): row for row in found["rows"]}
    assert len(rows) == 4
    for system in ("bagua-net", "1 socket"):
        assert 0 < rows["100mbit", system]["wire_share"] < 1.3, "what fits into the shaper's bucket passes at once"
        assert rows["none,10ms", system]["latency_us"] > 9900


@pytest.mark.root
@pytest.mark.full
def test_ctrl_c_in_an_emulated_network_leaves_nothing() -> None:
    needs_namespaces()
    process = subprocess.Popen(
        command("allreduce", "--sizes", "64M", "--emulate", "10mbit"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("running"):
            break
    assert len(namespaces_of(process.pid)) == 2
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert not namespaces_of(process.pid)


@pytest.mark.root
def test_what_a_killed_benchmark_left_goes_with_the_next() -> None:
    needs_namespaces()
    gone = subprocess.Popen(["true"])
    gone.wait()
    name = emulation.namespace_name(gone.pid, 1, 0)
    subprocess.run(["ip", "netns", "add", name], check=True, timeout=20)
    with emulation.Emulation(emulation.Network()) as made:
        assert namespaces_of(os.getpid()) == set(made.names)
    assert not namespaces_of(gone.pid)
    assert not namespaces_of(os.getpid())


def test_what_can_not_be_is_refused_before_anything_starts() -> None:
    for arguments, words in (
        (["allreduce", "--sizes", "many"], "not a size"),
        (["allreduce", "--codec", "zip"], "choose from"),
        (["allreduce", "--emulate", "fast"], "not a network"),
        (["allreduce", "--emulate", "1gbit", "--nnodes", "17"], "2 to 16 hosts"),
        (["allreduce", "--plot", "x.doc"], "--plot x.doc"),
        (["train", "--models", "big"], "choose from"),
        (["net", "--systems", "pigeons"], "choose from"),
        (["net", "--streams", "1"], "--streams"),
    ):
        done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 2, arguments
        assert words in done.stderr


@pytest.mark.full  # it starts what tests/e2e/test_run.py starts
def test_startup() -> None:
    program = [sys.executable, str(HERE / "startup.py"), "--rounds", "1", "--no-cold", "--output", "json"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(row["s"] > 0 for row in json.loads(done.stdout)["rows"])


@pytest.mark.full
def test_experts() -> None:
    options = ["--nproc-per-node", "2", "--tokens", "8", "--width", "4", "--experts", "none,ffn", "--rounds", "1"]
    options += ["--turn", "0", "--systems", "bagua,gloo,dense"]
    command = [sys.executable, "-P", str(HERE / "moe.py"), *options, "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["expert"] for row in rows] == ["none", "ffn"] and all(row["bagua"] > 0 for row in rows)


def control_plane(*options: str) -> dict[str, Any]:
    """The document of a comparison."""
    program = [sys.executable, str(HERE / "control_plane.py"), "--compare", "--times", "1", *options]
    done = subprocess.run([*program, "--output", "json"], capture_output=True, text=True, timeout=4 * DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    plain, other = found["ways"].values()
    names = [row["what"] for row in plain]
    assert names == [row["what"] for row in other] == [one["what"] for one in found["compared"]]
    assert all(one["times"] > 0 for one in found["compared"])
    return found


@pytest.mark.full
@pytest.mark.timeout(600)
def test_control_plane_with_all_that_protects_it(postgres_url: str) -> None:
    """Beside the same without."""
    small = ["--waiting", "20", "--trivial", "8", "--hosts", "8"]
    found = control_plane("--rows", "queue", "wide", "start", *small, "--accounts", "--tls", "--postgres", postgres_url)
    assert list(found["ways"]) == ["SQLite", "accounts, TLS, PostgreSQL"] and len(found["compared"]) > 9


@pytest.mark.full
@pytest.mark.timeout(600)
def test_control_plane_with_the_operator() -> None:
    if reason := kubernetes.missing() or kubelet.missing():
        pytest.skip(reason)
    found = control_plane("--rows", "start", "--operator")
    assert len(found["compared"]) == 2
