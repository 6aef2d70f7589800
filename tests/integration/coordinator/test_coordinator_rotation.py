"""Certificates are replaced below a coordinator that runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bagua.base.errors import UnavailableError
from bagua.base.security import TlsFiles
from bagua.client import Client
from bagua.daemon.coordinator.certs import make_certificates
from bagua.proto import node_pb2


def certs(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "bagua.daemon.certs", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_authorities_rotate_without_a_stop(start, connect, tmp_path):
    folder = tmp_path / "tls"
    make_certificates(folder, ["127.0.0.1"])
    coordinator = start("--tls", str(folder))
    peer = connect(coordinator, "node-a")

    def copy(name: str) -> Path:
        return Path(shutil.copytree(folder, tmp_path / name))

    def reaches(tls: Path) -> bool:
        with Client(coordinator.address, token=coordinator.token, tls=TlsFiles.in_folder(tls), timeout_s=30) as client:
            try:
                return [node.connected for node in client.nodes()] == [True]
            except UnavailableError:
                return False

    old = copy("old")
    assert reaches(old)
    assert "--rotate begin, not finish" in " ".join(certs(str(folder), "--rotate", "finish").stderr.split()).replace(
        "`", ""
    )
    begun = certs(str(folder), "--rotate", "begin")
    assert begun.returncode == 0 and "--rotate switch" in begun.stdout, begun.stderr
    both = copy("both")
    assert reaches(old) and reaches(both)
    assert certs(str(folder), "--rotate", "switch").returncode == 0
    new = copy("new")
    assert reaches(both) and reaches(new)  # one has the old certificate, one the new
    assert not reaches(old)  # it was not handed the new authority
    assert certs(str(folder), "--rotate", "finish").returncode == 0
    assert reaches(copy("finished")) and not reaches(both)
    shown = certs(str(folder), "--show").stdout
    assert "1 authority is trusted" in shown and "Next" not in shown
    peer.send(node_pb2.NodeFact(status=node_pb2.NodeStatus()))
    assert peer.quiet()  # its session has gone on all the time


def test_a_damaged_folder_changes_nothing(start, tmp_path):
    folder = tmp_path / "tls"
    files = make_certificates(folder, ["127.0.0.1"])
    coordinator = start("--tls", str(folder))
    kept = Path(shutil.copytree(folder, tmp_path / "kept"))
    files.cert.write_bytes(b"half a cert")
    with Client(coordinator.address, token=coordinator.token, tls=TlsFiles.in_folder(kept)) as client:
        assert client.list() == ()


@pytest.mark.parametrize("arguments", [(), ("--renew",), ("--rotate", "later"), ("--show", "--host", "a")])
def test_arguments_that_make_no_sense(arguments, tmp_path):
    found = certs(str(tmp_path), *arguments)
    assert found.returncode == 2 and found.stderr.startswith("error: ")
