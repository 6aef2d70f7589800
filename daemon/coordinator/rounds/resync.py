"""Takes in what the database has otherwise than the board: other coordinators have written it, or a write that failed
here was done all the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bagua.daemon.coordinator.rounds.inbox import Inbox
from bagua.daemon.coordinator.rounds.intake import Intake
from bagua.daemon.coordinator.rounds.live_state import Board
from bagua.daemon.coordinator.rounds.own_lease import OwnLease
from bagua.daemon.coordinator.rounds.publisher import Publisher
from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.rules.coordinator_leases import RESYNC_S, CoordinatorLeases
from bagua.daemon.coordinator.rules.domain import NodeRecord, NodeView, Phase
from bagua.daemon.coordinator.store.worker import Worker
from bagua.daemon.coordinator.streams.sessions import Sessions


@dataclass(eq=False)
class Resync:
    """Compares board and database. ``leases``: None where no other coordinator uses the database."""

    worker: Worker
    clock: ServiceClock
    board: Board
    sessions: Sessions
    intake: Intake
    publisher: Publisher
    leases: CoordinatorLeases | None
    own: OwnLease

    def __post_init__(self) -> None:
        self._orphans: set[str] = set()
        self.due = 0.0
        """Time of the next look at the other coordinators, by the service clock."""

    async def look(self, now: float) -> None:
        """Takes in what other coordinators have written, when that is due."""
        if self.leases is not None and now >= self.due:
            self.due = now + RESYNC_S
            await self._look(self.leases)

    async def _look(self, leases: CoordinatorLeases) -> None:
        began = self.own.now()
        coordinators = await self.own.await_database(self.worker.read(lambda tx: tx.coordinators()))
        beats = {one.owner: one.clock for one in coordinators}
        alone = leases.alone(beats)
        jump = self.clock.catch_up(max(beats.values(), default=0.0))
        if jump:  # others were awake while this one was not: it blames nobody for that time
            self.sessions.put_forward(jump)
            self.board.put_forward(jump)
            leases.put_forward(jump)
        leases.observe(beats)
        self.own.refreshed(began, coordinators, alone)
        if not alone:
            read = self.worker.read(lambda tx: (tx.nodes(), tx.live()))
            nodes, live = await self.own.await_database(read)
            for node in nodes:
                if self.sessions.get(node.node_id) is None:
                    self._take_in_node(leases, node)
                else:  # the session itself tells, but for what users ask of another coordinator
                    self._take_in_wish(node)
            await self._compare(live)
        self._orphans = set(leases.orphans(self.board.jobs.values()))

    def take_orphans(self) -> set[str]:
        """Returns the living jobs about which nobody decides, as the last look found them, each once."""
        found = self._orphans & self.board.jobs.keys()
        self._orphans = set()
        return found

    async def compare(self) -> None:
        """Takes in the jobs that the database has otherwise."""
        await self._compare(await self.worker.read(lambda tx: tx.live()))

    async def _compare(self, live: Mapping[str, int]) -> None:
        """``live``: the revisions that the database has."""
        here = {job_id: stored.revision for job_id, stored in self.board.jobs.items()}
        differ = {job_id for job_id in here.keys() | live.keys() if here.get(job_id) != live.get(job_id)}
        await self.reload(differ)
        self.intake.look(differ)

    async def reload(self, job_ids: set[str]) -> None:
        """Takes in jobs as the database has them."""
        if not job_ids:
            return
        read = await self.worker.read(lambda tx: tx.stored(sorted(job_ids)))
        found = {stored.job.job_id: stored for stored in read}
        for job_id in job_ids:
            await self.publisher.replace(job_id, found.get(job_id))

    async def load_unknown(self, taken: Inbox) -> None:
        """A job that is not on the board may have been made by another coordinator a moment ago."""
        if self.leases is None:
            return
        unknown = {call.job_id for call in taken.requests if self.board.job(call.job_id) is None}
        for fact in taken.facts.values():
            job = self.board.job(fact.job.job_id)
            if fact.job.phase is not Phase.STOPPED and (job is None or job.generation < fact.job.generation):
                unknown.add(fact.job.job_id)
        await self.reload(unknown)

    def _take_in_node(self, leases: CoordinatorLeases, node: NodeRecord) -> None:
        view = self.board.views.get(node.node_id)
        connected = leases.connected(node)
        same = view is not None and (
            (view.boot_id, view.slots, view.address, view.asked_to_drain, view.leaving)
            == (node.boot_id, node.slots, node.address, node.draining, node.leaving)
        )
        if same and view is not None and view.connected is connected:
            return
        heard = leases.heard_of(node, view, self.clock.now())
        self.intake.inbox.room |= self.board.put_node(node, connected, heard, hung_up=_hung_up(node, view))
        self.intake.look(self.board.on_node(node.node_id))

    def _take_in_wish(self, node: NodeRecord) -> None:
        view = self.board.views.get(node.node_id)
        if view is not None and view.asked_to_drain is not node.draining:
            self.intake.inbox.room |= self.board.mark_node(node.node_id, node.draining, None)
            self.intake.look(self.board.on_node(node.node_id))


def _hung_up(node: NodeRecord, view: NodeView | None) -> bool:
    """True if another coordinator has seen the node's session end. One that starts again writes no time: nobody has
    seen the sessions of its former run end. ``view``: of the node, so far."""
    if view is None or node.owner is not None:
        return False
    return node.last_seen != view.last_seen if view.connected else view.hung_up
