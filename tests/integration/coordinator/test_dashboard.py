"""The dashboard over a real coordinator: what it tells, whom it refuses, and that it ends with the coordinator."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest

from bagua.base.security import TlsFiles
from bagua.base.system_limits import await_readable
from bagua.daemon.coordinator.admin.certs import make_certificates
from bagua.proto import common_pb2 as c

WAIT_S = 60.0
OWN = {"x-bagua-dashboard": "1"}


@pytest.fixture
def page(served):
    """A browser's place: logged in."""
    with httpx.Client(base_url=served.dashboard, headers=OWN, timeout=WAIT_S) as client:
        log_in(client, served)
        yield client


def log_in(client, process):
    """As the page does: the cookie, and its proof in each request from then on."""
    answer = client.post("/api/login", json={"token": process.token})
    assert answer.status_code == 200
    client.headers["x-bagua-proof"] = answer.json()["proof"]
    return answer


def events(page, path):
    """(kind, document) of a stream, until it has been silent for long."""
    with page.stream("GET", path) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        kind = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield kind, json.loads(line.removeprefix("data: "))


def first(page, path, *kinds):
    found = {}
    for kind, document in events(page, path):
        found.setdefault(kind, document)
        if set(kinds) <= set(found):
            return found
    raise AssertionError(f"the stream ended with {list(found)}")


def test_page_and_headers(page):
    answer = page.get("/")
    policy = answer.headers["content-security-policy"]
    assert answer.status_code == 200 and "unsafe" not in policy and "script-src 'self'" in policy
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in answer.text and " style=" not in answer.text  # nothing inline
    for path in ("/static/app.js", "/static/uplot/uPlot.iife.min.js", "/static/uplot/LICENSE"):
        assert page.get(path).status_code == 200
    assert page.get("/static/../app.py").status_code == 404


def test_without_a_session_nothing_is_told(served, job):
    with httpx.Client(base_url=served.dashboard, headers=OWN) as stranger:
        assert stranger.get("/").status_code == 200
        for path in ("/api/hello", "/api/jobs", "/api/stream", f"/api/stream?job={job.job_id}"):
            assert stranger.get(path).status_code == 401
        assert stranger.post(f"/api/jobs/{job.job_id}/cancel").status_code == 401
        wrong = stranger.post("/api/login", json={"token": served.token + "x"})
        assert wrong.status_code == 401 and not wrong.cookies
        right = log_in(stranger, served)
        cookie = right.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=strict" in cookie and "secure" not in cookie
        assert stranger.get("/api/hello").status_code == 200
        assert stranger.post("/api/logout", json={}).status_code == 200
        assert stranger.get("/api/hello").status_code == 401


def test_silent_connections_keep_nobody_out(start):
    """Nor do those that begin a request and do not end it."""
    begins = (b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"POST /api/login HTTP/1.1\r\n")
    process = start("--dashboard", "127.0.0.1:0")
    url = httpx.URL(process.dashboard)
    with ExitStack() as held, httpx.Client(base_url=url, headers=OWN, timeout=WAIT_S) as user:
        log_in(user, process)
        others = [held.enter_context(socket.create_connection((url.host, url.port))) for _ in range(450)]
        for number, one in enumerate(others):
            with suppress(OSError):  # it was one too many
                one.sendall(begins[number % 3])
        assert user.get("/api/hello").status_code == 200
        with httpx.Client(base_url=url, headers=OWN, timeout=WAIT_S) as newcomer:
            log_in(newcomer, process)
            assert first(newcomer, "/api/stream", "counts")
    code, errors = process.end()
    assert code == 0 and "Traceback" not in errors and "Invalid HTTP" not in errors, errors


def test_a_log_in_without_end_is_refused_before_its_end(served):
    """It says that it is short, and comes in pieces: all of it would lie in the memory of the server."""
    url = httpx.URL(served.dashboard)
    begin = "POST /api/login HTTP/1.1\r\nHost: 127.0.0.1\r\nx-bagua-dashboard: 1\r\nContent-Length: 2\r\n"
    with socket.create_connection((url.host, url.port), timeout=WAIT_S) as stranger:
        stranger.sendall(f"{begin}Transfer-Encoding: chunked\r\n\r\n100000\r\n".encode() + b" " * (1 << 20))
        assert stranger.recv(100).startswith(b"HTTP/1.1 401")


def test_other_sites_are_refused(served, page, job):
    cancel = f"/api/jobs/{job.job_id}/cancel"
    for headers in ({"x-bagua-dashboard": "0"}, {"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        assert page.post(cancel, headers=headers).status_code == 403
    assert page.get("/api/hello", headers={"host": "evil.example"}).status_code == 421
    with served.client() as client:
        assert client.get(job.job_id).state != c.JOB_STATE_STOPPING


def test_a_job_is_followed_to_its_end(page, job):
    states, log = [], ""
    for kind, document in events(page, f"/api/stream?job={job.job_id}&logs=0"):
        if kind == "job":
            states.append(document["state"])
        if kind == "now" and document["step"]:
            job.end()
        if kind == "log":
            log += "".join(text for _, text in document["lines"])
        if kind == "log_end":
            assert document == "end"
            break
    assert "rank 0 says" in log and "the end" in log
    while "succeeded" not in states:
        states.append(first(page, f"/api/stream?job={job.job_id}", "job")["job"]["state"])
    assert states[0] in ("starting", "running")


def test_a_job_submitted_again_stays_where_it_was(served, page):
    with served.client() as client:
        spec = c.JobSpec(name="far", entry="t.py", nnodes=99, nproc_per_node=1, placement_timeout_s=60)
        former = client.submit(spec, namespace="vision", unix_user="ann")
        path, key = f"/api/jobs/{former.job_id}/again", {"key": "a-key-of-this-test"}
        assert page.post(path, json={"key": "x"}).status_code == 400
        made = page.post(path, json=key).json()
        assert page.post(path, json=key).json()["id"] == made["id"] != former.job_id
        again = client.get(made["id"])
        for ranks in ("-1", str(1 << 32), "x"):
            with page.stream("GET", f"/api/stream?job={former.job_id}&logs={ranks}") as answer:
                assert answer.status_code == 400
        for one in (former, again):
            client.cancel(one.job_id)
    assert (again.namespace, again.unix_user) == ("vision", "ann")


@pytest.mark.parametrize("body", ['{"key": "\\ud800-and-more"}', '{"key": ' + "[" * 40_000], ids=["text", "depth"])
def test_a_document_that_can_not_be_read_counts_as_none(page, body):
    answer = page.post("/api/jobs/job-none/again", content=body)
    assert (answer.status_code, answer.json()) == (400, {"error": "key: at least 8 characters."})


def test_what_is_not_there(page):
    assert page.get("/api/stream?job=job-none").status_code == 404
    assert page.post("/api/jobs/job-none/cancel", json={}).status_code == 404
    assert page.get("/api/jobs?state=nonsense").status_code == 400
    assert page.get("/api/jobs?page=nonsense").status_code == 400


def test_it_ends_with_a_coordinator_that_is_killed(start):
    process = start("--dashboard", "127.0.0.1:0")
    assert httpx.get(process.dashboard).status_code == 200
    process.end(signal.SIGKILL)
    until = time.monotonic() + WAIT_S
    while True:
        try:
            httpx.get(process.dashboard)
        except httpx.TransportError:
            return
        assert time.monotonic() < until, "the dashboard lives on"
        time.sleep(0.05)


def test_an_address_beyond_loopback_needs_tls(start):
    assert "without TLS" in start("--dashboard", "0.0.0.0:0").error


def test_under_tls_the_cookie_is_secure_and_certificates_may_be_asked_for(start, tmp_path):
    process = start("--dashboard", "127.0.0.1:0", "--auto-tls", "localhost")
    assert process.dashboard.startswith("https://") and process.tls is not None
    with httpx.Client(base_url=process.dashboard, verify=_trusting(process.tls), headers=OWN) as client:
        cookie = log_in(client, process).headers["set-cookie"]
        assert "secure" in cookie.lower() and cookie.startswith("__Host-")
        assert client.get("/api/hello").status_code == 200
    make_certificates(tmp_path / "foreign", ["localhost"])
    foreign = TlsFiles.in_folder(tmp_path / "foreign")
    with _started(process, "--client-certificates") as url:
        for shown in (None, foreign):
            with pytest.raises(httpx.TransportError):
                httpx.get(url, verify=_trusting(process.tls, shown))
        assert httpx.get(url, verify=_trusting(process.tls, process.tls)).status_code == 200


@contextmanager
def _started(process, *options):
    """``bagua dashboard`` beside a coordinator with TLS, as a user starts it. Yields its address."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-P", "-m", "bagua.cli.main", "dashboard", "--listen", "127.0.0.1:0", *options]
    command += ["--coordinator", process.address, "--token-file", str(process.token_file)]
    command += ["--tls", str(process.tls.ca.parent), "--ready-fd", str(write_end), "--death-signal"]
    server = subprocess.Popen(command, pass_fds=[write_end])
    os.close(write_end)
    try:
        with os.fdopen(read_end) as lines:
            assert await_readable([lines], WAIT_S), "the dashboard did not start"
            yield json.loads(lines.readline())["url"]
    finally:
        server.terminate()
        assert server.wait(WAIT_S) in (0, -signal.SIGTERM)


def _trusting(served, shown=None):
    """Trusts that authority, and shows a certificate."""
    found = ssl.create_default_context(cafile=str(served.ca))
    if shown is not None:
        found.load_cert_chain(shown.cert, shown.key)
    return found
