"""Tabs of the dashboard: what one gets is bounded in size and in rate, and one that is closed leaves nothing behind.

The server runs on a thread of this process, over a real coordinator, so that its threads and tasks can be counted.
"""

import asyncio
import json
import socket
import threading
import time
from collections import Counter
from contextlib import ExitStack

import httpx
import pytest
import uvicorn
from rig.coordinator.dashboards import SCRIPT, ReportingJob

from bagua.dashboard import app, feed
from bagua.dashboard.access import Access
from bagua.dashboard.guests import Guests
from bagua.dashboard.stream import LOG_LINES, TICK_S
from bagua.proto import common_pb2 as c
from bagua.proto import node_pb2 as n

WAIT_S = 60.0
WIDE, NARROW = 100, 100_000  # lines of a rank that prints too much
OUTPUT = WIDE * (b"x" * 5_000 + b"\n") + NARROW * b"y\n"


class Here:
    """The server on a thread of this process. ``url``: where it listens."""

    def __init__(self, served):
        dashboard = app.Dashboard(served.client, Access(served.token), Guests())
        self._server = uvicorn.Server(uvicorn.Config(dashboard.app(), log_level="warning", ws="none"))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._client = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {served.token}"},
            timeout=WAIT_S,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        assert self._client.get("/api/hello").status_code == 200

    def _serve(self):
        self._loop.run_until_complete(self._server.serve(sockets=[self._listener]))

    def tab(self, path="/api/stream"):
        """A tab that has been answered, and has read nothing of its stream yet."""
        return self._client.send(self._client.build_request("GET", path), stream=True)

    def alive(self):
        """Number of threads of the dashboard by name, and of tasks of its event loop."""
        found = Counter(one.name for one in threading.enumerate() if one.name.startswith("dashboard "))
        found["tasks"] = len(asyncio.all_tasks(self._loop))
        return found

    def close(self):
        self._client.close()
        self._server.should_exit = True
        self._thread.join(WAIT_S)
        self._loop.close()
        self._listener.close()


@pytest.fixture
def here(served):
    made = Here(served)
    yield made
    made.close()


@pytest.fixture
def job(served, peers):
    with served.client() as client:
        made = ReportingJob(client, peers, SCRIPT, output=OUTPUT)
        yield made
        made.close()


def until(condition, words):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, words()
        time.sleep(0.05)


def test_closed_tabs_leave_nothing_behind(here, job, monkeypatch):
    monkeypatch.setattr(feed, "LINGER_S", 1.0)
    before = here.alive()
    path = f"/api/stream?job={job.job_id}"
    with ExitStack() as open_tabs:
        tabs = []
        for one in ("/api/stream", path, path, f"{path}&logs=0,1", f"{path}&logs=2"):
            tab = here.tab(one)
            open_tabs.callback(tab.close)
            tabs.append(tab.iter_lines())
            assert next(tabs[-1])
        opened = here.alive() - before
        # Tabs share the watch of their job (it has two threads); each tab with output follows that by itself.
        assert opened[f"dashboard {job.job_id}"] == 2 and opened[f"dashboard log {job.job_id}"] == 2, opened
        assert opened["tasks"] >= len(tabs)
        until(lambda: job.reads == 3, lambda: f"{job.reads} logs are read")
    until(lambda: here.alive() == before, lambda: (here.alive(), before))
    until(lambda: job.reads == 0, lambda: f"{job.reads} logs are still read on the nodes")


def test_so_many_tabs_and_no_more(here, monkeypatch):
    monkeypatch.setattr(app, "MAX_TABS", 3)
    with ExitStack() as open_tabs:
        for _ in range(3):
            tab = here.tab()
            open_tabs.callback(tab.close)
            assert tab.status_code == 200
        refused = here.tab()
        assert refused.status_code == 429 and "3 tabs are open already" in refused.read().decode()

    def opens():
        tab = here.tab()
        tab.close()
        return tab.status_code == 200

    until(opens, here.alive)  # those that were closed have made room


def test_a_flood_reaches_a_tab_in_small_pieces(here, peers, job):
    """A rank prints 100,000 lines at once, and 3,000 reports come: the tab gets the newest, at the rate of any tab."""
    began = time.monotonic()
    sent = False
    kinds = Counter()
    lines = skipped = largest = 0
    with ExitStack() as leave:
        tab = here.tab(f"/api/stream?job={job.job_id}&logs=3")
        leave.callback(tab.close)
        for kind, text in _events(tab):
            kinds[kind] += 1
            largest = max(largest, len(text))
            document = json.loads(text)
            for step in range(0 if sent else 3_000):
                told = c.Progress(job_id=job.job_id, rank=3, step=step, by_itself=True, metrics={"compute ms": 10.0})
                peers[1].send(n.NodeFact(progress=told))
            sent = True
            if kind == "log":
                assert len(document["lines"]) <= LOG_LINES and all(len(line) <= 2_000 for _, line in document["lines"])
                lines, skipped = lines + len(document["lines"]), skipped + document["skipped"]
            if kinds["now"] and lines + skipped == 1 + WIDE + NARROW:
                break
    ticks = 1 + (time.monotonic() - began) / TICK_S
    assert max(kinds.values()) <= ticks, (kinds, ticks)
    assert lines <= LOG_LINES * ticks and skipped > 0
    assert largest < 1_000_000


def _events(tab):
    kind = ""
    for line in tab.iter_lines():
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, line.removeprefix("data: ")
