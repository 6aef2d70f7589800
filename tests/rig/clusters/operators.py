"""A Kubernetes cluster for tests of the operator: control plane, kubelet, definition of BaguaJob, the operator."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from rig.clusters import kubelet, kubernetes
from rig.ports import free_ports

ROOT = Path(__file__).resolve().parents[3]
MANIFESTS = ROOT / "deploy" / "kubernetes"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
JOBS = "/apis/bagua.dev/v1/namespaces/default/baguajobs"
PATCH = {"Content-Type": "application/merge-patch+json"}
DEADLINE_S = 300.0


class Operated:
    """A cluster in which an operator can be started and killed."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="bgk-", dir="/tmp"))
        self.plane = kubernetes.ControlPlane(self.folder / "plane")
        self.operator = None

    def start_machines(self):
        """Control plane and kubelet. Pods of the operator have its rights."""
        self.plane.start()
        self.api = self.plane.api()
        accounts = {"bagua-operator": self.plane.operator_kubeconfig}
        self.kubelet = kubelet.Kubelet(self.plane.api(), self.folder / "pods", accounts)
        self.kubelet.start()

    def start(self):
        """The same, and definition and rights without a pod: the operator is a program then."""
        self.start_machines()
        self.define(yaml.safe_load((MANIFESTS / "crd" / "baguajobs.yaml").read_text()))
        rights = (MANIFESTS / "base" / "rbac.yaml").read_text()
        for one in yaml.safe_load_all(rights):
            if one["kind"] != "ServiceAccount":
                path = f"/apis/rbac.authorization.k8s.io/v1/{one['kind'].lower()}s"
                self.api.post(path, json=one).raise_for_status()

    def define(self, definition):
        """Installs a CustomResourceDefinition, and waits until its objects can be listed."""
        self.api.post(DEFINITIONS, json=definition).raise_for_status()
        spec = definition["spec"]
        path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
        self.wait(lambda: self.api.get(path).status_code == 200)

    def forget(self, definition):
        """Removes a CustomResourceDefinition with all of its objects."""
        path = f"{DEFINITIONS}/{definition['metadata']['name']}"
        self.api.delete(path).raise_for_status()
        self.wait(lambda: self.api.get(path).status_code == 404)

    def start_operator(self, **environment):
        """Runs where the cluster's names are known, as a pod would, and with the rights that its pod would have."""
        settings = {"BAGUA_OPERATOR_POLL_S": "0.5", "BAGUA_OPERATOR_SECRET_DELAY_S": "2", **environment}
        command = [sys.executable, "-P", "-m", "bagua.cli.main", "operator"]
        self.metrics = f"127.0.0.1:{free_ports(1)[0]}"
        command += ["--kubeconfig", str(self.plane.operator_kubeconfig), "--metrics", self.metrics]
        (self.folder / "mounts").touch()
        with (self.folder / "operator.log").open("ab") as log:
            self.operator = subprocess.Popen(
                [*kubelet.unshared(), "bash", "-c", kubelet.SCRIPT, "operator", *command],
                env={
                    **os.environ,
                    **settings,
                    "POD_HOSTS": str(self.kubelet.hosts),
                    "POD_MOUNTS": str(self.folder / "mounts"),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill_operator(self, number=signal.SIGKILL):
        assert self.operator is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.operator.pid, number)
        self.operator.wait(30)

    def close(self):
        if self.operator is not None:
            self.kill_operator()
        try:
            if hasattr(self, "kubelet"):
                self.kubelet.close()
                self.kubelet.api.close()
                self.api.close()
        finally:
            self.plane.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- what users do

    def submit(self, name, **spec):
        """Creates a BaguaJob."""
        body = {"apiVersion": "bagua.dev/v1", "kind": "BaguaJob", "metadata": {"name": name}, "spec": spec}
        answer = self.api.post(JOBS, json=body)
        assert answer.status_code == 201, answer.text

    def change(self, name, **spec):
        answer = self.api.patch(f"{JOBS}/{name}", content=json.dumps({"spec": spec}), headers=PATCH)
        assert answer.status_code == 200, answer.text

    def annotate(self, name, key, value):
        body = {"metadata": {"annotations": {key: value}}}
        self.api.patch(f"{JOBS}/{name}", content=json.dumps(body), headers=PATCH).raise_for_status()

    def scale(self, name, replicas):
        """As `kubectl scale` does, which is used where there is one."""
        if shutil.which("kubectl"):
            self.kubectl("scale", "baguajob", name, f"--replicas={replicas}")
            return
        body = {"spec": {"replicas": replicas}}
        self.api.patch(f"{JOBS}/{name}/scale", content=json.dumps(body), headers=PATCH).raise_for_status()

    def kubectl(self, *arguments):
        done = subprocess.run(
            ["kubectl", "--kubeconfig", str(self.plane.kubeconfig), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    # ---- what they see

    def status(self, name):
        found = self.api.get(f"{JOBS}/{name}").raise_for_status().json().get("status", {})
        assert isinstance(found, dict)
        return found

    def pods(self, name):
        """Pods of a job's daemons that are not on their way out."""
        selector = f"bagua.dev/job={name},bagua.dev/role=daemon"
        found = self.api.get("/api/v1/namespaces/default/pods", params={"labelSelector": selector}).json()["items"]
        return {one["metadata"]["name"]: one for one in found if "deletionTimestamp" not in one["metadata"]}

    def events(self, name):
        """Events about a BaguaJob, as `kubectl describe` shows them."""
        found = self.api.get("/api/v1/namespaces/default/events").raise_for_status().json()["items"]
        return [one for one in found if one["involvedObject"].get("name") == name]

    def names(self, path):
        return sorted(one["metadata"]["name"] for one in self.api.get(path).raise_for_status().json()["items"])

    def delete(self, name):
        self.api.delete(f"{JOBS}/{name}").raise_for_status()

    def delete_pod(self, name):
        self.api.delete(f"/api/v1/namespaces/default/pods/{name}").raise_for_status()

    def wait(self, condition, within=DEADLINE_S):
        """The first true value."""
        deadline = time.monotonic() + within
        while not (found := condition()):
            assert time.monotonic() < deadline, self.explain()
            assert self.operator is None or self.operator.poll() in (None, -signal.SIGKILL), self.explain()
            time.sleep(0.1)
        return found

    def wait_for_phase(self, name, *phases):
        found = self.wait(lambda: (status := self.status(name)).get("phase") in phases and status)
        assert isinstance(found, dict)
        return found

    def explain(self):
        jobs = self.api.get(JOBS).text[-3000:]
        log = (self.folder / "operator.log").read_text()[-6000:] if (self.folder / "operator.log").exists() else ""
        return f"{jobs}\n--- operator\n{log}\n{self.kubelet.logs()}"
