"""Stands in for the coordinator of an elastic job whose members come and go, in tests that host engines themselves."""

import threading

from bagua.base.islands import divide


class Regrouper:
    """Knows the members of a job, and makes the next generation of those that are left, or that have come.

    ``hosts``: member numbers on every host. ``joining``: newcomers, likewise; when all of them are ready, the
    generation with them is planned. ``plans``: otherwise they come with the generation that follows the next loss.
    ``island_size``: with one member all of its island are out; ``end`` is called with those that live.
    """

    def __init__(self, hosts, island_size=1, end=lambda members: None):
        self._island_size, self._end = island_size, end
        self._lock = threading.RLock()  # one generation is made after the other
        self.generation = 1
        self.passes = 0  # that a rank had begun before the newest planned generation
        self._settled = 1  # the newest generation that has begun, or begins at once
        self.hosts = {index: list(members) for index, members in enumerate(hosts)}
        self.joining = {}
        self.ready = set()
        self.planned = None  # hosts of the generation that is planned
        self._begun = set()  # hosts where it has begun
        self._gone = set()
        self.engines = {}
        self.on_regroup = lambda generation: None
        self.plans = True
        self.on_ready = lambda: None
        self.on_plan = lambda generation: None

    def take(self, index, event):
        """The engine of a host has told something. Hosts tell in any order: that a generation is suspended may come
        before others, or even this one, have told that it has begun."""
        with self._lock:
            if event["kind"] == "suspended" and event["rank"] >= 0:
                self._gone.add(event["rank"])
                if event["generation"] >= self._settled:
                    self._follow_loss(event["generation"])
            elif event["kind"] == "ready_to_join":
                self.ready.add(event["rank"])
                self.admit()
            elif event["kind"] == "lost":
                self._gone.add(event["rank"])
                self.joining = _without(self.joining, self._gone)
            elif event["kind"] == "regrouped" and event["generation"] == self.generation and self.planned is not None:
                self._begun.add(index)
                self.passes = max(self.passes, event["passes"])
                if self._begun >= set(self.planned):
                    self._settle()

    def _newcomers(self):
        return [member for members in self.joining.values() for member in members]

    def _settle(self):
        """The planned change takes place everywhere."""
        assert self.planned is not None
        self.hosts, self.planned = self.planned, None
        self._settled = self.generation
        self._admitted(self.hosts)

    def _admitted(self, hosts):
        """The members of these hosts are no newcomers any more."""
        members = [member for ranks in hosts.values() for member in ranks]
        self.joining = _without(self.joining, members)
        self.ready -= set(members)

    def _follow_loss(self, generation):
        """The next generation, without those that are gone, after one that is suspended. It takes the place of one that
        is planned. If that has begun nowhere, newcomers are let in by a later one: members may have a step to
        repeat."""
        if self.planned is not None and (self._begun or generation == self.generation):
            self._settle()
        islands = [divide(one, self._island_size, self._gone.__contains__) for one in self.hosts.values()]
        out = {member for _, members in islands for member in members} - self._gone
        self._gone |= out
        self._end(out)
        self.hosts = _without(self.hosts, self._gone)
        self.joining = _without(self.joining, self._gone)
        self.planned = None
        if not self.plans:
            self.hosts = self._with_newcomers()
            self._admitted(self.hosts)
        self._regroup()
        self.admit()

    def lose(self, members):
        """These have ended before they joined, of which no engine tells."""
        with self._lock:
            self._gone.update(members)
            self._follow_loss(self.generation)

    def again(self):
        """The next generation, of the same members: a link broke."""
        with self._lock:
            self._regroup()

    def admit(self):
        """Plans a generation with the newcomers, if all of them are ready."""
        newcomers = self._newcomers()
        if not newcomers or not self.ready >= set(newcomers):
            return
        self.on_ready()
        if self.planned is None and self.plans:
            self.plan(self._with_newcomers())

    def _with_newcomers(self):
        hosts = {index: list(members) for index, members in self.hosts.items()}
        for index, members in self.joining.items():
            hosts.setdefault(index, []).extend(members)
        return hosts

    def plan(self, hosts):
        """The next generation, after the same step everywhere."""
        with self._lock:
            self.generation += 1
            self.planned, self._begun = hosts, set()
            members, layout = _layout(hosts)
            for index in {**self.hosts, **self.joining}:
                place = list(hosts).index(index) if index in hosts else -1
                peers = [self.engines[other].address() for other in hosts]
                self.engines[index].plan(
                    generation=self.generation, host_index=place, hosts=layout, members=members, peers=peers
                )
        self.on_plan(self.generation)

    def hold(self):
        """All stop after the same step, and wait."""
        with self._lock:
            self.generation += 1
            for index in self.hosts:
                self.engines[index].plan(generation=self.generation, hold=True)
        self.on_plan(self.generation)

    def _regroup(self):
        self.generation += 1
        self._settled = self.generation
        members, layout = _layout(self.hosts)
        for place, index in enumerate(self.hosts):
            try:
                self.engines[index].regroup(generation=self.generation, host_index=place, hosts=layout, members=members)
            except Exception:
                if self.engines[index].error():  # a program has failed meanwhile, and its job: nothing follows
                    return
                raise
        if len(self.hosts) > 1:
            for index in self.hosts:
                self.engines[index].set_peers([self.engines[other].address() for other in self.hosts])
        self.on_regroup(self.generation)


def _without(hosts, gone):
    left = {index: [member for member in members if member not in gone] for index, members in hosts.items()}
    return {index: members for index, members in left.items() if members}


def _layout(hosts):
    """Members by rank, and ranks by host."""
    members = [member for ranks in hosts.values() for member in ranks]
    layout, first = [], 0
    for ranks in hosts.values():
        layout.append(list(range(first, first + len(ranks))))
        first += len(ranks)
    return members, layout
