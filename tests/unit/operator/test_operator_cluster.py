"""What the operator writes into a cluster, and reads from it."""

import httpx2
import pytest
from lightkube import ApiError

from bagua.operator.cluster import Cluster, trouble_of


class Faster:
    """An API server at which another operator has made the object between a look and a creation."""

    def __init__(self):
        self.wrote = []
        self.there = None

    def get(self, *_, **__):
        if self.there is None:
            raise self._error(404)
        return self.there

    def create(self, body):
        self.there = body
        raise self._error(409)

    def replace(self, body, *_, **__):
        self.wrote.append(body)

    @staticmethod
    def _error(code):
        request = httpx2.Request("POST", "https://k")
        return ApiError(request, httpx2.Response(code, json={"code": code, "message": "exists"}, request=request))


def test_an_object_that_another_operator_has_just_made_is_looked_at_first(tmp_path):
    """Else the certificates of two authorities would lie in one job's Secrets."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        "{apiVersion: v1, kind: Config, clusters: [{name: c, cluster: {server: 'http://127.0.0.1:9'}}], "
        "contexts: [{name: x, context: {cluster: c, user: u}}], users: [{name: u, user: {}}], current-context: x}"
    )
    cluster = Cluster((), str(kubeconfig))
    api = Faster()
    cluster.close()
    cluster._client = api
    owner = {"kind": "BaguaJob", "name": "j", "uid": "u"}
    secret = {"kind": "Secret", "metadata": {"name": "j-authority", "namespace": "n", "ownerReferences": [owner]}}
    with pytest.raises(ApiError, match="exists"):
        cluster.apply({**secret, "apiVersion": "v1", "data": {}})
    assert not api.wrote


def test_a_container_that_is_started_again_and_again_says_how_it_ended():
    said = "Traceback (most recent call last):\nValueError: no such database\n"
    last = {"terminated": {"reason": "Error", "exitCode": 1, "message": said}}
    waits = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    container = {"name": "coordinator", "state": waits, "lastState": last}
    pod = {"metadata": {"name": "j-coordinator-0"}, "status": {"phase": "Running", "containerStatuses": [container]}}
    trouble = trouble_of(pod)
    assert trouble is not None and trouble.message.endswith("Error (exit code 1): ValueError: no such database)")
