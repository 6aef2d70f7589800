"""Certificates are replaced below a coordinator that runs."""

import shutil
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

from rig.ports import free_port

from bagua.base.errors import UnavailableError
from bagua.base.security import TlsFiles
from bagua.cli.support_bundle import scrape
from bagua.client import Client
from bagua.daemon.coordinator.admin.certs import make_certificates
from bagua.proto import node_pb2


def certs(*arguments):
    command = [sys.executable, "-P", "-m", "bagua.daemon.certs", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def certificate(folder):
    return ssl.PEM_cert_to_DER_cert(TlsFiles.in_folder(folder).cert.read_text())


def shown(address, tls):
    """The certificate that a page shows to somebody with the files in ``tls``; empty: he gets no answer."""
    files = TlsFiles.in_folder(tls)
    context = ssl.create_default_context(cafile=str(files.ca))
    context.load_cert_chain(files.cert, files.key)
    host, _, port = address.rpartition(":")
    try:
        with (
            socket.create_connection((host, int(port)), timeout=60) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return (connection.getpeercert(binary_form=True) or b"") if connection.recv(1) else b""
    except ssl.SSLError:
        return b""


def test_authorities_rotate_without_a_stop(start, connect, tmp_path):
    folder = tmp_path / "tls"
    make_certificates(folder, ["127.0.0.1"])
    port = free_port()
    coordinator = start("--tls", str(folder), "--metrics-port", str(port), "--dashboard", "127.0.0.1:0")
    peer = connect(coordinator, "node-a")
    pages = (f"127.0.0.1:{port}", coordinator.dashboard.removeprefix("https://"))

    def copy(name):
        return Path(shutil.copytree(folder, tmp_path / name))

    def reaches(tls):
        with Client(coordinator.address, token=coordinator.token, tls=TlsFiles.in_folder(tls), timeout_s=30) as client:
            try:
                return [node.connected for node in client.nodes()] == [True]
            except UnavailableError:
                return False

    old = copy("old")
    assert reaches(old)
    assert "bagua_coordinator_nodes_connected 1.0" in scrape(f"https://{pages[0]}/metrics", old), "for a support bundle"
    assert all(shown(page, old) == certificate(old) for page in pages)
    assert certs(str(folder), "--rotate", "finish").returncode != 0, "that would cut everybody off"
    assert certs(str(folder), "--rotate", "begin").returncode == 0
    both = copy("both")
    assert reaches(old) and reaches(both)
    assert certs(str(folder), "--rotate", "switch").returncode == 0
    new = copy("new")
    assert reaches(both) and reaches(new)  # one has the old certificate, one the new
    assert not reaches(old)  # it was not handed the new authority
    assert all(shown(page, both) == certificate(new) != certificate(old) for page in pages)
    assert certs(str(folder), "--rotate", "finish").returncode == 0
    finished = copy("finished")
    assert reaches(finished) and not reaches(both)
    assert all(shown(page, finished) == certificate(new) for page in pages)
    assert shown(pages[0], both) == b""  # nobody reads metrics with a certificate of the old authority
    peer.send(node_pb2.NodeFact(status=node_pb2.NodeStatus()))
    assert peer.quiet()  # its session has gone on all the time


def test_a_client_that_lasts_connects_again_with_new_files(start, tmp_path):
    folder = tmp_path / "tls"
    make_certificates(folder, ["127.0.0.1"])
    first = start("--tls", str(folder))
    with Client(first.address, token=first.token, tls=folder, timeout_s=30) as client:
        assert client.list() == ()
        for step in ("begin", "switch", "finish"):
            assert certs(str(folder), "--rotate", step).returncode == 0
        assert client.list() == ()  # its connection stands
        first.end()
        start("--tls", str(folder), "--listen", first.address)
        deadline = time.monotonic() + 60
        while True:
            try:
                assert client.list() == ()
                return
            except UnavailableError:
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_a_damaged_folder_changes_nothing(start, tmp_path):
    folder = tmp_path / "tls"
    files = make_certificates(folder, ["127.0.0.1"])
    coordinator = start("--tls", str(folder))
    kept = Path(shutil.copytree(folder, tmp_path / "kept"))
    files.cert.write_bytes(b"half a cert")
    with Client(coordinator.address, token=coordinator.token, tls=TlsFiles.in_folder(kept)) as client:
        assert client.list() == ()
