"""BaguaJobs on a real API server; a small kubelet runs pods as processes."""

import base64
import os
import shlex
import shutil
import signal
from pathlib import Path

import pytest
from rig.clusters import kubelet, kubernetes
from rig.clusters.kubernetes_neighbours import NEIGHBOURS
from rig.clusters.operators import JOBS, MANIFESTS, Operated

from bagua.enroll.certificates import Authority, key_pem, new_key

IMAGE = "bagua:test"


@pytest.fixture(scope="module")
def cluster(core):
    reason = kubernetes.missing() or kubelet.missing()
    if reason:
        pytest.skip(reason)
    made = Operated()
    try:
        made.start()
        made.start_operator()
        yield made
    finally:
        made.close()


def test_a_job_runs_a_program_and_its_pods_keep_what_it_says(cluster):
    """Its variables come from everywhere that a pod can name."""
    for kind, data in (("configmaps", {"FROM_MAP": "c"}), ("secrets", {"token": base64.b64encode(b"d").decode()})):
        body = {"metadata": {"name": "words"}, "data": data}
        cluster.api.post(f"/api/v1/namespaces/default/{kind}", json=body).raise_for_status()
    secret = {"secretKeyRef": {"name": "words", "key": "token"}}
    env = [{"name": "PLAIN", "value": "a"}, {"name": "FROM_SECRET", "valueFrom": secret}]
    run = {"program": "/bin/sh", "args": ["-c", "echo $PLAIN $OF_POD $FROM_MAP $FROM_SECRET >&2"], "env": env}
    daemon = {
        "name": "daemon",
        "env": [{"name": "OF_POD", "value": "b"}],
        "envFrom": [{"configMapRef": {"name": "words"}}],
    }
    template = {"spec": {"containers": [daemon]}}
    cpu = {"requests": {"cpu": "2"}}
    job = {"image": IMAGE, "replicas": 2, "run": run, "template": template, "runPolicy": {"restartPolicy": "Never"}}
    cluster.submit("hello", **job, nprocPerNode="auto", resources=cpu)
    status = cluster.wait_for_phase("hello", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded", cluster.explain()
    assert status["pods"] == "2/2" and status["replicaStatuses"]["Worker"]["succeeded"] == 2
    cluster.wait(lambda: [pod["status"]["phase"] for pod in cluster.pods("hello").values()] == ["Succeeded"] * 2)
    for number in (0, 1):
        assert f"[rank {2 * number + 1}] a b c d\n" in cluster.kubelet.log(f"hello-{number}")
    stateful = "/apis/apps/v1/namespaces/default/statefulsets/hello-coordinator"
    cluster.wait(lambda: cluster.api.get(stateful).json()["spec"]["replicas"] == 0)
    assert cluster.status("hello")["pods"] == "2/2" and cluster.kubelet.errors == []
    messages = {one["reason"]: one["message"] for one in cluster.events("hello")}
    assert messages["PodCreated"] == "hello-0, hello-1" and "PodLost" not in messages and "PodDeleted" not in messages


def blocked(cluster, name):
    """What stands in the way of a job, as its condition says."""
    found = cluster.status(name).get("conditions", [])
    return next((one["message"] for one in found if one["type"] == "Blocked" and one["status"] == "True"), "")


def test_the_definition_refuses_what_a_schema_can(cluster):
    run, spec = {"program": "/bin/true"}, {"image": IMAGE}
    volume = {"spec": {"volumes": [{"name": "My_Data", "emptyDir": {}}]}}
    refused = [
        ("a.b", {}, "metadata.name"),
        ("1st", {}, "metadata.name"),
        ("a" * 41, {}, "metadata.name"),
        ("typed", {"template": {"spec": {"containers": "daemon"}}}, "spec.template.spec.containers"),
        ("empty", {"template": {"spec": {"containers": [{}]}}}, "spec.template.spec.containers"),
        ("volume", {"template": volume}, "volumes.name"),
        ("amount", {"resources": {"limits": {"cpu": "many"}}}, "spec.resources.limits.cpu"),
        ("leads", {"coordinator": {"resources": {"limits": {"cpu": "many"}}}}, "spec.coordinator.resources.limits.cpu"),
    ]
    for name, more, words in refused:
        body = {"apiVersion": "bagua.dev/v1", "kind": "BaguaJob", "metadata": {"name": name}}
        answer = cluster.api.post(JOBS, json={**body, "spec": {**spec, "run": run, **more}})
        assert answer.status_code == 422 and words in answer.json()["message"], (name, answer.text)
    fits = {"resources": {"limits": {"cpu": 0.5, "memory": "1Gi"}}, "template": {"spec": {"hostname": "any"}}}
    cluster.submit("a" * 40, **spec, run=run, **fits)
    cluster.wait(lambda: cluster.pods("a" * 40))
    kept = cluster.api.get(f"{JOBS}/{'a' * 40}").json()["spec"]
    assert kept["template"] == fits["template"] and kept["resources"] == fits["resources"]
    cluster.wait_for_phase("a" * 40, "Succeeded")
    cluster.delete("a" * 40)


def test_a_refusal_is_told_in_the_words_of_who_refuses(cluster):
    """And the job goes on when nothing stands in its way any more. ``integration/coordinator`` has other refusals."""
    space = "/api/v1/namespaces/default"
    most = {"type": "Container", "max": {"cpu": "1"}, "default": {"cpu": "1"}, "defaultRequest": {"cpu": "10m"}}
    limit = {"metadata": {"name": "small"}, "spec": {"limits": [most]}}
    cluster.api.post(f"{space}/limitranges", json=limit).raise_for_status()
    large, words = {"limits": {"cpu": "2"}}, "maximum cpu usage per Container is 1"
    refused = {"limited": {"resources": large}, "leads": {"coordinator": {"resources": large, "ephemeral": True}}}
    try:
        for name, spec in refused.items():
            cluster.submit(name, image=IMAGE, run={"program": "/bin/true"}, **spec)
            cluster.wait(lambda name=name: words in blocked(cluster, name))
            status = cluster.status(name)
            assert status["phase"] == "Pending" and words in status["message"]
        cluster.change("limited", resources={"limits": {"cpu": "1"}})
        cluster.wait(lambda: cluster.pods("limited"))
    finally:
        cluster.api.delete(f"{space}/limitranges/small").raise_for_status()
    for name in refused:
        status = cluster.wait_for_phase(name, "Succeeded", "Failed")
        assert status["phase"] == "Succeeded" and not blocked(cluster, name), cluster.explain()
        cluster.delete(name)


@pytest.mark.full
def test_islands_fill_a_pod(cluster):
    """A job whose pods would hold parts of islands is refused before it has any."""
    run = {"program": "/bin/sh", "args": ["-c", "echo of $BAGUA_ISLAND_SIZE >&2"], "islandSize": 2}
    cluster.submit("torn", image=IMAGE, run=run, nprocPerNode=3)
    status = cluster.wait_for_phase("torn", "Failed")
    assert "3 ranks can't be divided into islands of 2" in status["message"] and not cluster.pods("torn")
    cluster.submit("whole", image=IMAGE, run=run, nprocPerNode=4)
    cluster.wait_for_phase("whole", "Succeeded")
    assert all(f"[rank {rank}] of 2\n" in cluster.kubelet.log("whole-0") for rank in range(4))
    for name in ("torn", "whole"):
        cluster.delete(name)


def digits(replicas, epochs, **policy):
    """An elastic job that learns digits, with one rank in each pod."""
    return {
        "image": IMAGE,
        "replicas": replicas,
        "elastic": {"minReplicas": 1, "maxReplicas": 4},
        "run": {"module": "bagua.examples.elastic", "args": ["--epochs", str(epochs)]},
        "runPolicy": {"backoffLimit": 1, "drainGraceSeconds": 20, "stopGraceSeconds": 5, **policy},
    }


def trains(cluster, name, *pods, count=0, beyond=0):
    """Waits until exactly these pods train, or so many, and until a step has been made after ``beyond``."""

    def look():
        status = cluster.status(name)
        ready = status.get("pods", "").startswith(f"{count or len(pods)}/") and status.get("phase") == "Running"
        there = count or set(cluster.pods(name)) == set(pods)
        return ready and there and status.get("step", 0) > beyond and status

    found = cluster.wait(look)
    assert isinstance(found, dict)
    return found


@pytest.mark.full
@pytest.mark.timeout(900)
def test_digits_through_all_that_can_happen_to_a_job(cluster):
    """It loses a pod, grows, loses its operator, is paused, loses its coordinator, and succeeds: in one attempt."""
    cluster.submit("learns", **digits(2, 60, suspendMode="Pause"))
    step = trains(cluster, "learns", "learns-0", "learns-1")["step"]
    cluster.delete_pod("learns-1")
    step = trains(cluster, "learns", "learns-0", "learns-2", beyond=step)["step"]
    cluster.kill_operator()
    cluster.scale("learns", 3)
    cluster.start_operator()
    # The third is learns-1 again only if the deleted pod is gone by now.
    step = trains(cluster, "learns", count=3, beyond=step)["step"]
    cluster.change("learns", runPolicy={"suspend": True})
    cluster.wait_for_phase("learns", "Suspended")
    cluster.delete_pod("learns-coordinator-0")
    cluster.change("learns", runPolicy={"suspend": False})
    status = cluster.wait_for_phase("learns", "Running", "Succeeded")
    cluster.scale("learns", 2)
    cluster.wait(lambda: len(cluster.pods("learns")) == 2 or cluster.status("learns")["phase"] == "Succeeded")
    status = cluster.wait_for_phase("learns", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded" and status["attempt"] == 0 and status["step"] > step, cluster.explain()
    told = {one["reason"]: one["type"] for one in cluster.events("learns")}
    assert told["PodLost"] == "Warning" and {"PodCreated", "Scaled", "Succeeded"} <= set(told), told


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_deleted_namespace_leaves_nothing_and_drains_nothing(cluster):
    """Its pods are deleted before its BaguaJobs, that of the coordinator among them."""
    space = "/api/v1/namespaces/team"
    cluster.api.post("/api/v1/namespaces", json={"metadata": {"name": "team"}}).raise_for_status()
    jobs = JOBS.replace("/default/", "/team/")
    body = {"apiVersion": "bagua.dev/v1", "kind": "BaguaJob", "metadata": {"name": "leaves"}}
    for name in ("leaves", "too"):
        body["metadata"] = {"name": name}
        cluster.api.post(jobs, json={**body, "spec": digits(2, 2000, drainGraceSeconds=3600)}).raise_for_status()
    cluster.wait(lambda: all(one.get("status", {}).get("step") for one in cluster.api.get(jobs).json()["items"]))
    cluster.api.delete(space).raise_for_status()
    cluster.wait(lambda: cluster.api.get(space).status_code == 404)
    cluster.submit("after", image=IMAGE, replicas=1, run={"program": "/bin/true"})
    assert cluster.wait_for_phase("after", "Succeeded", "Failed")["phase"] == "Succeeded", cluster.explain()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_notice_an_upgrade_and_new_credentials_stop_nothing(cluster):
    cluster.submit("moved", **digits(2, 2000))  # it does not end before all has happened to it
    step = trains(cluster, "moved", "moved-0", "moved-1")["step"]
    machine = cluster.pods("moved")["moved-1"]["spec"]["nodeName"]
    cluster.kubelet.taint(machine, "aws-node-termination-handler/spot-itn")
    cluster.wait(lambda: all(pod["spec"].get("nodeName") != machine for pod in cluster.pods("moved").values()))
    cluster.kubelet.taint(machine)
    cluster.wait(lambda: cluster.status("moved").get("pods") == "2/2" and cluster.status("moved")["step"] > step)
    before = {pod["metadata"]["uid"] for pod in cluster.pods("moved").values()}
    cluster.change("moved", image="bagua:newer")
    cluster.wait(lambda: not before & {pod["metadata"]["uid"] for pod in cluster.pods("moved").values()})
    secret = "/api/v1/namespaces/default/secrets/moved-token"
    token = base64.b64decode(cluster.api.get(secret).json()["data"]["token"])
    cluster.annotate("moved", "bagua.dev/rotate", "1")
    cluster.wait(lambda: base64.b64decode(cluster.api.get(secret).json()["data"]["token"]) != token)
    status = trains(cluster, "moved", "moved-0", "moved-1", beyond=cluster.status("moved")["step"])
    assert status["attempt"] == status["failures"] == 0, cluster.explain()
    cluster.delete("moved")


@pytest.mark.parametrize("elastic", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.timeout(900)
def test_a_pod_that_dies_is_told_at_once(elastic, cluster):
    """Its daemon says nothing any more, and the fence of ten minutes is not waited for."""
    name = "grows" if elastic else "dies"
    run = {"module": "bagua.examples.elastic" if elastic else "bagua.examples.digits", "args": ["--epochs", "5000"]}
    spec = {"image": IMAGE, "replicas": 2, "run": run, "runPolicy": {"backoffSeconds": 0}}
    cluster.submit(name, **spec, **({"elastic": {"minReplicas": 1}} if elastic else {}))
    trains(cluster, name, f"{name}-0", f"{name}-1")
    before = {one["metadata"]["uid"] for one in cluster.pods(name).values()}
    os.killpg(cluster.kubelet.pid(f"{name}-1"), signal.SIGKILL)
    if elastic:
        cluster.wait(lambda: len({one["metadata"]["uid"] for one in cluster.pods(name).values()} - before) == 1)
        status = cluster.wait(lambda: cluster.status(name).get("pods") == "2/2" and cluster.status(name))
        assert status["failures"] == 0
    else:
        status = cluster.wait(lambda: (found := cluster.status(name))["failures"] == 1 and found, within=30)
        assert f"{name}-1" in status["message"] and "exit code" in status["message"], cluster.explain()
        cluster.wait_for_phase(name, "Running")
    cluster.delete(name)


def overlay_commands(overlay):
    """The commands that the head of its kustomization.yaml tells to give first."""
    lines = (MANIFESTS / "overlays" / overlay / "kustomization.yaml").read_text().splitlines()
    text = "\n".join(line[1:] for line in lines if line.startswith("#   "))
    return [shlex.split(line) for line in text.replace("\\\n", " ").splitlines()]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_overlay_with_postgresql(cluster):
    """Neither the coordinator nor the database loses the job when its pod is lost. It is deleted in its training."""
    absent = [name for name in ("kubectl", "initdb", "setpriv") if not shutil.which(name)]
    if absent and not (absent == ["initdb"] and list(Path("/usr/lib/postgresql").glob("*/bin/initdb"))):
        pytest.skip(f"no {', '.join(absent)}")
    [secret] = overlay_commands("postgresql")
    cluster.kubectl(*secret[1:])
    rendered = cluster.kubectl("kustomize", str(MANIFESTS / "overlays" / "postgresql"))
    assert "--epochs" in rendered
    longer = cluster.folder / "overlay.yaml"
    longer.write_text(rendered.replace('- "30"', '- "200"').replace("nprocPerNode: 2", "nprocPerNode: 1"))
    cluster.kubectl("apply", "--validate=false", "-f", str(longer))
    cluster.kubectl("delete", "deployment", "--all", "--namespace", "bagua-system")  # the operator is a program here
    step = trains(cluster, "digits", "digits-0", "digits-1")["step"]
    claims = [one for one in cluster.names("/api/v1/persistentvolumeclaims") if "digits" in one]
    assert claims == ["data-digits-database-0"], "the coordinator needs no volume"
    for pod in ("digits-coordinator-0", "digits-database-0"):
        cluster.delete_pod(pod)
        status = trains(cluster, "digits", "digits-0", "digits-1", beyond=step)
        step = status["step"]
    assert status["attempt"] == status["failures"] == 0, cluster.explain()
    cluster.delete("digits")


@pytest.fixture(scope="module")
def neighbours(cluster):
    """Definitions of cert-manager, without its controllers. No pod finds a machine at first."""
    cluster.kill_operator()
    cluster.kubelet.capacity = 0
    for definition in NEIGHBOURS:
        cluster.define(definition)
    cluster.start_operator(BAGUA_OPERATOR_ISSUER="ClusterIssuer/bagua")
    yield cluster
    cluster.kill_operator()
    cluster.kubelet.capacity = 100
    for definition in NEIGHBOURS:
        cluster.forget(definition)
    cluster.start_operator()


def certify(cluster, name):
    """Does what cert-manager does when it sees the job's Certificate."""
    path = f"/apis/cert-manager.io/v1/namespaces/default/certificates/{name}-tls"
    answer = cluster.wait(lambda: (found := cluster.api.get(path)).status_code == 200 and found)
    wanted = answer.json()["spec"]
    assert wanted["issuerRef"] == {"group": "cert-manager.io", "kind": "ClusterIssuer", "name": "bagua"}
    authority, key = Authority(), new_key()
    names = [*wanted["dnsNames"], *wanted["ipAddresses"]]
    files = {"ca.crt": authority.pem(), "tls.crt": authority.certify(key.public_key(), names), "tls.key": key_pem(key)}
    body = {
        "metadata": {"name": wanted["secretName"], "annotations": {"cert-manager.io/certificate-name": f"{name}-tls"}},
        "type": "kubernetes.io/tls",
        "data": {part: base64.b64encode(value).decode() for part, value in files.items()},
    }
    cluster.api.post("/api/v1/namespaces/default/secrets", json=body).raise_for_status()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_job_runs_with_certificates_of_another_maker(neighbours):
    cluster = neighbours
    if shutil.which("kubectl"):
        cluster.kubectl("create", "namespace", "cert-manager")
        cluster.kubectl("apply", "--validate=false", "-k", str(MANIFESTS / "overlays" / "cert-manager"))
        assert cluster.names("/apis/cert-manager.io/v1/clusterissuers") == ["bagua", "bagua-root"]
    cluster.kubelet.capacity = 100
    cluster.submit("certified", image=IMAGE, replicas=2, run={"program": "/bin/true"})
    certify(cluster, "certified")
    status = cluster.wait_for_phase("certified", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded", cluster.explain()
