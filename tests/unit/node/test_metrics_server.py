"""The servers of metrics without file descriptors."""

from __future__ import annotations

import subprocess
import sys


def test_a_scrape_waits_for_a_descriptor_and_nothing_spins():
    code = """
import os, resource, socket, time
from prometheus_client import CollectorRegistry, start_http_server
from bagua.daemon.metrics_server import wait_for_descriptors
server, _ = start_http_server(0, "127.0.0.1", CollectorRegistry())
wait_for_descriptors(server)
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
