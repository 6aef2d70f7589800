"""The servers of metrics without file descriptors."""

import subprocess
import sys

import pytest

from bagua.daemon.coordinator.admin.certs import make_certificates


def test_a_scrape_waits_for_a_descriptor_and_nothing_spins():
    code = """
import os, resource, socket, time
from prometheus_client import CollectorRegistry, start_http_server
from bagua.base.metrics_server import keep_well
server, _ = start_http_server(0, "127.0.0.1", CollectorRegistry())
keep_well(server)
scrape = socket.socket()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
first_free = os.dup(0)
os.close(first_free)
resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
scrape.connect(server.server_address)
scrape.sendall(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
began, used = time.monotonic(), time.process_time()
time.sleep(0.5)
busy = (time.process_time() - used) / (time.monotonic() - began)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
scrape.settimeout(60)
print(busy < 0.2, scrape.recv(8))
server.shutdown()
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "True b'HTTP/1.0'\n", (done.stdout, done.stderr)


@pytest.mark.parametrize("tls", [False, True])
def test_silent_connections_keep_no_scrape_out_and_hold_no_threads(tmp_path, tls):
    make_certificates(tmp_path, ["127.0.0.1"])
    files = f'"{tmp_path}/cert.pem", "{tmp_path}/key.pem"' if tls else "None, None"
    code = f"""
import socket, ssl, threading, urllib.request
from prometheus_client import CollectorRegistry, start_http_server
from bagua.base.metrics_server import MOST, keep_well
server, _ = start_http_server(0, "127.0.0.1", CollectorRegistry(), {files})
keep_well(server)
before = threading.active_count()
scrape = socket.create_connection(server.server_address, timeout=60)  # it asks a moment later
silent = [socket.create_connection(server.server_address, source_address=("127.0.0.2", 0)) for _ in range(200)]
while threading.active_count() < before + MOST:
    pass
url = "{"https" if tls else "http"}://%s:%d/metrics" % server.server_address
with urllib.request.urlopen(url, timeout=60, context=ssl._create_unverified_context()) as answer:
    print(answer.status)
if {tls}:
    scrape = ssl._create_unverified_context().wrap_socket(scrape)
scrape.sendall(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
print(scrape.recv(8))
while threading.active_count() > before + MOST:
    pass
server.shutdown()
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("200\nb'HTTP/1.0'\n", ""), (done.stdout, done.stderr)
