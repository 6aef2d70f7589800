"""Server-sent events of one tab: everything at once, then what changes, never faster than the tab takes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

from bagua.base.text import json_text
from bagua.dashboard.documents import counts, events_of, job_row, node_row, whole_job
from bagua.dashboard.feed import Feeds, JobFeed
from bagua.dashboard.log_tail import LogTail

TICK_S = 0.5  # at most so often anything is sent
HEAT_S = 2.0  # and the map of ranks
ALIVE_S = 15.0  # a word for proxies when there is nothing to tell
MAX_NODES = 2_000
MAX_RUNNING = 100  # rows of unfinished jobs; the others are counted
LOG_LINES = 300  # in one tick

Message = tuple[str, Any]


def as_event(kind: str, document: Any) -> bytes:
    """Makes one event of a stream. JSON has no line ends, so it is one line."""
    return f"event: {kind}\ndata: {json_text(document)}\n\n".encode()


class ClusterView:
    """Nodes and jobs. The first look has all, later ones have what changed."""

    def __init__(self, feeds: Feeds) -> None:
        self._feeds = feeds
        self._version = -1
        self._nodes: dict[str, list[Any]] = {}

    def news(self) -> list[Message]:
        """Changes since the last call."""
        feeds = self._feeds
        if feeds.version == self._version or not (feeds.complete or feeds.away):
            return []
        self._version = feeds.version
        rows = {name: node_row(node) for name, node in list(feeds.nodes.items())[:MAX_NODES]}
        changed = [row for name, row in rows.items() if not _same(row, self._nodes.get(name))]
        gone = [name for name in self._nodes if name not in rows]
        self._nodes = rows
        return [
            ("counts", {**counts(feeds.nodes.values(), feeds.running), "away": feeds.away}),
            ("nodes", {"changed": changed, "gone": gone}),
            (
                "jobs",
                {
                    "running": [job_row(job) for job in feeds.running[:MAX_RUNNING]],
                    "more": len(feeds.running[MAX_RUNNING:]),
                    "recent": [job_row(job) for job in feeds.recent],
                },
            ),
        ]


def _same(row: list[Any], old: list[Any] | None) -> bool:
    """Alike but for when it was last seen, which matters for a node that is away alone."""
    return old is not None and row[:7] == old[:7] and (row[5] or row[7] == old[7])


class JobView:
    """View of one job: its state, events, charts, map of ranks."""

    def __init__(self, feed: JobFeed) -> None:
        self._feed = feed
        self._version = -1
        self._event = 0
        self._chart_version = -1
        self._last_point = 0.0
        self._history = -1
        self._heat = -1
        self._heat_at = float("-inf")
        self._away = ""

    def news(self) -> list[Message]:
        """Changes since the last call."""
        feed, found = self._feed, list[Message]()
        with feed.lock:
            if feed.version != self._version and feed.job.created_at:
                self._version = feed.version
                found.append(("job", whole_job(feed)))
            events = [event for event in feed.events if event.seq > self._event]
            if events:
                self._event = events[-1].seq
                found.append(("events", events_of(events)))
            if feed.history.version != self._history:
                self._history = feed.history.version
                found += self._charts(feed)
            found += self._map(feed)
            if feed.away != self._away:
                self._away = feed.away
                found.append(("away", feed.away))
        return found

    def _charts(self, feed: JobFeed) -> list[Message]:
        points = feed.history.points
        whole = points.version != self._chart_version
        self._chart_version = points.version
        document = feed.history.chart_document(float("-inf") if whole else self._last_point)
        self._last_point = points.points[-1].time if points.points else 0.0
        now: Message = ("now", feed.history.now_document())
        return [now, ("chart", {**document, "whole": whole})] if document["t"] else [now]

    def _map(self, feed: JobFeed) -> list[Message]:
        now = time.monotonic()
        if self._heat == feed.history.version or now - self._heat_at < HEAT_S:
            return []
        self._heat, self._heat_at = feed.history.version, now
        count = len(feed.job.ranks) or max(feed.history.latest, default=-1) + 1
        document = feed.history.map_document(count)
        return [("heat", {**document, "nodes": _nodes_of_rows(feed, document)})] if document["rows"] else []


def _nodes_of_rows(feed: JobFeed, document: dict[str, Any]) -> list[str]:
    each = document["ranks_in_row"]
    nodes = {rank.rank: rank.node_id for rank in feed.job.ranks}
    return [nodes.get(row * each, "") for row in range(len(document["rows"]))]


def log_news(tail: LogTail) -> list[Message]:
    """Returns the lines that have come since the last call."""
    lines, skipped = tail.pop_lines(LOG_LINES)
    found: list[Message] = [("log", {"lines": lines, "skipped": skipped})] if lines or skipped else []
    return found


async def events(views: list[Any], tail: LogTail | None, leave: ExitStack) -> AsyncIterator[bytes]:
    """Yields events until the tab is closed. ``leave`` ends what the tab has begun."""
    try:
        spoken = time.monotonic()
        yield b"retry: 2000\n\n"  # browsers come back after 2 s
        log_ended = False
        while True:
            messages = [message for view in views for message in view.news()]
            if tail is not None and not log_ended:
                messages += log_news(tail)
                if tail.ended and not messages:  # lines that wait come first
                    log_ended = True
                    messages.append(("log_end", tail.ended))
            if messages:
                spoken = time.monotonic()
                for kind, document in messages:
                    yield as_event(kind, document)
            elif time.monotonic() - spoken > ALIVE_S:
                spoken = time.monotonic()
                yield b": alive\n\n"
            await asyncio.sleep(TICK_S)
    finally:
        leave.close()
