"""A store in memory: the promises of ``coordinator/store/store.py`` without a database."""

from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from bagua.daemon.coordinator.rules.domain import CoordinatorRecord, Phase, Stored

T = TypeVar("T")


class MemoryStore:
    """``on_commit`` is called after each transaction that was committed."""

    shared = False

    def __init__(self, on_commit=lambda: None):
        self.jobs = {}
        self.keys = {}
        self.events = {}
        self.nodes = {}
        self.beats = {}
        self._on_commit = on_commit

    @contextmanager
    def transaction(self):
        """Commits at the end, rolls back on an exception."""
        before = {name: dict(getattr(self, name)) for name in ("jobs", "keys", "events", "nodes", "beats")}
        try:
            yield MemoryTransaction(self)
        except BaseException:
            vars(self).update(before)
            raise
        self._on_commit()

    def apply(self, work):
        """The result of ``work``, in a transaction."""
        with self.transaction() as tx:
            return work(tx)

    @contextmanager
    def read(self):
        yield MemoryTransaction(self)

    def look(self, work):
        """The result of ``work``."""
        with self.read() as tx:
            return work(tx)


class MemoryTransaction:
    """The part of a transaction that a coordinator alone on its database needs."""

    def __init__(self, store):
        self._store = store

    def create_job(self, job, key, owner, events=()):
        if key is not None and key in self._store.keys:
            return False
        if key is not None:
            self._store.keys[key] = job.job_id
        added = tuple(events)
        self._store.jobs[job.job_id] = Stored(job, 1, len(added), owner)
        self._add(job.job_id, added)
        return True

    def create_jobs(self, submitted, owner):
        return {job.job_id for job, key, events in submitted if self.create_job(job, key, owner, events)}

    def job(self, job_id):
        found = self._store.jobs.get(job_id)
        return None if found is None else found.job

    def job_by_key(self, key):
        return self.job(self._store.keys[key]) if key in self._store.keys else None

    def stored(self, job_ids):
        return [self._store.jobs[job_id] for job_id in job_ids if job_id in self._store.jobs]

    def live(self):
        return {
            job_id: stored.revision
            for job_id, stored in self._store.jobs.items()
            if not stored.job.state.terminal or any(host.phase is not Phase.STOPPED for host in stored.job.parts)
        }

    def save(self, changes, nodes=None):
        assert nodes is None
        stale = set()
        for change in changes:
            job_id = change.job.job_id
            known = self._store.jobs.get(job_id)
            if known is None or known.revision != change.old.revision:
                stale.add(job_id)
                continue
            self._store.jobs[job_id] = change.stored
            self._add(job_id, change.events)
        return stale

    def events(self, job_id, after_seq, limit):
        return list(self._store.events.get(job_id, ())[after_seq : after_seq + limit])

    def beat(self, owner, clock):
        self._store.beats[owner] = clock

    def coordinators(self):
        return [CoordinatorRecord(owner, clock) for owner, clock in self._store.beats.items()]

    def put_nodes(self, nodes):
        for node in nodes:
            known = self._store.nodes.get(node.node_id)
            self._store.nodes[node.node_id] = node if known is None else replace(node, draining=known.draining)

    def mark_node(self, node_id, draining, leaving):
        known = self._store.nodes.get(node_id)
        if known is not None:
            draining = known.draining if draining is None else draining
            leaving = known.leaving if leaving is None else leaving
            self._store.nodes[node_id] = replace(known, draining=draining, leaving=leaving)

    def node(self, node_id):
        return self._store.nodes.get(node_id)

    def nodes(self):
        return [self._store.nodes[node_id] for node_id in sorted(self._store.nodes)]

    def disconnect_nodes(self, node_ids, owner, last_seen):
        for node_id in node_ids:
            known = self._store.nodes.get(node_id)
            if known is not None and known.owner == owner:
                self._store.nodes[node_id] = replace(known, owner=None, last_seen=last_seen)

    def disconnect_all(self, owner):
        found = [node for node in self._store.nodes.values() if node.owner == owner]
        for node in found:
            self._store.nodes[node.node_id] = replace(node, owner=None)
        return [node.node_id for node in found]

    def _add(self, job_id, events):
        known = self._store.events.get(job_id, ())
        new = tuple(replace(event, seq=len(known) + number) for number, event in enumerate(events, 1))
        self._store.events[job_id] = (*known, *new)
