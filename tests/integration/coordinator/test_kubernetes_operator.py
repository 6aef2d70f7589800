"""The operator of Kubernetes over kmock and a real coordinator; the test plays kubelets, and daemons run nothing."""

import base64

import pytest

from bagua.proto.common_pb2 import JOB_STATE_CANCELLED

from .conftest import PATIENT

for part in ("kmock", "kopf", "lightkube"):
    pytest.importorskip(part, reason=f"the operator's tests need {part}")

from rig.clusters.kubernetes_mock import JOBS, PODS, Operator  # noqa: E402

ELASTIC = {"image": "b:1", "replicas": 2, "elastic": {"maxReplicas": 4}, "run": {"script": "t.py"}}
SECRETS = "/api/v1/namespaces/n/secrets"


@pytest.fixture
def operator(request, tmp_path, monkeypatch, start):
    """Ends before the coordinators that were begun by ``start``. A parameter is the pause between looks."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with Operator(tmp_path, *([request.param] if hasattr(request, "param") else [])).running() as made:
        yield made


def files(operator, secret):
    """The content of a Secret that the operator has made."""
    data = operator.http.get(f"{SECRETS}/{secret}").raise_for_status().json()["data"]
    return {name: base64.b64decode(value) for name, value in data.items()}


def begin(operator, coordinator, *pods):
    """A scheduler places these pods, and their daemons come."""
    operator.wait(lambda: operator.names(PODS) == list(pods))
    for pod in pods:
        machine = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"machine-of-{pod}"}, "spec": {}}
        operator.http.post("/api/v1/nodes", json=machine).raise_for_status()
        operator.change(f"{PODS}/{pod}", spec={"nodeName": f"machine-of-{pod}"}, status={"phase": "Running"})
    operator.connect(coordinator.address, coordinator.token, coordinator.tls, *pods)


@pytest.fixture
def coordinator_of(operator, start, tmp_path):
    """Starts the coordinator of a job with the credentials that the operator made for it."""

    def start_it(job):
        operator.wait(lambda: {f"{job}-tls", f"{job}-token"} <= set(operator.names(SECRETS)))
        folder = tmp_path / "tls"
        folder.mkdir()
        made = files(operator, f"{job}-tls")
        for name, key in (("ca.pem", "ca.crt"), ("cert.pem", "tls.crt"), ("key.pem", "tls.key")):
            (folder / name).write_bytes(made[key])
        (folder / "token").write_bytes(files(operator, f"{job}-token")["token"])
        for path in folder.iterdir():
            path.chmod(0o400)
        process = start("--tls", str(folder), "--token-file", str(folder / "token"), **PATIENT)
        assert not process.error, process.error
        operator.coordinator = process.address
        return process

    return start_it


@pytest.mark.parametrize("operator", [600.0], indirect=True)
def test_the_coordinator_tells_of_changes(operator, coordinator_of):
    operator.submit("j", **ELASTIC)
    coordinator = coordinator_of("j")
    begin(operator, coordinator, "j-0", "j-1")
    job_id = operator.wait(lambda: (found := operator.status("j")).get("phase") == "Running" and found)["jobId"]
    services = operator.api.asked["GET", "/api/v1/namespaces/n/services"]
    operator.api.refuse("PUT", f"{JOBS}/j/status", 409, "the object has been modified")  # then a look writes the end
    with coordinator.client() as client:
        client.cancel(job_id, "enough")
    status = operator.wait(lambda: (found := operator.status("j")).get("phase") == "Failed" and found)
    assert status["message"] == "cancelled: enough"
    assert not operator.api.refusals
    assert operator.api.asked["GET", "/api/v1/namespaces/n/services"] == services, "they are not read at each look"


def asked(operator, *paths):
    """How often these were asked for, some looks later."""
    numbers = operator.controller.numbers
    wanted = numbers.looks + 5
    operator.wait(lambda: numbers.looks >= wanted)
    return [operator.api.asked["GET", path] for path in paths]


def test_a_job_that_waits_asks_the_api_server_nothing(operator):
    """Fifty of them would ask 60 times a second. What somebody deletes is made again at once."""
    paths = f"{JOBS}/j", f"{SECRETS}/j-token", f"{SECRETS}/j-tls"
    operator.submit("j", **ELASTIC)
    operator.wait(lambda: operator.names(PODS) == ["j-0", "j-1"])
    operator.wait(lambda: asked(operator, *paths) == asked(operator, *paths))
    services = "/api/v1/namespaces/n/services"
    operator.http.delete(f"{services}/j-coordinator").raise_for_status()
    operator.wait(lambda: operator.names(services) == ["j-coordinator"])
    operator.wait(lambda: asked(operator, *paths) == asked(operator, *paths))
    before = asked(operator, *paths)
    operator.controller.listed()  # as after a watch that broke: things may have gone unseen
    operator.wait(lambda: asked(operator, *paths)[0] > before[0])


def test_a_job_from_its_creation_to_its_deletion(operator, coordinator_of):
    operator.submit("j", **ELASTIC)
    coordinator = coordinator_of("j")
    begin(operator, coordinator, "j-0", "j-1")
    status = operator.wait(lambda: (found := operator.status("j")).get("phase") == "Running" and found)
    assert status["pods"] == "2/2" and status["attempt"] == 0

    operator.change(f"{JOBS}/j/scale", spec={"replicas": 3})
    operator.wait(lambda: operator.names(PODS) == ["j-0", "j-1", "j-2"])
    with coordinator.client() as client:
        job = operator.wait(lambda: (found := client.get(status["jobId"])).wanted_nodes == 3 and found)
    assert job.spec.entry == "t.py" and job.spec.elastic and job.spec.name == "j-0"

    operator.change(f"{JOBS}/j", spec={"runPolicy": {"suspend": True}})
    operator.wait(lambda: operator.status("j")["phase"] == "Suspended")
    assert operator.names(PODS) == [] and operator.status("j")["attempt"] == 1

    owners = [
        one["metadata"]["ownerReferences"][0]["uid"]
        for path in (SECRETS, "/apis/apps/v1/statefulsets", "/api/v1/persistentvolumeclaims", "/api/v1/services")
        for one in operator.http.get(path).json()["items"]
    ]
    assert set(owners) == {"uid-of-j"}, "all of it goes with the BaguaJob"
    operator.http.delete(f"{JOBS}/j").raise_for_status()
    volume = "/apis/apps/v1/namespaces/n/statefulsets/j-coordinator"
    operator.change(volume, metadata={"labels": {"touched": "yes"}})  # an event about a job that is gone
    operator.submit("next", **ELASTIC)
    operator.wait(lambda: operator.names(PODS) == ["next-0", "next-1"])
    assert operator.names(JOBS) == ["next"]


def test_a_deleted_job_is_cancelled(operator, coordinator_of):
    """Before its coordinator goes, too: its daemons have nothing to drain then."""
    operator.submit("j", **ELASTIC)
    coordinator = coordinator_of("j")
    begin(operator, coordinator, "j-0", "j-1")
    job_id = operator.wait(lambda: (found := operator.status("j")).get("phase") == "Running" and found)["jobId"]
    operator.http.delete(f"{JOBS}/j").raise_for_status()
    with coordinator.client() as client:
        job = operator.wait(lambda: (found := client.get(job_id)).state == JOB_STATE_CANCELLED and found)
    assert job.reason == "cancelled: its BaguaJob was deleted"


def test_what_the_api_refuses_is_told_and_tried_again(operator, caplog):
    operator.api.refuse("POST", PODS, 403, "exceeded quota: pods")
    operator.api.refuse("PUT", f"{JOBS}/j/status", 409, "the object has been modified")
    operator.api.refuse("POST", SECRETS, 500, "etcd has no leader")
    operator.submit("j", **ELASTIC)
    operator.wait(lambda: operator.names(PODS) == ["j-0", "j-1"])
    assert not operator.api.refusals
    told = [record.getMessage() for record in caplog.records if record.name == "bagua.operator"]
    for words in ("n/j: refused: exceeded quota: pods", "etcd has no leader"):
        assert any(words in line for line in told), told
    assert not any("has been modified" in line for line in told), "another look decides anew, which is no trouble"


def blocked(operator):
    """The condition that something stands in the way of the job."""
    found = operator.status("j").get("conditions", [])
    return next((one for one in found if one["type"] == "Blocked" and one["status"] == "True"), None)


def pods_of(operator):
    found = operator.http.get(PODS).raise_for_status().json()["items"]
    return [{"status": {}, **one} for one in found]


def test_objects_of_others_stay_as_they_are(operator):
    labels = {"bagua.dev/job": "j", "bagua.dev/role": "daemon"}  # as of a program that copies manifests
    there = {}
    for path, kind, name in (
        (SECRETS, "Secret", "j-tls"),
        ("/api/v1/namespaces/n/services", "Service", "j-coordinator"),
        ("/apis/apps/v1/namespaces/n/statefulsets", "StatefulSet", "j-coordinator"),
        (PODS, "Pod", "j-0"),
    ):
        theirs = {"metadata": {"name": name, "namespace": "n", "uid": "theirs", "labels": labels}, "spec": {"a": "b"}}
        theirs |= {"data": {"tls.crt": "eA==", "tls.key": "eA==", "token": "eA=="}} if kind == "Secret" else {}
        operator.http.post(path, json=theirs).raise_for_status()
        there[f"{kind} {name} already"] = f"{path}/{name}", operator.http.get(f"{path}/{name}").json()
    operator.submit("j", **ELASTIC)

    while there:  # it tells of one after the other
        condition = operator.wait(
            lambda: (found := blocked(operator)) and any(words in found["message"] for words in there) and found
        )
        assert condition["reason"] == "NotOwned" and operator.status("j")["phase"] == "Pending"
        path, before = there.pop(next(words for words in there if words in condition["message"]))
        assert operator.http.get(path).json() == before
        operator.http.delete(path).raise_for_status()
    operator.wait(lambda: operator.names(PODS) == ["j-0", "j-1"] and not blocked(operator))


def test_pods_that_end_at_once_are_made_again_with_pauses(operator):
    """As of an image without bagua: without pauses there were 88 pods and 260 events a minute, and nothing said why."""
    operator.submit("j", **ELASTIC)
    last = {"exitCode": 128, "reason": "StartError", "message": "failed to start\nexec: bagua: not found\n"}
    ended = {"phase": "Failed", "containerStatuses": [{"name": "daemon", "state": {"terminated": last}}]}
    told = []
    for _ in range(3):
        one = operator.wait(lambda: [pod for pod in pods_of(operator) if pod["status"].get("phase") != "Failed"])[0]
        operator.change(f"{PODS}/{one['metadata']['name']}", status=ended)
        told.append(operator.wait(lambda: blocked(operator))["message"])
        assert one["metadata"]["name"] in operator.names(PODS), "its output can be read"
        operator.wait(lambda: not blocked(operator))
    assert all("has ended: StartError (exit code 128): exec: bagua: not found" in one for one in told)
    assert operator.status("j")["phase"] == "Pending"
    memory = operator.controller._memories["n", "j"]
    assert memory._pause_s >= 2, "they double, though a pod was made in between"


def test_events_about_a_pod_that_does_not_start_are_asked_for_ever_more_rarely(operator):
    """They were asked for at each look, with all pods. Those about an earlier pod of its name tell nothing."""
    operator.submit("j", **ELASTIC)
    operator.wait(lambda: operator.names(PODS) == ["j-0", "j-1"])
    begun = {"phase": "Pending", "startTime": "2026-11-29T00:00:00Z"}
    operator.change(f"{PODS}/j-0", spec={"nodeName": "m"}, status=begun)
    event = {"metadata": {"name": "old", "namespace": "n"}, "reason": "FailedMount", "message": "no Secret"}
    event |= {"involvedObject": {"kind": "Pod", "name": "j-0"}, "lastTimestamp": "2026-11-28T00:00:00Z"}
    operator.http.post("/api/v1/namespaces/n/events", json=event).raise_for_status()
    operator.wait(lambda: asked(operator, PODS) == asked(operator, PODS))
    assert operator.api.asked["GET", "/api/v1/namespaces/n/events"] and not blocked(operator)
