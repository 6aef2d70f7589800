"""Living jobs and all nodes in memory, as the database has them, indexed for every question about them.

Only rounds of the reconciler change it, after their transaction was committed; the intake alone notes at once whether
a node's session lives. Everybody on the event loop may read. The cost of a change depends on its size alone, not on the
numbers of waiting jobs and of nodes.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from bagua.daemon.coordinator.rules.domain import HostRecord, JobRecord, JobState, NodeRecord, NodeView, Phase, Stored
from bagua.daemon.coordinator.rules.placement import place

_PORTS = range(20_000, 32_000)  # below the ports that kernels give to clients

Shape = tuple[int, int]  # nodes, ranks on each


def shape_of(job: JobRecord) -> Shape:
    """Jobs of one shape fit or don't fit alike."""
    return job.spec.least_nodes, job.spec.nproc_per_node


Kept = tuple[str, frozenset[str]]
"""A job that has waited longest, and the nodes that take no other one until it is placed."""
NOTHING_KEPT: Kept = "", frozenset()


def kept_words(holder: str) -> str:
    """Why a job waits that comes after ``holder``."""
    return f"nodes are kept for {holder}, which has waited longer"


class Waiting:
    """Jobs that wait for nodes: in order of their coming, by shape."""

    def __init__(self) -> None:
        self._jobs: dict[Shape, dict[str, int]] = {}
        self._next = 0

    def add(self, job: JobRecord) -> None:
        """Adds a job. One that is there keeps its place."""
        if job.job_id not in self._jobs.setdefault(shape_of(job), {}):
            self._jobs[shape_of(job)][job.job_id] = self._next
            self._next += 1

    def discard(self, job: JobRecord) -> None:
        """Takes out a job that waits no longer."""
        of_shape = self._jobs.get(shape_of(job))
        if of_shape is not None and of_shape.pop(job.job_id, None) is not None and not of_shape:
            del self._jobs[shape_of(job)]

    def by_shape(self) -> Mapping[Shape, Mapping[str, int]]:
        """Shape -> job id -> place in the queue; each in order."""
        return self._jobs

    def __len__(self) -> int:
        return sum(len(jobs) for jobs in self._jobs.values())


class Board:
    """Living jobs and all nodes in memory, as the database has them."""

    def __init__(self) -> None:
        self.jobs: dict[str, Stored] = {}
        self.views: dict[str, NodeView] = {}
        self.waiting = Waiting()
        self.kept: Kept = NOTHING_KEPT
        self.unfinished: set[str] = set()
        self.last_ended: Stored | None = None  # of which nothing is left on any node
        self._on_node: dict[str, Counter[str]] = {}  # node -> job -> its parts of which something may be left there
        self.growing: set[str] = set()  # elastic jobs that nodes and free slots may help
        self._taken: Counter[tuple[str, str]] = Counter()  # (node, run of its daemon) -> slots
        self._ports: Counter[int] = Counter()
        self._reasons: dict[Shape, str] = {}  # why jobs of a shape wait; emptied when nodes change

    # ---- jobs

    def job(self, job_id: str) -> JobRecord | None:
        """Returns a living job, or None."""
        found = self.jobs.get(job_id)
        return None if found is None else found.job

    def put(self, stored: Stored) -> None:
        """The job as it is now. One that has ended and of which nothing is left is dropped."""
        old, new = self.job(stored.job.job_id), stored.job
        self._account(() if old is None else old.parts, new.parts, new.job_id)
        self._count(old, new)
        if new.state.terminal and all(host.phase is Phase.STOPPED for host in new.parts):
            self.jobs.pop(new.job_id, None)
            self.last_ended = stored
        else:
            self.jobs[new.job_id] = stored

    def drop(self, job_id: str) -> None:
        old = self.job(job_id)
        if old is not None:
            self._account(old.parts, (), job_id)
            self._count(old, None)
            del self.jobs[job_id]

    def on_node(self, node_id: str) -> list[str]:
        """Ids of jobs of which something may be left on the node."""
        return sorted(self._on_node.get(node_id, ()))

    def shown(self, job: JobRecord) -> JobRecord:
        """``job`` for people: if it waits, with what is missing now."""
        if job.state is not JobState.PENDING or job.cancel_reason is not None:
            return job
        shape = shape_of(job)
        if shape not in self._reasons:
            found = place(job.spec, self.views.values())
            self._reasons[shape] = found if isinstance(found, str) else ""
        reason = self._reasons[shape]
        if not reason and self.kept[0] not in ("", job.job_id):
            reason = kept_words(self.kept[0])
        return replace(job, reason=reason) if reason and reason != job.reason else job

    def free_port(self) -> int:
        """A port that no unfinished job uses, while there are enough."""
        while True:
            port = secrets.choice(_PORTS)
            if not self._ports[port] or len(self._ports) > len(_PORTS) // 2:  # with few left the search would take long
                return port

    # ---- nodes

    def put_node(self, node: NodeRecord, connected: bool, heard_clock: float, hung_up: bool = False) -> bool:
        """The node as it is now. True if it has room for jobs that wait."""
        new = NodeView(
            node_id=node.node_id,
            hostname=node.hostname,
            address=node.address,
            boot_id=node.boot_id,
            slots=node.slots,
            used=self._taken[node.node_id, node.boot_id],
            connected=connected,
            heard_clock=heard_clock,
            hung_up=hung_up,
            last_seen=node.last_seen,
            version=node.version,
            asked_to_drain=node.draining,
            leaving=node.leaving,
            wire_version=node.wire_version,
        )
        self.views[node.node_id] = new
        self._reasons.clear()
        return new.open and new.free > 0

    def mark_node(self, node_id: str, draining: bool | None, leaving: bool | None) -> bool:
        """The node drains, or not: as a user has asked, as its daemon says (None: as it was). True if it has room for
        jobs that wait."""
        view = self.views.get(node_id)
        if view is None:
            return False
        self.views[node_id] = view = view.marked(draining, leaving)
        self._reasons.clear()
        return view.open and view.free > 0

    def set_connected(self, node_id: str, connected: bool, heard_clock: float, last_seen: float) -> None:
        """The node's session began to count, or is gone."""
        view = self.views.get(node_id)
        if view is not None:
            view = replace(view, connected=connected, hung_up=not connected)
            self.views[node_id] = replace(view, heard_clock=heard_clock, last_seen=last_seen)
            self._reasons.clear()

    def note_heard(self, node_id: str, heard_clock: float) -> None:
        """Notes that the node's daemon is there again; its session does not count yet."""
        view = self.views.get(node_id)
        if view is not None:
            self.views[node_id] = replace(view, heard_clock=heard_clock)

    def put_forward(self, jump: float) -> None:
        """The clock jumped: so did the times at which nodes were heard of."""
        for node_id, view in self.views.items():
            if not view.connected:  # the sessions of others move their own times
                self.views[node_id] = replace(view, heard_clock=view.heard_clock + jump)

    # ---- accounts

    def _account(self, old: tuple[HostRecord, ...], new: tuple[HostRecord, ...], job_id: str) -> None:
        """Slots and jobs by node, for the hosts that differ."""
        if len(old) == len(new):
            pairs = [(before, after) for before, after in zip(old, new, strict=True) if before is not after]
            old, new = tuple(before for before, _ in pairs), tuple(after for _, after in pairs)
        for host in old:
            if host.phase is not Phase.STOPPED:
                self._hold(host, job_id, -1)
        for host in new:
            if host.phase is not Phase.STOPPED:
                self._hold(host, job_id, 1)
        for node_id in {host.node_id for host in (*old, *new)}:
            self._refresh(node_id)

    def _hold(self, host: HostRecord, job_id: str, sign: int) -> None:
        key = (host.node_id, host.boot_id)
        self._taken[key] += sign * host.nranks
        if not self._taken[key]:
            del self._taken[key]
        jobs = self._on_node.setdefault(host.node_id, Counter())
        jobs[job_id] += sign
        if not jobs[job_id]:
            del jobs[job_id]
            if not jobs:
                del self._on_node[host.node_id]

    def _refresh(self, node_id: str) -> None:
        view = self.views.get(node_id)
        if view is not None and view.used != self._taken[node_id, view.boot_id]:
            self.views[node_id] = replace(view, used=self._taken[node_id, view.boot_id])
            self._reasons.clear()

    def _count(self, old: JobRecord | None, new: JobRecord | None) -> None:
        if old is not None and not old.state.terminal:
            self.unfinished.discard(old.job_id)
            self._ports[old.master_port] -= 1
            if not self._ports[old.master_port]:
                del self._ports[old.master_port]
        if new is not None and not new.state.terminal:
            self.unfinished.add(new.job_id)
            self._ports[new.master_port] += 1
        if new is not None and new.spec.elastic and new.state.under_way:
            self.growing.add(new.job_id)
        elif old is not None:
            self.growing.discard(old.job_id)
        if new is not None and new.state is JobState.PENDING:
            self.waiting.add(new)
        elif old is not None:
            self.waiting.discard(old)
