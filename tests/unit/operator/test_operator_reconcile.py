"""Decisions about BaguaJobs: facts in, actions and status out; the clock is an argument."""

from dataclasses import replace

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
from bagua.operator.job import parse
from bagua.operator.reconcile import reconcile
from bagua.operator.service import specification
from bagua.operator.settings import Settings

NOW = 1_800_000_000.0
SETTINGS = Settings()
ELASTIC = {"minReplicas": 1, "maxReplicas": 4}
HERE = Secrets(True, True, "", NOW - 1000, NOW + 800 * 86_400, "mark")


def seen(replicas=2, state=None, **changes):
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


def with_pods(one, *indices, connected=True, **changes):
    mark = pods.wanted_hash(one, parse(one.body["spec"]))
    found = tuple(Pod(f"j-{index}", index, "Running", True, hash=mark) for index in indices)
    nodes = {pod.name: NodeState(connected) for pod in found}
    return replace(one, **{"pods": found, "nodes": nodes, **changes})


def task(*indices, state="running", wanted=2, **changes):
    names = frozenset(f"j-{index}" for index in indices)
    return Task("id", state, nodes=names, members=names, wanted=wanted, **changes)


def decide(one, now=NOW):
    return reconcile(one, SETTINGS, now)


def kinds(plan, *wanted):
    return [action for action in plan.actions if isinstance(action, wanted)]


def names(actions):
    return [one.manifest["metadata"]["name"] if isinstance(one, Create) else one.name for one in actions]


def test_an_issuer_is_asked_for_the_certificate():
    plan = reconcile(seen(secrets=Secrets()), Settings(issuer="ClusterIssuer/b"), NOW)
    asked, applied = plan.actions
    assert asked == facts.MakeCredentials(True, False) and isinstance(applied, facts.Apply)
    assert applied.manifest["spec"]["issuerRef"]["name"] == "b"


def test_a_new_job_gets_its_objects_and_pods():
    plan = decide(seen(hashes={}))
    applied = [one.manifest["kind"] for one in kinds(plan, facts.Apply)]
    assert sorted(applied) == [
        *("NetworkPolicy", "NetworkPolicy", "PersistentVolumeClaim", "PodDisruptionBudget", "Service", "StatefulSet")
    ]
    assert names(kinds(plan, Create)) == ["j-0", "j-1"]
    assert not kinds(plan, Submit)


def test_a_job_whose_objects_are_right_writes_nothing():
    running = with_pods(seen(), 0, 1, task=task(0, 1))
    first = decide(running)
    again = decide(replace(running, body={**running.body, "status": first.status}), NOW + 100)
    assert again.actions == () and again.status == first.status


def test_an_elastic_job_begins_on_its_minimum_after_a_while():
    since = {"gangSince": status.stamp(NOW - 10)}
    assert not kinds(decide(with_pods(seen(state=since), 0)), Submit)
    since = {"gangSince": status.stamp(NOW - 40)}
    one = with_pods(seen(state=since), 0)
    assert kinds(decide(one), Submit)
    pulls = Pod("j-1", 1, scheduled=True, hash=one.pods[0].hash)
    assert not kinds(decide(replace(one, pods=(*one.pods, pulls))), Submit)
    assert kinds(decide(replace(one, pods=(*one.pods, pulls)), NOW + 300), Submit)


def test_a_static_job_is_placed_whole_or_not_at_all():
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


def test_kueue_and_volcano_place_gangs_themselves():
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


def test_shrinking_deletes_pods_only_when_the_job_has_left_them():
    plan = decide(with_pods(seen(2), 0, 1, 2, task=task(0, 1, 2, wanted=3)))
    assert kinds(plan, Scale) == [Scale("id", 2)] and not kinds(plan, Delete)
    assert not kinds(decide(with_pods(seen(2), 0, 1, 2, task=task(0, 1, 2))), Delete)
    assert names(kinds(decide(with_pods(seen(2), 0, 1, 2, task=task(0, 2))), Delete)) == ["j-1"]


def test_numbers_stay_within_the_limits():
    begun = {"phase": "Running"}
    plan = decide(with_pods(seen(9, state=begun), 0, 1, task=task(0, 1)))
    assert kinds(plan, Scale) == [Scale("id", 4)]
    [told] = [one for one in plan.status["conditions"] if one["reason"] == "ScaleClamped"]
    assert told["message"].endswith("The job has 4.")


def test_a_notice_drains_once_another_pod_is_there():
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


def test_an_upgrade_replaces_one_pod_after_the_other():
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
def test_pods_that_never_came_to_run_are_replaced_by_those_of_a_mended_specification(state):
    """The members stay as they are meanwhile."""
    members = (0,) if state == "waiting" else (0, 1)
    one = with_pods(seen(), *members, task=task(*members, state=state))
    wrong = Pod("j-2", 2, "Pending", True, hash="wrong image")
    old = replace(one, pods=(*(replace(pod, hash="first") for pod in one.pods), wrong))
    plan = decide(old)
    assert names(kinds(plan, Delete)) == ["j-2"] and not kinds(plan, Drain)
    assert len(kinds(plan, Create)) == 2 - len(members)


def test_paused_jobs_keep_their_pods():
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
def test_restart_policies(policy, code, failures, phase, reason):
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
def test_the_coordinator_is_told_whose_pod_is_gone(elastic, state, lost):
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


def test_a_number_of_pods_beyond_the_limits_is_refused():
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


def test_a_deadline_ends_the_job():
    late = {"startTime": status.stamp(NOW - 100)}
    plan = decide(with_pods(seen(policy={"activeDeadlineSeconds": 60}, state=late), 0, 1, task=task(0, 1)))
    assert "60 s" in kinds(plan, Cancel)[0].reason
    over = with_pods(seen(policy={"activeDeadlineSeconds": 60}, state=late), 0, 1, task=task(state="cancelled"))
    assert decide(over).status["phase"] == "Failed"


def test_ended_jobs_are_cleaned_up_and_deleted_in_time():
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
def test_daemons_of_ended_jobs_end_and_their_pods_stay(policy):
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


def test_credentials_are_made_anew_in_time_and_on_request():
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
        ({"elastic": {"minReplicas": 3, "maxReplicas": 2}}, "less than minReplicas"),
        ({"runPolicy": {"suspendMode": "Pause"}, "elastic": None}, "can be paused"),
        ({"replicas": 0}, "spec.replicas"),
        ({"resources": {"limits": {"cpu": "many"}}}, "resources.limits.cpu: 'many'"),
        ({"run": {"script": "a", "algorithm": "nonsense"}}, "spec.run: --algorithm nonsense"),
        ({"run": {"script": "a", "workdir": "here"}}, "spec.run.workdir"),
        ({"run": {"script": "a", "checkpointDir": "~/kept"}}, "spec.run.checkpointDir"),
        ({"template": {"spec": {"volumes": [{"name": "My_Data", "emptyDir": {}}]}}}, r"volumes\[0\].name: 'My_Data'"),
        ({"nprocPerNode": "all"}, "spec.nprocPerNode"),
        ({"nprocPerNode": 4, "run": {"script": "a", "islandSize": 3}}, "4 ranks can't be divided into islands of 3"),
        ({"nprocPerNode": 2, "run": {"script": "a", "islandSize": 2}, "elastic": {"respawn": 1}}, "respawn is 1"),
        ({"nprocPerNode": "auto", "resources": {"limits": {"cpu": "2000"}}}, "auto gives 2000 ranks"),
    ],
)
def test_bad_specifications_are_refused_in_words(spec, words):
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
def test_ranks_by_what_a_pod_asks_for(resources, ranks):
    whole = {"image": "b", "nprocPerNode": "auto", "run": {"script": "t.py"}, "replicas": 2}
    spec = parse({**whole, "resources": resources})
    command = pods.pod(seen(), spec, 0, 0, False)["spec"]["containers"][0]["command"]
    assert command[command.index("--slots") + 1] == str(ranks)
    assert specification(spec, "j-0").nproc_per_node == ranks
    by_template = {"spec": {"containers": [{"name": "daemon", "resources": resources}]}}
    assert parse({**whole, "template": by_template, "resources": {"limits": {"cpu": 7}}}).ranks == ranks


@pytest.mark.parametrize("name", ["a.b", "1st", "Upper", "end-", "a" * 41])
def test_names_that_objects_of_a_job_can_not_have_are_refused(name):
    bad = seen()
    plan = decide(replace(bad, body={**bad.body, "metadata": {**bad.body["metadata"], "name": name}}))
    assert plan.status["phase"] == "Failed" and plan.status["message"].startswith("metadata.name")
    assert not plan.actions


def test_a_change_that_can_not_be_used_stops_no_job():
    runs = with_pods(seen(elastic=None, state={"phase": "Running"}), 0, 1, task=task(0, 1))
    lost = replace(runs, pods=runs.pods[:1], nodes={**runs.nodes, "j-1": NodeState(False)})
    bad = {**runs.body["spec"], "run": {}}
    plan = decide(replace(lost, body={**runs.body, "spec": bad}, valid_spec=runs.body["spec"], invalid="no program"))
    assert [one.node_id for one in kinds(plan, facts.Gone)] == ["j-1"]
    condition = next(one for one in plan.status["conditions"] if one["type"] == "Invalid")
    assert (condition["status"], condition["message"]) == ("True", "no program")


def test_nothing_is_made_for_a_job_that_was_refused():
    new = decide(seen(9, hashes={}))
    assert new.status["phase"] == "Failed"
    after = seen(9, hashes={}, state=new.status)
    assert not decide(after).actions


def test_pods_are_locked_down():
    spec = parse({"image": "b", "run": {"script": "t.py"}, "sharedMemory": "2Gi"})
    made = pods.pod(seen(), spec, 0, 0, False)["spec"]
    assert made["securityContext"]["runAsNonRoot"] and not made["automountServiceAccountToken"]
    [container] = made["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    shm = next(volume for volume in made["volumes"] if volume["name"] == "bagua-shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    authority = [volume for volume in made["volumes"] if "authority" in str(volume)]
    assert not authority
