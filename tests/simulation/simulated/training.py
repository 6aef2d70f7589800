"""Training as the engines of an elastic job see it together: steps that end everywhere, state that newcomers get."""

import asyncio

from simulated.daemon import EXITED, RUNNING, STOPPED

DIAL_S = 6.0  # so long a host waits for the others of a planned generation


class Training:
    """``clumsy``: how likely it is that newcomers fail; ``broken`` gets promises that don't hold."""

    def __init__(self, rng, daemons, broken):
        self._rng = rng
        self._daemons = daemons
        self._broken = broken
        self._loop = asyncio.get_running_loop()
        self._due = set()
        self.clumsy = 0.5

    def _later(self, kind, call, job_id, entered, seconds):
        key = kind, job_id, entered
        if key not in self._due:
            self._due.add(key)

            def run():
                self._due.discard(key)
                call(job_id, entered)

            self._loop.call_later(seconds, run)

    def _in(self, job_id, entered):
        for daemon in self._daemons:
            part = daemon.parts.get(job_id)
            if daemon.alive and part is not None and part.fact.entered == entered and part.present:
                yield daemon, part

    # ---- a planned change

    def plan_is_known(self, job_id, entered):
        """Somebody in that generation has been told to stop after the step."""
        self._later("step", self._step_ends, job_id, entered, self._rng.uniform(0.0, 2.0))

    def _step_ends(self, job_id, entered):
        found = list(self._in(job_id, entered))
        if not any(part.run is not None and part.run.planned and part.run.generation > entered for _, part in found):
            return
        there = {daemon.node_id for daemon, part in found if self._computes(daemon, part)}
        if any(set(part.nodes) - there for _, part in found) or not all(part.stepping for _, part in found):
            self._later("step", self._step_ends, job_id, entered, 1.0)
            return
        for daemon, part in found:
            daemon.at_boundary(part)

    def _computes(self, daemon, part):
        frozen = self._loop.time() < daemon.frozen_until
        ranks = [rank for rank in part.fact.ranks if rank.member in part.present]
        return not (frozen or part.fact.suspended) and all(rank.state == RUNNING for rank in ranks)

    # ---- a generation begins

    def enters(self, daemon, part, at_once):
        """An engine leaves its generation for the one of its newest RunJob."""
        run = part.run
        assert run is not None
        job_id = run.job_id
        plans = {host.node_id: set(host.members) for host in run.hosts}
        stateless = [
            rank.member
            for other in self._daemons
            if job_id in other.parts
            for rank in other.parts[job_id].fact.ranks
            if rank.newcomer and rank.member in plans.get(other.node_id, ())
        ]
        if stateless and part.stepping and not part.boundary:
            self._broken.append(f"{daemon.node_id} repeats a step of {job_id} with newcomers {stateless}")
        part.stepping = not stateless
        if stateless:
            self._later("state", self._transfer, job_id, run.generation, self._rng.uniform(0.0, 2.0))
        if at_once:
            for other in self._daemons:
                left = other.parts.get(job_id)
                if left is not None and 0 < left.fact.entered < run.generation and other is not daemon:
                    self._loop.call_later(0.1, other.suspend, job_id, left.fact.entered, "others have left")
        else:
            self._loop.call_later(DIAL_S, self._look_for_others, job_id, run.generation)

    def _look_for_others(self, job_id, entered):
        """Members that have not come into a planned one are lost; newcomers wait for those that train, as long as it
        takes."""
        found = list(self._in(job_id, entered))
        there = {daemon.node_id for daemon, _ in found}
        missing = {name for _, part in found for name in part.nodes} - there
        if not missing:
            return
        if all(rank.newcomer for _, part in found for rank in part.fact.ranks):
            self._loop.call_later(DIAL_S, self._look_for_others, job_id, entered)
            return
        for daemon, _ in found:
            daemon.suspend(job_id, entered, f"{min(missing)} does not answer", min(missing))

    def _transfer(self, job_id, entered):
        """Newcomers get the state of the job; or one finds that its model is another."""
        found = list(self._in(job_id, entered))
        if any(part.fact.suspended for _, part in found):
            return
        there = {daemon.node_id for daemon, _ in found}
        if found and any(set(part.nodes) - there for _, part in found):
            self._later("state", self._transfer, job_id, entered, 1.0)
            return
        strangers = [one for one in found if all(rank.newcomer for rank in one[1].fact.ranks)]
        if strangers and self._rng.random() < 0.2 * self.clumsy:
            stranger, part = strangers[0]
            stranger.newcomers_fail(part)
            return
        for daemon, part in found:
            part.stepping = True
            for rank in part.fact.ranks:
                if rank.member in part.present and rank.state != EXITED:
                    rank.newcomer, rank.ready_to_join = False, False
            if part.fact.phase != STOPPED:
                daemon.changed(part)
