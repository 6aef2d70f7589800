"""The commands of the pages about Kubernetes, by kubectl, as they stand: on a real API server, from an empty cluster.

The controllers of Deployments run, too. So the operator is a pod, with the rights of its service account.
"""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from rig.clusters import kubelet, kubernetes
from rig.clusters.operators import MANIFESTS, Operated
from rig.docs import pages
from rig.limits import SOON_S

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

PAGE, TUTORIAL = "docs/kubernetes.md", "docs/tutorials/kubernetes.md"
CHECKS_RULES = (1, 25)
"""The first version that knows the rules in the definition. The page says to add --validate=false before that."""


class Administrator:
    """Somebody who types at a cluster, in a checkout."""

    def __init__(self, sandbox):
        self.sandbox, self.cluster = sandbox, Operated()
        shutil.copytree(MANIFESTS, sandbox.folder / "deploy" / "kubernetes")
        sandbox.env |= {"KUBECONFIG": str(self.cluster.plane.kubeconfig), "HOME": str(sandbox.folder)}
        sandbox.env["PATH"] = f"{os.path.dirname(sys.executable)}:{sandbox.env['PATH']}"
        self.cluster.start_machines()
        self.old = self.cluster.plane.version() < CHECKS_RULES

    def type(self, command):
        """Returns its output. One that watches is ended once the job runs."""
        if self.old:
            command = command.replace("kubectl apply ", "kubectl apply --validate=false ")
        if command.endswith("--watch"):
            return self._watch(command)
        done = self.sandbox.run("sh", "-c", command, deadline=5 * SOON_S)
        assert done.code == 0, f"{command}: {done.text}\n{self.cluster.explain()}"
        return done.out

    def reach(self, command):
        """One that needs a kubelet, which none is here: the API server knows the pod and its container."""
        done = self.sandbox.run("sh", "-c", command, deadline=5 * SOON_S)
        assert done.code and re.search("dial tcp .* refused|error dialing backend", done.text), done.text

    def _watch(self, command):
        log = self.sandbox.folder / "watched"
        with log.open("w") as out:
            process = self.sandbox.start("sh", "-c", f"exec {command}", stdout=out, stderr=subprocess.STDOUT)
        self.cluster.wait(lambda: "Running" in log.read_text())
        process.terminate()
        self.sandbox.finish(process, time.monotonic())
        return log.read_text()

    def trains(self, pods):
        """Waits until the job digits has so many pods and makes steps."""

        def look():
            status = self.cluster.status("digits")
            return status.get("pods") == f"{pods}/{pods}" and status["phase"] == "Running" and status.get("step", 0) > 0

        self.cluster.wait(look)

    def nothing_is_left(self):
        """Waits until all objects of the job are gone."""
        kinds = "pods,persistentvolumeclaims,secrets,services,statefulsets"
        self.cluster.wait(lambda: "digits" not in self.type(f"kubectl get {kinds} --output name"))


@pytest.fixture(scope="module")
def administrator(core, tmp_path_factory):
    from tests.e2e.conftest import sandbox_in

    reason = kubernetes.missing() or kubelet.missing() or ("" if shutil.which("kubectl") else "no kubectl")
    if reason:
        pytest.skip(reason)
    with sandbox_in(tmp_path_factory.mktemp("administrator")) as sandbox:
        made = Administrator(sandbox)
        try:
            yield made
        finally:
            made.cluster.close()


def test_the_commands_of_the_page(administrator):
    *begin, look = pages.run_by("test_the_commands_of_the_page", PAGE)
    for command in begin:
        administrator.type(command)
    administrator.trains(2)
    assert "digits" in administrator.type(look)
    administrator.cluster.delete("digits")
    administrator.nothing_is_left()


def test_the_tutorial(administrator):
    """From the operator to the deletion of a job. Its pods are looked at between the commands."""
    pages.write_files(TUTORIAL, administrator.sandbox.folder)
    install, rollout, apply, watch, logs, scale, delete_pod, show, execute, describe, delete = pages.run_by(
        "test_the_tutorial", TUTORIAL
    )
    administrator.type(install)
    assert "successfully rolled out" in administrator.type(rollout)
    administrator.type(apply)
    watched = administrator.type(watch)
    assert watched.index("Pending") < watched.index("Running"), watched
    administrator.trains(2)
    administrator.reach(logs)
    administrator.type(scale)
    administrator.type(delete_pod)
    administrator.trains(3)
    assert "conditions:" in administrator.type(show)
    status = administrator.cluster.status("digits")
    assert status["attempt"] == status["failures"] == 0, status
    administrator.reach(execute)
    assert "Phase:" in administrator.type(describe)
    administrator.type(delete)
    administrator.nothing_is_left()
