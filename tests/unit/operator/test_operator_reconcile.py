"""Decisions about BaguaJobs: facts in, actions and status out; the clock is an argument."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bagua.base.errors import ConfigError
from bagua.operator import facts, objects, pods, status
from bagua.operator.facts import (
    Cancel,
    Create,
    Delete,
    Drain,
    NodeState,
    Pause,
    Pod,
    Resume,
    Scale,
    Secrets,
    Seen,
    Submit,
    Task,
)
from bagua.operator.job import Spec, parse
from bagua.operator.reconcile import reconcile
from bagua.operator.service import specification
from bagua.operator.settings import Settings

NOW = 1_800_000_000.0
SETTINGS = Settings()
ELASTIC = {"minReplicas": 1, "maxReplicas": 4}
HERE = Secrets(True, True, "", NOW - 1000, NOW + 800 * 86_400, "mark")


def seen(replicas: int = 2, state: dict[str, Any] | None = None, **changes: Any) -> Seen:
    """A job with its Secrets and objects in place, and pods that have come."""
    policy = changes.pop("policy", {})
    elastic = changes.pop("elastic", ELASTIC)
    spec = {"image": "bagua:1", "replicas": replicas, "run": {"script": "train.py"}, "runPolicy": policy}
    if elastic:
        spec["elastic"] = elastic
    metadata = {"name": "j", "namespace": "n", "uid": "u", "generation": 1}
    body = {"metadata": metadata, "spec": {**spec, **changes.pop("spec", {})}}
    if state is not None:
        body["status"] = state
    made = Seen(body, secrets=HERE, coordinator_credentials="mark", reachable=True)
    whole = objects.infrastructure(made, parse(body["spec"]), "mark", True)
    made = replace(made, hashes={(one["kind"], one["metadata"]["name"]): objects.hash_of(one) for one in whole})
    return replace(made, **changes)


def with_pods(one: Seen, *indices: int, connected: bool = True, **changes: Any) -> Seen:
    mark = pods.wanted_hash(one, parse(one.body["spec"]))
    found = tuple(Pod(f"j-{index}", index, "Running", True, hash=mark) for index in indices)
    nodes = {pod.name: NodeState(connected) for pod in found}
    return replace(one, **{"pods": found, "nodes": nodes, **changes})


def task(*indices: int, state: str = "running", wanted: int = 2, **changes: Any) -> Task:
    names = frozenset(f"j-{index}" for index in indices)
    return Task("id", state, nodes=names, members=names, wanted=wanted, **changes)


def decide(one: Seen, now: float = NOW) -> facts.Plan:
    return reconcile(one, SETTINGS, now)


def kinds(plan: facts.Plan, *wanted: type) -> list[Any]:
    return [action for action in plan.actions if isinstance(action, wanted)]


def names(actions: list[Any]) -> list[str]:
    return [one.manifest["metadata"]["name"] if isinstance(one, Create) else one.name for one in actions]


def test_secrets_come_before_anything_that_needs_them() -> None:
    plan = decide(seen(secrets=Secrets()))
    assert plan.actions == (facts.MakeCredentials(True, True),)
    assert plan.status["phase"] == "Pending"


def test_an_issuer_is_asked_for_the_certificate() -> None:
    plan = reconcile(seen(secrets=Secrets()), Settings(issuer="ClusterIssuer/b"), NOW)
    asked, applied = plan.actions
    assert asked == facts.MakeCredentials(True, False) and isinstance(applied, facts.Apply)
    assert applied.manifest["spec"]["issuerRef"]["name"] == "b"


def test_a_new_job_gets_its_objects_and_pods() -> None:
    plan = decide(seen(hashes={}))
    applied = [one.manifest["kind"] for one in kinds(plan, facts.Apply)]
    assert sorted(applied) == [
        *("NetworkPolicy", "NetworkPolicy", "PersistentVolumeClaim", "PodDisruptionBudget", "Service", "StatefulSet")
    ]
    assert names(kinds(plan, Create)) == ["j-0", "j-1"]
    assert not kinds(plan, Submit)


def test_a_job_whose_objects_are_right_writes_nothing() -> None:
    running = with_pods(seen(), 0, 1, task=task(0, 1))
    first = decide(running)
    again = decide(replace(running, body={**running.body, "status": first.status}), NOW + 100)
    assert again.actions == () and again.status == first.status


def test_it_is_submitted_when_all_daemons_have_come() -> None:
    assert not kinds(decide(with_pods(seen(), 0, 1, connected=False)), Submit)
    assert kinds(decide(with_pods(seen(), 0, 1)), Submit) == [Submit("u-0", "j-0")]


def test_an_elastic_job_begins_on_its_minimum_after_a_while() -> None:
    since = {"gangSince": status.stamp(NOW - 10)}
    assert not kinds(decide(with_pods(seen(state=since), 0)), Submit)
    since = {"gangSince": status.stamp(NOW - 40)}
    one = with_pods(seen(state=since), 0)
    assert kinds(decide(one), Submit)
    pulls = Pod("j-1", 1, scheduled=True, hash=one.pods[0].hash)
    assert not kinds(decide(replace(one, pods=(*one.pods, pulls))), Submit)
    assert kinds(decide(replace(one, pods=(*one.pods, pulls)), NOW + 300), Submit)


def test_a_static_job_is_placed_whole_or_not_at_all() -> None:
    since = {"gangSince": status.stamp(NOW - 100), "phase": "Pending"}
    one = with_pods(seen(elastic=None, state=since), 0)
    waiting = replace(one, pods=(*one.pods, Pod("j-1", 1, hash=one.pods[0].hash)))
    assert not kinds(decide(waiting), Submit, Delete)
    plan = decide(waiting, NOW + 300)
    assert names(kinds(plan, Delete)) == ["j-0", "j-1"]
    assert "1 of 2 pods are placed" in plan.status["message"]
    given_back = replace(waiting, pods=(), body={**waiting.body, "status": plan.status})
    assert not kinds(decide(given_back, NOW + 310), Create)
    assert len(kinds(decide(given_back, NOW + 300 + 601), Create)) == 2


def test_a_job_that_begins_is_looked_at_often_for_a_minute() -> None:
    for age, again_s in ((5, 0.2), (20, 1.0), (100, Settings().poll_s)):
        one = with_pods(seen(elastic=None, state={"gangSince": status.stamp(NOW - age), "phase": "Pending"}), 0)
        assert decide(replace(one, reachable=False)).again_s == again_s


def test_kueue_and_volcano_place_gangs_themselves() -> None:
    policy = {"schedulingPolicy": {"queue": "gpus", "priorityClass": "high"}}
    kueue = decide(seen(elastic=None, policy=policy, api_groups=frozenset({pods.KUEUE})))
    made = kinds(kueue, Create)[0].manifest
    assert made["metadata"]["labels"][f"{pods.KUEUE}/queue-name"] == "gpus"
    assert made["metadata"]["labels"][f"{pods.KUEUE}/pod-group-name"] == "j-0"
    assert made["metadata"]["annotations"][f"{pods.KUEUE}/pod-group-total-count"] == "2"
    assert made["spec"]["priorityClassName"] == "high"
    volcano = decide(seen(elastic=None, policy=policy, api_groups=frozenset({pods.VOLCANO})))
    group = next(one.manifest for one in kinds(volcano, facts.Apply) if one.manifest["kind"] == "PodGroup")
    assert group["spec"] == {"minMember": 2, "queue": "gpus", "priorityClassName": "high"}
    assert kinds(volcano, Create)[0].manifest["spec"]["schedulerName"] == "volcano"


def test_growing_makes_a_pod_and_tells_the_coordinator() -> None:
    plan = decide(with_pods(seen(3), 0, 1, task=task(0, 1)))
    assert kinds(plan, Scale) == [Scale("id", 3)]
    assert names(kinds(plan, Create)) == ["j-2"]


def test_shrinking_deletes_pods_only_when_the_job_has_left_them() -> None:
    plan = decide(with_pods(seen(2), 0, 1, 2, task=task(0, 1, 2, wanted=3)))
    assert kinds(plan, Scale) == [Scale("id", 2)] and not kinds(plan, Delete)
    assert not kinds(decide(with_pods(seen(2), 0, 1, 2, task=task(0, 1, 2))), Delete)
    assert names(kinds(decide(with_pods(seen(2), 0, 1, 2, task=task(0, 2))), Delete)) == ["j-1"]


def test_numbers_stay_within_the_limits() -> None:
    begun = {"phase": "Running"}
    plan = decide(with_pods(seen(9, state=begun), 0, 1, task=task(0, 1)))
    assert kinds(plan, Scale) == [Scale("id", 4)]
    [told] = [one for one in plan.status["conditions"] if one["reason"] == "ScaleClamped"]
    assert told["message"].endswith("The job has 4.")


def test_a_lost_pod_is_replaced_under_a_free_name() -> None:
    one = with_pods(seen(), 0, 1, task=task(0, 1))
    leaving = replace(one, pods=(one.pods[0], replace(one.pods[1], leaving=True)))
    assert names(kinds(decide(leaving), Create)) == ["j-2"]
    ended = decide(replace(one, pods=(one.pods[0], replace(one.pods[1], phase="Failed"))))
    assert names(kinds(ended, Delete)) == ["j-1"] and names(kinds(ended, Create)) == ["j-2"]


def test_a_notice_drains_once_another_pod_is_there() -> None:
    one = with_pods(seen(), 0, 1, task=task(0, 1))
    warned = replace(one, pods=(one.pods[0], replace(one.pods[1], notice="spot")))
    plan = decide(warned)
    assert names(kinds(plan, Create)) == ["j-2"] and kinds(plan, Drain) == [Drain("j-1", "spot")]
    left = replace(warned, task=task(0), nodes={**one.nodes, "j-1": NodeState(True, True)})
    assert names(kinds(decide(left), Delete)) == ["j-1"]
    both = replace(with_pods(one, 0, 1, 2), pods=tuple(replace(pod, notice="spot") for pod in one.pods))
    both = replace(both, pods=(*both.pods, with_pods(one, 2).pods[0]))
    assert kinds(decide(both), Drain) == [Drain("j-0", "spot")]  # the last one holds the state
    static = decide(replace(with_pods(seen(elastic=None), 0, 1, task=task(0, 1)), pods=warned.pods))
    assert not kinds(static, Drain, Delete, Create)


def test_an_upgrade_replaces_one_pod_after_the_other() -> None:
    one = with_pods(seen(), 0, 1, task=task(0, 1))
    old = replace(one, pods=tuple(replace(pod, hash="old") for pod in one.pods))
    plan = decide(old)
    assert names(kinds(plan, Create)) == ["j-2"] and not kinds(plan, Drain)
    fresh = Pod("j-2", 2, "Running", True, hash=one.pods[0].hash)
    surged = replace(old, pods=(*old.pods, fresh))
    assert not kinds(decide(surged), Drain, Delete, Create), "its image may be a wrong one"
    for follower in (NodeState(False), NodeState(True, wire_version=9)):
        assert not kinds(decide(replace(surged, nodes={**old.nodes, "j-2": follower})), Drain, Delete, Create)
    there = replace(surged, nodes={**old.nodes, "j-2": NodeState(True)})
    assert kinds(decide(there), Drain) == [Drain("j-0", "its pod is replaced")]
    nodes = {"j-0": NodeState(True, True), "j-1": NodeState(True), "j-2": NodeState(True)}
    second = replace(surged, nodes=nodes, task=task(1, 2))
    assert names(kinds(decide(second), Delete)) == ["j-0"] and not kinds(decide(second), Drain, Create)
    static = replace(with_pods(seen(elastic=None), 0, 1, task=task(0, 1)), pods=old.pods)
    assert not kinds(decide(static), Drain, Delete, Create)


@pytest.mark.parametrize("state", ["running", "waiting"])
def test_pods_that_never_came_to_run_are_replaced_by_those_of_a_mended_specification(state: str) -> None:
    """The members stay as they are meanwhile."""
    members = (0,) if state == "waiting" else (0, 1)
    one = with_pods(seen(), *members, task=task(*members, state=state))
    wrong = Pod("j-2", 2, "Pending", True, hash="wrong image")
    old = replace(one, pods=(*(replace(pod, hash="first") for pod in one.pods), wrong))
    plan = decide(old)
    assert names(kinds(plan, Delete)) == ["j-2"] and not kinds(plan, Drain)
    assert len(kinds(plan, Create)) == 2 - len(members)


def test_suspended_jobs_give_their_pods_back_and_are_submitted_again() -> None:
    policy = {"suspend": True}
    running = with_pods(seen(policy=policy, state={"phase": "Running"}), 0, 1, task=task(0, 1))
    plan = decide(running)
    assert kinds(plan, Cancel) == [Cancel("id", "suspended")] and not kinds(plan, Delete)
    stopped = replace(
        running, task=task(state="cancelled", reason="suspended"), body={**running.body, "status": plan.status}
    )
    plan = decide(stopped)
    assert names(kinds(plan, Delete)) == ["j-0", "j-1"]
    assert plan.status["phase"] == "Stopping" and "j-0, j-1" in plan.status["message"]  # as of a finalizer
    gone = replace(stopped, pods=(), body={**running.body, "status": plan.status})
    plan = decide(gone)
    assert plan.status["phase"] == "Suspended" and plan.status["attempt"] == 1
    same = decide(replace(gone, task=None, body={**gone.body, "status": plan.status}))
    assert same.status["attempt"] == 1
    resumed = with_pods(seen(state=plan.status), 0, 1)
    assert kinds(decide(resumed), Submit) == [Submit("u-1", "j-1")]


def test_paused_jobs_keep_their_pods() -> None:
    policy = {"suspend": True, "suspendMode": "Pause"}
    plan = decide(with_pods(seen(policy=policy), 0, 1, task=task(0, 1)))
    assert kinds(plan, Pause) and plan.status["phase"] == "Suspended" and not kinds(plan, Delete)
    waits = decide(with_pods(seen(), 0, 1, task=task(0, 1, state="waiting", paused=True)))
    assert kinds(waits, Resume)


@pytest.mark.parametrize(
    ("policy", "code", "failures", "phase", "reason"),
    [
        ({}, 1, 0, "Restarting", "Restarting"),
        ({}, 1, 3, "Failed", "BackoffLimitExceeded"),
        ({"restartPolicy": "Never"}, 1, 0, "Failed", "Failed"),
        ({"restartPolicy": "ExitCode"}, 1, 0, "Failed", "ExitCode"),
        ({"restartPolicy": "ExitCode"}, 130, 0, "Restarting", "Restarting"),
        ({"restartPolicy": "ExitCode"}, -9, 0, "Restarting", "Restarting"),
    ],
)
def test_restart_policies(policy: dict[str, Any], code: int, failures: int, phase: str, reason: str) -> None:
    failed = task(state="failed", reason="Rank 1 failed.", exit_code=code)
    plan = decide(with_pods(seen(policy=policy, state={"failures": failures}), 0, 1, task=failed))
    assert plan.status["phase"] == phase and plan.status["failures"] == failures + 1
    condition = next(one for one in plan.status["conditions"] if one["type"] == phase)
    assert condition["status"] == "True" and condition["reason"] == reason
    if phase == "Restarting":
        assert plan.status["attempt"] == 1
        later = with_pods(seen(policy=policy, state=plan.status), 0, 1)
        assert not kinds(decide(later, NOW + 5), Submit)
        assert kinds(decide(later, NOW + 11), Submit) == [Submit("u-1", "j-1")]


@pytest.mark.parametrize("elastic", [None, ELASTIC], ids=["static", "elastic"])
@pytest.mark.parametrize("state", ["starting", "running", "waiting", "stopping"])
@pytest.mark.parametrize("lost", ["deleted", "failed", "its daemon alone"])
def test_the_coordinator_is_told_whose_pod_is_gone(elastic: Any, state: str, lost: str) -> None:
    """Whatever else is done about the job."""
    for policy in ({}, {"suspend": True}, {"suspend": True, "suspendMode": "Pause"}, {"activeDeadlineSeconds": 1}):
        if elastic is None and policy.get("suspendMode"):
            continue
        begun = {"startTime": status.stamp(NOW - 100)}
        whole = with_pods(seen(elastic=elastic, policy=policy, state=begun), 0, 1, task=task(0, 1, state=state))
        first, last = whole.pods
        ended = {"failed": replace(last, phase="Failed"), "its daemon alone": replace(last, daemon_ended=True)}
        here = (first,) if lost == "deleted" else (first, ended[lost])
        found = replace(whole, pods=here, ends={"j-1": "OOMKilled (exit code 137)"})
        assert not kinds(decide(whole), facts.Gone)
        soon = decide(found)  # its session has not ended yet
        assert not kinds(soon, facts.Gone) and soon.again_s is not None and soon.again_s <= 1.0
        away = replace(found, nodes={**found.nodes, "j-1": NodeState(False)})
        assert kinds(decide(away), facts.Gone) == [facts.Gone("j-1", "its pod is gone: OOMKilled (exit code 137)")]


def test_a_stop_that_waits_for_a_node_that_is_out_of_reach_says_so() -> None:
    stopping = task(0, 1, state="stopping", reason="Rank 1 was lost.")
    whole = with_pods(seen(elastic=None, state={"phase": "Running"}), 0, 1, task=stopping)
    plan = decide(replace(whole, nodes={**whole.nodes, "j-1": NodeState(False)}))
    assert not kinds(plan, facts.Gone), "its ranks may still run"
    assert plan.status["phase"] == "Stopping"
    assert (
        plan.status["message"].startswith("Rank 1 was lost. j-1 can't be reached") and "600 s" in plan.status["message"]
    )


def test_a_failure_tells_how_a_pod_ended() -> None:
    failed = task(0, 1, state="failed", reason="Rank 0 lost host 1.")
    found = with_pods(seen(elastic=None), 0, task=failed, ends={"j-1": "OOMKilled (exit code 137)", "j-7": "old"})
    assert decide(found).status["message"].endswith("Rank 0 lost host 1. (j-1: OOMKilled (exit code 137))")


def test_what_stands_in_the_way_is_in_one_condition() -> None:
    """What can't be made comes first; a job that has ended waits for nothing."""
    words = {"reason": "Unschedulable", "message": "Pod j-0: 2 Insufficient nvidia.com/gpu."}
    lacks = facts.Trouble(**words)
    waits = with_pods(seen(elastic=None), 0, 1, connected=False)
    waits = replace(waits, pods=tuple(replace(pod, scheduled=False, trouble=lacks) for pod in waits.pods))

    def blocked(one: Seen) -> tuple[str, str, str]:
        found = decide(one).status
        condition = next((one for one in found["conditions"] if one["type"] == "Blocked"), {"status": "", "reason": ""})
        return condition["status"], condition["reason"], found["message"]

    assert blocked(waits) == ("True", "Unschedulable", f"{words['message']} (1 more pod waits.)")
    pulls = facts.Trouble("ImagePullBackOff", "Pod j-coordinator-0, container coordinator: Back-off")
    assert blocked(with_pods(seen(coordinator_trouble=pulls), connected=False)) == ("True", pulls.reason, pulls.message)
    quota = facts.Trouble("Forbidden", "exceeded quota: pods")
    assert blocked(replace(waits, refusal=quota)) == ("True", "Forbidden", "exceeded quota: pods")
    state = decide(waits).status
    free = with_pods(seen(elastic=None, state=state), 0, 1, connected=False)
    assert blocked(free)[:2] == ("False", "Unblocked")
    runs = replace(waits, task=task(0, 1), nodes={})
    assert decide(runs).status["message"] == "Running" and blocked(runs)[0] == "True"
    ended = replace(waits, body={**waits.body, "status": state}, task=task(state="succeeded"))
    assert blocked(ended)[0] == "False"


def test_a_number_of_pods_beyond_the_limits_is_refused() -> None:
    """By the operator, where the API server knows no CEL; a job that goes on has the nearest one."""
    for replicas, nearest in ((9, 4), (1, 2)):
        limits = {"minReplicas": 2, "maxReplicas": 4}
        new = decide(seen(replicas, elastic=limits))
        assert new.status["phase"] == "Failed" and f"{replicas} is not between" in new.status["message"]
        assert not new.actions
        runs = with_pods(
            seen(replicas, elastic=limits, state={"phase": "Running"}), 0, 1, 2, task=task(0, 1, 2, wanted=3)
        )
        plan = decide(runs)
        condition = next(one for one in plan.status["conditions"] if one["type"] == "Invalid")
        assert condition["status"] == "True" and f"The job has {nearest}." in condition["message"]
        assert kinds(plan, Scale) == [Scale("id", nearest)]


def test_a_deadline_ends_the_job() -> None:
    late = {"startTime": status.stamp(NOW - 100)}
    plan = decide(with_pods(seen(policy={"activeDeadlineSeconds": 60}, state=late), 0, 1, task=task(0, 1)))
    assert "60 s" in kinds(plan, Cancel)[0].reason
    over = with_pods(seen(policy={"activeDeadlineSeconds": 60}, state=late), 0, 1, task=task(state="cancelled"))
    assert decide(over).status["phase"] == "Failed"


def test_a_suspended_job_is_looked_at_when_its_deadline_is_over() -> None:
    begun = {"startTime": status.stamp(NOW - 20)}
    rests = decide(seen(policy={"suspend": True, "activeDeadlineSeconds": 60}, state=begun))
    assert rests.status["phase"] == "Suspended" and rests.again_s == 40
    over = seen(policy={"suspend": True, "activeDeadlineSeconds": 60}, state=rests.status)
    assert decide(over, NOW + 40).status["phase"] == "Failed"


def test_ended_jobs_are_cleaned_up_and_deleted_in_time() -> None:
    policy = {"ttlSecondsAfterFinished": 60, "cleanPodPolicy": "All"}
    done = with_pods(seen(policy=policy), 0, 1, task=task(state="succeeded"))
    plan = decide(done)
    assert plan.status["phase"] == "Succeeded" and plan.status["completionTime"] == status.stamp(NOW)
    ended = replace(done, task=None, body={**done.body, "status": plan.status})
    plan = decide(ended)
    assert names(kinds(plan, Delete)) == ["j-0", "j-1"] and plan.again_s == 60
    assert [one.manifest["spec"]["replicas"] for one in kinds(plan, facts.Apply)] == [0]
    assert kinds(decide(ended, NOW + 61), Delete) == [Delete("BaguaJob", "j")]


@pytest.mark.parametrize("policy", ["None", "Running"])
def test_daemons_of_ended_jobs_end_and_their_pods_stay(policy: str) -> None:
    done = with_pods(seen(policy={"cleanPodPolicy": policy}), 0, 1, task=task(0, 1, state="succeeded"))
    status_ = decide(done).status
    assert status_["pods"] == "2/2" and status_["replicaStatuses"] == {"Worker": dict(active=0, succeeded=2, failed=0)}
    away = {**done.nodes, "j-1": NodeState(False)}
    ended = replace(done, body={**done.body, "status": status_}, nodes=away)
    plan = decide(ended)
    assert plan.actions == (facts.End("j-0", 0),) and plan.status["pods"] == "2/2" and plan.again_s == 1.0
    assert names(kinds(decide(ended, NOW + 61), Delete)) == ["j-0", "j-1"], "they would hold devices for good"
    never = replace(ended, pods=(*ended.pods, Pod("j-2", 2)))
    assert names(kinds(decide(never), Delete)) == ["j-2"]
    side = replace(ended, pods=tuple(replace(pod, daemon_ended=True) for pod in ended.pods))
    assert names(kinds(decide(side), Delete)) == ([] if policy == "None" else ["j-0", "j-1"])
    over = decide(replace(ended, pods=tuple(replace(pod, phase="Succeeded") for pod in ended.pods)))
    assert [one.manifest["spec"]["replicas"] for one in kinds(over, facts.Apply)] == [0] and over.again_s is None


def test_a_coordinator_that_is_away_changes_nothing() -> None:
    running = with_pods(seen(state={"phase": "Running", "jobId": "id"}), 0, 1, reachable=False, nodes={}, task=None)
    plan = decide(running)
    assert plan.actions == () and plan.status["phase"] == "Running" and "can't be reached" in plan.status["message"]


def test_other_attempts_are_ended_first() -> None:
    plan = decide(with_pods(seen(), 0, 1, former_attempts=("old",)))
    assert kinds(plan, Cancel) == [Cancel("old", "another attempt follows")]


def test_credentials_are_made_anew_in_time_and_on_request() -> None:
    old = replace(HERE, expires_at=NOW + 80 * 86_400)
    running = with_pods(seen(), 0, 1, task=task(0, 1))
    assert kinds(decide(replace(running, secrets=old)), facts.MakeCredentials) == [facts.MakeCredentials(False, True)]
    asked = {**running.body, "metadata": {**running.body["metadata"], "annotations": {facts.ROTATE: "1"}}}
    plan = decide(replace(running, body=asked))
    assert kinds(plan, facts.MakeCredentials) == [facts.MakeCredentials(True, True)]
    # The coordinator starts again when kubelets have had the time to hand out the new ones.
    made = replace(running, body=asked, secrets=replace(HERE, rotation="1", made_at=NOW, mark="new"))
    assert not kinds(decide(made), facts.Apply)
    assert [one.manifest["kind"] for one in kinds(decide(made, NOW + 121), facts.Apply)] == ["StatefulSet"]
    others = replace(running, secrets=old)
    assert not kinds(reconcile(others, Settings(issuer="ClusterIssuer/b"), NOW), facts.MakeCredentials)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"run": {}}, "exactly one of script"),
        ({"run": {"script": "a", "module": "b"}}, "exactly one of script"),
        ({"elastic": {"minReplicas": 3, "maxReplicas": 2}}, "less than minReplicas"),
        ({"runPolicy": {"suspendMode": "Pause"}, "elastic": None}, "can be paused"),
        ({"replicas": 0}, "spec.replicas"),
        ({"image": "two words"}, "spec.image"),
        ({"resources": {"limits": {"cpu": "many"}}}, "resources.limits.cpu: 'many'"),
        ({"resources": {"limits": ["cpu"]}}, "resources.limits is not an object"),
        ({"resources": {"limits": {"cpu": "-1"}}}, "resources.limits.cpu: '-1'"),
        ({"resources": {"limits": {"cpu": -1}}}, "resources.limits.cpu: -1 is less than 0"),
        ({"run": {"script": "a", "algorithm": "nonsense"}}, "spec.run: --algorithm nonsense"),
        ({"run": {"script": "a", "workdir": "here"}}, "spec.run.workdir"),
        ({"run": {"script": "a", "checkpointDir": "~/kept"}}, "spec.run.checkpointDir"),
        ({"coordinator": {"resources": {"requests": {"memory": "1 Gi"}}}}, "resources.requests.memory: '1 Gi'"),
        ({"runPolicy": {"schedulingPolicy": {"priorityClass": "Very High"}}}, "priorityClass"),
        ({"coordinator": {"storageClass": "a b"}}, "storageClass"),
        ({"template": []}, "template is not an object"),
        ({"template": {"spec": None}}, "template.spec is not an object"),
        ({"template": {"metadata": {"labels": {"a": 1}}}}, "template.metadata.labels.a is not a text"),
        ({"template": {"spec": {"containers": {"name": "daemon"}}}}, "template.spec.containers is not a list"),
        ({"template": {"spec": {"containers": ["daemon"]}}}, r"template.spec.containers\[0\] is not an object"),
        ({"template": {"spec": {"containers": [{"image": "b"}]}}}, r"template.spec.containers\[0\] has no name"),
        ({"template": {"spec": {"containers": [{"name": "daemon", "env": {"A": "b"}}]}}}, r"\[0\].env is not a list"),
        ({"template": {"spec": {"volumes": [{"name": "My_Data", "emptyDir": {}}]}}}, r"volumes\[0\].name: 'My_Data'"),
        ({"template": {"spec": {"securityContext": "none"}}}, "securityContext is not an object"),
        ({"template": {"spec": {"nodeSelector": ["gpu"]}}}, "nodeSelector is not an object"),
        ({"nprocPerNode": "all"}, "spec.nprocPerNode"),
        ({"nprocPerNode": "auto", "resources": {"limits": {"cpu": "1Ki"}}}, "spec.nprocPerNode: auto"),
        ({"nprocPerNode": "auto", "resources": {"limits": {"cpu": "2000"}}}, "auto gives 2000 ranks"),
    ],
)
def test_bad_specifications_are_refused_in_words(spec: dict[str, Any], words: str) -> None:
    whole = {"image": "b", "run": {"script": "t.py"}, **spec}
    with pytest.raises(ConfigError, match=words):
        parse(whole)
    plan = decide(Seen({"metadata": {"name": "j", "namespace": "n", "uid": "u"}, "spec": whole}))
    assert plan.status["phase"] == "Failed" and not plan.actions


@pytest.mark.parametrize(
    ("resources", "ranks"),
    [
        ({}, 1),
        ({"requests": {"cpu": "2500m"}}, 2),
        ({"requests": {"cpu": "100m"}}, 1),
        ({"requests": {"cpu": 4}, "limits": {"cpu": "8", "memory": "1Gi"}}, 8),
        ({"requests": {"cpu": "4"}, "limits": {"nvidia.com/gpu": 2}}, 2),
        ({"limits": {"nvidia.com/mig-1g.10gb": "3"}}, 3),
    ],
)
def test_ranks_by_what_a_pod_asks_for(resources: dict[str, Any], ranks: int) -> None:
    whole = {"image": "b", "nprocPerNode": "auto", "run": {"script": "t.py"}, "replicas": 2}
    spec = parse({**whole, "resources": resources})
    command = pods.pod(seen(), spec, 0, 0, False)["spec"]["containers"][0]["command"]
    assert command[command.index("--slots") + 1] == str(ranks)
    assert specification(spec, "j-0").nproc_per_node == ranks
    by_template = {"spec": {"containers": [{"name": "daemon", "resources": resources}]}}
    assert parse({**whole, "template": by_template, "resources": {"limits": {"cpu": 7}}}).ranks == ranks


def test_conditions_say_when_they_were_updated() -> None:
    first = decide(seen()).status
    [created] = [one for one in first["conditions"] if one["type"] == "Created"]
    assert created["status"] == "True" and created["lastUpdateTime"] == status.stamp(NOW)
    running = with_pods(seen(state=first), 0, 1, task=task(0, 1))
    second = decide(running, NOW + 5).status
    third = decide(
        replace(running, body={**running.body, "status": second}, task=task(0, 1, growth="no room")), NOW + 9
    )
    [condition] = [one for one in third.status["conditions"] if one["type"] == "Running"]
    assert condition["lastTransitionTime"] == status.stamp(NOW + 5)
    assert condition["lastUpdateTime"] == status.stamp(NOW + 9) and condition["message"] == "no room"


@pytest.mark.parametrize("name", ["a.b", "1st", "Upper", "end-", "a" * 41])
def test_names_that_objects_of_a_job_can_not_have_are_refused(name: str) -> None:
    bad = seen()
    plan = decide(replace(bad, body={**bad.body, "metadata": {**bad.body["metadata"], "name": name}}))
    assert plan.status["phase"] == "Failed" and plan.status["message"].startswith("metadata.name")
    assert not plan.actions


def test_what_kubernetes_takes_is_not_refused() -> None:
    amounts = {"cpu": 0.5, "memory": "1.5Gi", "nvidia.com/gpu": 8, "ephemeral-storage": "1e9", "hugepages-2Mi": "100m"}
    container = {"name": "daemon", "resources": {"limits": amounts}, "env": [{"name": "A", "valueFrom": {}}]}
    template = {"spec": {"containers": [container], "volumes": [{"name": "d", "nfs": {"server": "s"}}], "more": [1]}}
    spec = {"image": "r:5000/b@sha256:1", "run": {"script": "t.py"}, "resources": {"limits": amounts}}
    assert parse({**spec, "template": template}).template == template


def test_a_change_that_can_not_be_used_stops_no_job() -> None:
    """It runs as it was, and is looked after."""
    runs = with_pods(seen(elastic=None, state={"phase": "Running"}), 0, 1, task=task(0, 1))
    lost = replace(runs, pods=runs.pods[:1], nodes={**runs.nodes, "j-1": NodeState(False)})
    bad = {**runs.body["spec"], "run": {}}
    plan = decide(replace(lost, body={**runs.body, "spec": bad}, valid_spec=runs.body["spec"], invalid="no program"))
    assert [one.node_id for one in kinds(plan, facts.Gone)] == ["j-1"]
    condition = next(one for one in plan.status["conditions"] if one["type"] == "Invalid")
    assert (condition["status"], condition["message"]) == ("True", "no program")


def test_nothing_is_made_for_a_job_that_was_refused() -> None:
    new = decide(seen(9, hashes={}))
    assert new.status["phase"] == "Failed"
    after = seen(9, hashes={}, state=new.status)
    assert not decide(after).actions


def test_pods_are_locked_down() -> None:
    spec: Spec = parse({"image": "b", "run": {"script": "t.py"}, "sharedMemory": "2Gi"})
    made = pods.pod(seen(), spec, 0, 0, False)["spec"]
    assert made["securityContext"]["runAsNonRoot"] and not made["automountServiceAccountToken"]
    [container] = made["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    shm = next(volume for volume in made["volumes"] if volume["name"] == "bagua-shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    authority = [volume for volume in made["volumes"] if "authority" in str(volume)]
    assert not authority


def test_a_template_adds_to_the_pod() -> None:
    mount = {"name": "data", "mountPath": "/data"}
    template = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "nodeSelector": {"gpu": "h100"},
            "containers": [
                {"name": "daemon", "volumeMounts": [mount], "env": [{"name": "A", "value": "1"}]},
                {"name": "side"},
            ],
            "volumes": [{"name": "data", "emptyDir": {}}],
        },
    }
    made = pods.pod(seen(), parse({"image": "b", "run": {"script": "t.py"}, "template": template}), 0, 0, False)
    daemon, side = made["spec"]["containers"]
    assert side == {"name": "side"} and made["spec"]["nodeSelector"] == {"gpu": "h100"}
    assert mount in daemon["volumeMounts"] and {"name": "A", "value": "1"} in daemon["env"]
    assert made["metadata"]["labels"]["team"] == "a" and daemon["command"][:2] == ["bagua", "daemon"]
