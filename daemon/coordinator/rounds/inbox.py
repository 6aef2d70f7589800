"""Keeps facts and calls until they are written.

Facts are levels, so of a node and a job the newest is enough. Calls of users and introductions of nodes carry a future:
somebody waits for the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bagua.daemon.coordinator.rounds.requests import Wished
from bagua.daemon.coordinator.rules.domain import JobRecord, LocalJob, NodeRecord
from bagua.daemon.coordinator.streams.sessions import NodeSession


@dataclass(frozen=True)
class Fact:
    """A node's report of a job; ``boot_id`` is the run of its daemon."""

    node_id: str
    boot_id: str
    job: LocalJob

    @property
    def key(self) -> tuple[str, str]:
        """A newer fact with this key says all that an older one said."""
        return self.node_id, self.job.job_id


@dataclass(eq=False)
class Introduction:
    """A session begins. ``held``: the jobs that its daemon has."""

    session: NodeSession
    node: NodeRecord
    held: frozenset[str]
    done: asyncio.Future[bool]  # whether the daemon was restarted since it was seen last


@dataclass(eq=False)
class Submission:
    job: JobRecord
    idempotency_key: str
    done: asyncio.Future[JobRecord]


@dataclass(eq=False)
class Request:
    """Request of somebody to change a job, or to end it; see ``requests``."""

    job_id: str
    wish: Callable[[JobRecord], Wished]
    done: asyncio.Future[JobRecord]


@dataclass(eq=False)
class Mark:
    """A node drains, or not: as a user has asked, as its daemon says (None: as it was). Nobody waits for the latter."""

    node_id: str
    draining: bool | None
    leaving: bool | None
    done: asyncio.Future[bool] | None = None


@dataclass
class Inbox:
    """``take`` empties it; ``put_back`` returns what could not be written, where nothing newer has come."""

    facts: dict[tuple[str, str], Fact] = field(default_factory=dict)
    introductions: dict[str, Introduction] = field(default_factory=dict)  # by node
    submissions: list[Submission] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    gone: dict[str, None] = field(default_factory=dict)  # nodes the end of whose session is not written yet
    looks: dict[str, None] = field(default_factory=dict)  # jobs to decide about
    faults: dict[str, str] = field(default_factory=dict)  # jobs that the coordinator can't go on with -> the reason
    room: bool = False  # slots became free: look at the jobs that wait

    def __bool__(self) -> bool:
        calls = (self.introductions, self.submissions, self.requests, self.marks)
        return self.room or any((*calls, self.facts, self.gone, self.looks, self.faults))

    def take(self, most_facts: int) -> Inbox:
        """Takes everything out, but ``most_facts`` facts at most: the rest stays for the next round."""
        taken = Inbox(**vars(self))
        rest: dict[tuple[str, str], Fact] = {}
        if len(self.facts) > most_facts:
            keys = list(self.facts)
            rest = {key: self.facts[key] for key in keys[most_facts:]}
            taken.facts = {key: self.facts[key] for key in keys[:most_facts]}
        self.__init__()  # type: ignore[misc]
        self.facts = rest
        return taken

    def put_back(self, taken: Inbox) -> None:
        """Puts back what a failed round had taken. Calls with a future are not put back: their callers get the error
        and try again.
        """
        self.facts = {**taken.facts, **self.facts}  # newer ones win
        self.marks = [mark for mark in taken.marks if mark.done is None] + self.marks
        self.gone = {**taken.gone, **self.gone}
        self.looks = {**taken.looks, **self.looks}
        self.faults = {**taken.faults, **self.faults}
        self.room |= taken.room

    def fail(self, error: BaseException) -> None:
        """Gives the error to everybody who waits."""
        waiting: list[asyncio.Future[Any]] = [came.done for came in self.introductions.values()]
        waiting += [call.done for call in self.submissions]
        waiting += [call.done for call in self.requests]
        waiting += [mark.done for mark in self.marks if mark.done is not None]
        for done in waiting:
            if not done.done():
                done.set_exception(error)


def settle(done: asyncio.Future[Any], result: object = None, error: BaseException | None = None) -> None:
    """Answers a caller that still waits: with ``result``, or with ``error`` if there is none."""
    if done.done():
        return
    if result is None and error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)
