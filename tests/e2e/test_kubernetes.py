"""BaguaJobs on a real API server; a small kubelet runs pods as processes."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from rig import kubelet, kubernetes
from rig.operators import Operated

IMAGE = "bagua:test"


@pytest.fixture(scope="module")
def cluster(core: None) -> Iterator[Operated]:
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


def test_a_job_runs_a_program_and_succeeds(cluster: Operated) -> None:
    run = {"program": "/bin/sh", "args": ["-c", "test $WORD = hello"], "env": [{"name": "WORD", "value": "hello"}]}
    cluster.submit("hello", image=IMAGE, replicas=2, run=run, runPolicy={"restartPolicy": "Never"})
    status = cluster.wait_for_phase("hello", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded", cluster.explain()
    cluster.wait(lambda: not cluster.pods("hello"))
    assert cluster.kubelet.errors == []


def digits(replicas: int, epochs: int, **policy: Any) -> dict[str, Any]:
    """An elastic job that learns digits, with one rank in each pod."""
    return {
        "image": IMAGE,
        "replicas": replicas,
        "elastic": {"minReplicas": 1, "maxReplicas": 4},
        "run": {"module": "bagua.examples.elastic", "args": ["--epochs", str(epochs)]},
        "runPolicy": {"backoffLimit": 1, "drainGraceSeconds": 20, "stopGraceSeconds": 5, **policy},
    }


def trains(cluster: Operated, name: str, *pods: str, beyond: int = 0) -> dict[str, Any]:
    """Waits until exactly these pods train, and until a step has been made after ``beyond``."""

    def look() -> Any:
        status = cluster.status(name)
        ready = status.get("pods", "").startswith(f"{len(pods)}/") and status.get("phase") == "Running"
        return ready and set(cluster.pods(name)) == set(pods) and status.get("step", 0) > beyond and status

    found = cluster.wait(look)
    assert isinstance(found, dict)
    return found


@pytest.mark.full
@pytest.mark.timeout(900)
def test_digits_through_all_that_can_happen_to_a_job(cluster: Operated) -> None:
    """It loses a pod, grows, loses its operator, is paused, loses its coordinator, and succeeds: in one attempt."""
    cluster.submit("digits", **digits(2, 60, suspendMode="Pause"))
    step = trains(cluster, "digits", "digits-0", "digits-1")["step"]
    cluster.delete_pod("digits-1")
    step = trains(cluster, "digits", "digits-0", "digits-2", beyond=step)["step"]
    cluster.kill_operator()
    cluster.scale("digits", 3)
    cluster.start_operator()
    step = trains(cluster, "digits", "digits-0", "digits-1", "digits-2", beyond=step)["step"]
    cluster.change("digits", runPolicy={"suspend": True})
    cluster.wait_for_phase("digits", "Suspended")
    cluster.delete_pod("digits-coordinator-0")
    cluster.change("digits", runPolicy={"suspend": False})
    status = cluster.wait_for_phase("digits", "Running", "Succeeded")
    cluster.scale("digits", 2)
    cluster.wait(lambda: len(cluster.pods("digits")) == 2 or cluster.status("digits")["phase"] == "Succeeded")
    status = cluster.wait_for_phase("digits", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded" and status["attempt"] == 0 and status["step"] > step, cluster.explain()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_suspended_job_gives_its_pods_back_and_begins_again(cluster: Operated) -> None:
    cluster.submit("again", **digits(2, 30))
    trains(cluster, "again", "again-0", "again-1")
    cluster.change("again", runPolicy={"suspend": True})
    cluster.wait_for_phase("again", "Suspended")
    assert not cluster.pods("again")
    cluster.change("again", runPolicy={"suspend": False})
    status = cluster.wait_for_phase("again", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded" and status["attempt"] == 1 and status["failures"] == 0, cluster.explain()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_notice_an_upgrade_and_new_credentials_stop_nothing(cluster: Operated) -> None:
    cluster.submit("moved", **digits(2, 90))
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
    step = cluster.status("moved")["step"]
    status = cluster.wait_for_phase("moved", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded" and status["attempt"] == 0 and status["step"] > step, cluster.explain()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_static_job_that_loses_a_pod_is_restarted(cluster: Operated) -> None:
    run = {"module": "bagua.examples.digits", "args": ["--epochs", "15"]}
    policy = {"backoffSeconds": 1, "drainGraceSeconds": 1, "stopGraceSeconds": 1}
    cluster.submit("static", image=IMAGE, replicas=2, run=run, runPolicy=policy)
    trains(cluster, "static", "static-0", "static-1")
    cluster.delete_pod("static-0")
    status = cluster.wait_for_phase("static", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded" and status["failures"] == 1, cluster.explain()
