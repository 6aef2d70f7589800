"""The operator is killed after any of its writes, and the next one goes on: the same course, nothing twice."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from bagua.operator import facts, objects
from bagua.operator.facts import Cancel, NodeState, Pod, Secrets, Seen, Submit, Task
from bagua.operator.reconcile import attempt_name, reconcile
from bagua.operator.settings import Settings

SETTINGS = Settings()
ROUNDS = 400
BEGIN = 1_800_000_000.0


class Killed(Exception):
    """The operator dies."""


@dataclass
class World:
    """A cluster and the coordinator of one job, as the operator sees them. ``writes``: how often it changed something;
    ``dies_after``: these writes."""

    dies_after: frozenset[int] = frozenset()
    writes: int = 0
    now: float = BEGIN
    body: dict[str, Any] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    hashes: dict[tuple[str, str], str] = field(default_factory=dict)
    secrets: Secrets = field(default_factory=Secrets)
    draining: set[str] = field(default_factory=set)
    tasks: dict[str, tuple[str, Task]] = field(default_factory=dict)  # key -> (name, task)
    story: list[str] = field(default_factory=list)  # phases

    def __post_init__(self):
        spec = {"image": "bagua:1", "replicas": 2, "run": {"script": "train.py"}, "runPolicy": {"backoffSeconds": 5}}
        spec["elastic"] = {"minReplicas": 1, "maxReplicas": 4}
        self.body = {"metadata": {"name": "j", "namespace": "n", "uid": "u", "generation": 1}, "spec": spec}

    @property
    def status(self):
        return dict(self.body.get("status", {}))

    @property
    def spec(self):
        return dict(self.body["spec"])

    def look(self):
        body = json.loads(json.dumps(self.body))
        bare = Seen(body)
        name = attempt_name(bare, self.status.get("attempt", 0))
        tasks = list(self.tasks.values())
        return Seen(
            body,
            tuple(self.pods.values()),
            dict(self.hashes),
            self.secrets,
            coordinator_credentials=self.secrets.mark,
            reachable=("StatefulSet", "j-coordinator") in self.hashes,
            task=next((task for called, task in tasks if called == name), None),
            former_attempts=tuple(task.job_id for called, task in tasks if called != name and not task.ended),
            nodes={pod.name: NodeState(True, pod.name in self.draining) for pod in self.pods.values() if not pod.ended},
        )

    def serve(self):
        """One round of the operator, in the order of ``Controller``."""
        plan = reconcile(seen := self.look(), SETTINGS, self.now)
        if plan.status != seen.status:
            self.body["status"] = json.loads(json.dumps(plan.status))
            if not self.story or self.story[-1] != plan.status["phase"]:
                self.story.append(plan.status["phase"])
            self._wrote()
        for action in plan.actions:
            self._perform(action)
            self._wrote()

    def _wrote(self):
        self.writes += 1
        if self.writes in self.dies_after:
            raise Killed

    def _perform(self, action):
        match action:
            case facts.MakeCredentials():
                self.secrets = Secrets(True, True, "", self.now, self.now + 800 * 86_400, "mark")
            case facts.Apply(manifest):
                self.hashes[manifest["kind"], manifest["metadata"]["name"]] = objects.hash_of(manifest)
            case facts.Create(manifest):
                name = manifest["metadata"]["name"]
                made = Pod(name, int(name.rpartition("-")[2]), hash=objects.hash_of(manifest))
                self.pods.setdefault(name, made)
            case facts.Delete(_, name):
                self.pods.pop(name, None)
            case Submit(key, name):
                self.tasks.setdefault(key, (name, Task(key, "pending", wanted=self.spec["replicas"])))
            case Cancel(job_id, reason):
                self.change(job_id, state="cancelled", reason=reason, nodes=frozenset(), members=frozenset())
            case facts.Scale(job_id, nodes):
                self.change(job_id, wanted=nodes)
            case facts.Drain(node_id, _):
                self.draining.add(node_id)
            case _:
                raise AssertionError(action)

    def change(self, job_id, **changes):
        name, task = self.tasks[job_id]
        self.tasks[job_id] = (name, replace(task, **changes))

    def go_on(self):
        """Kubelets and the coordinator do their part, and time passes."""
        self.now += 2.0
        for name, pod in self.pods.items():
            if pod.phase == "Pending":
                self.pods[name] = replace(pod, phase="Running", scheduled=True)
        fit = [pod.name for pod in self.pods.values() if pod.phase == "Running" and pod.name not in self.draining]
        for job_id, (_, task) in self.tasks.items():
            if not task.ended:
                members = frozenset(sorted(fit)[: task.wanted])
                self.change(job_id, state="running", nodes=members, members=members)

    @property
    def running(self):
        """Members of the attempt that runs."""
        return sum(len(task.members) for _, task in self.tasks.values() if task.state == "running")

    def end(self, state, code):
        (job_id,) = [job_id for job_id, (_, task) in self.tasks.items() if not task.ended]
        self.change(job_id, state=state, exit_code=code, reason="its end", nodes=frozenset(), members=frozenset())

    def until(self, phase, members):
        for _ in range(ROUNDS):
            with contextlib.suppress(Killed):
                self.serve()
            self.go_on()
            if self.status.get("phase") == phase and self.running == members:
                return
        raise AssertionError((phase, members, self.status, self.pods, self.tasks))

    def live(self):
        """A job from its creation to its end, with all that its owner and the cluster do to it."""
        self.until("Running", 2)
        self.pods["j-1"] = replace(self.pods["j-1"], phase="Failed")
        self.go_on()
        self.until("Running", 2)
        self.body["spec"]["replicas"] = 3
        self.until("Running", 3)
        self.body["spec"]["replicas"] = 2
        self.until("Running", 2)
        self.body["spec"]["runPolicy"]["suspend"] = True
        self.until("Suspended", 0)
        self.body["spec"]["runPolicy"]["suspend"] = False
        self.until("Running", 2)
        self.end("failed", 137)
        self.until("Running", 2)
        self.end("succeeded", 0)
        self.until("Succeeded", 0)


def outcome(world):
    """Where it ends, and what was counted on the way."""
    kept = {name: world.status[name] for name in ("phase", "attempt", "failures", "jobId")}
    states = {job_id: task.state for job_id, (_, task) in world.tasks.items()}
    return kept, states, set(world.hashes)


@pytest.fixture(scope="module")
def whole():
    world = World()
    world.live()
    return world


def test_a_course_without_a_kill(whole):
    kept, states, _ = outcome(whole)
    assert kept == {"phase": "Succeeded", "attempt": 2, "failures": 1, "jobId": "u-2"}
    assert states == {"u-0": "cancelled", "u-1": "failed", "u-2": "succeeded"}
    assert whole.writes > 30


def test_a_kill_after_any_write(whole):
    for write in range(1, whole.writes + 1):
        world = World(frozenset({write}))
        world.live()
        assert outcome(world) == outcome(whole), f"killed after write {write}"
        assert world.story == whole.story, f"killed after write {write}"


def test_a_kill_after_each_write(whole):
    world = World(frozenset(range(1, 10 * whole.writes)))
    world.live()
    assert outcome(world) == outcome(whole) and world.story == whole.story
