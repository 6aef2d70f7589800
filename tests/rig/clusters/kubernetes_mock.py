"""An API server of kmock, and an operator on it, for machines without Kubernetes' programs.

kmock keeps objects, and answers lists and watches. It checks nothing, knows no labels in lists, and has no controllers:
``tests/e2e/clusters/test_kubernetes.py`` runs the operator on a real API server. ``Api`` adds writes of a whole status,
and refusals.
"""

import asyncio
import json
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager, suppress

import aiohttp.web
import httpx
import kmock
import kopf

from bagua.operator.adapter import make_registry
from bagua.operator.cluster import Cluster
from bagua.operator.controller import Controller
from bagua.operator.settings import Settings
from rig.coordinator.fleet import Counts, Daemon, keep

JOBS = "/apis/bagua.dev/v1/namespaces/n/baguajobs"
PODS = "/api/v1/namespaces/n/pods"
MERGE = {"Content-Type": "application/merge-patch+json"}
WAIT_S = 120.0
KINDS = {
    "bagua.dev/v1": ["BaguaJob"],
    "v1": ["Event", "Namespace", "Node", "PersistentVolumeClaim", "Pod", "Secret", "Service"],
    "apps/v1": ["StatefulSet"],
    "networking.k8s.io/v1": ["NetworkPolicy"],
    "policy/v1": ["PodDisruptionBudget"],
}


def plural(kind):
    return f"{kind.lower()[:-1]}ies" if kind.endswith("y") else f"{kind.lower()}s"


class Api(kmock.KubernetesEmulator):
    """``refuse``: answers the next request of this method and path with a code, and changes nothing. ``asked``: how
    often, by method and path."""

    def __attrs_post_init__(self):
        super().__attrs_post_init__()
        self.refusals = {}
        self.asked = Counter()
        for version, kinds in KINDS.items():
            for kind in kinds:
                self.resources[f"{version}/{plural(kind)}"] = {
                    "kind": kind,
                    "namespaced": kind not in ("Namespace", "Node"),
                    "verbs": ["get", "list", "watch", "create", "patch", "update", "delete"],
                }
        self["put"] << self._replace_status

    def refuse(self, method, path, code, message, **details):
        self.refusals[method, path] = (code, message, details)

    async def __call__(self, request):
        self.asked[request.method, request.path] += 1
        refusal = self.refusals.pop((request.method, request.path), None)
        if refusal is not None:
            code, message, details = refusal
            body = {"kind": "Status", "status": "Failure", "code": code, "message": message, "reason": ""}
            return _as_kubernetes(aiohttp.web.json_response({**body, "details": details}, status=code))
        if request.method == "POST" and request.path.endswith("/events"):  # of generated names
            with suppress(KeyError):
                del self.objects["v1/events", "n", None]
        return _as_kubernetes(await super().__call__(request))

    def _replace_status(self, request):
        found = self.objects[request.resource, request.namespace, request.name]
        if found.deleted:  # kmock would make it again
            raise kmock.KubernetesObjectNotFoundError
        if "status" in request.data:
            found["status"] = request.data["status"]
        return found.raw


def _as_kubernetes(answer):
    """Without a charset: clients know errors of the API server by that."""
    if not answer.prepared and answer.content_type == "application/json":
        answer.headers["Content-Type"] = "application/json"
    return answer


class Operator:
    """An operator and its API server on an event loop in a thread. ``coordinator``: where the coordinator of every job
    listens; ``poll_s``: see the operator's settings."""

    def __init__(self, folder, poll_s=0.5):
        self.coordinator = "127.0.0.1:9"
        self.poll_s = poll_s
        self._folder = folder
        self._daemons = []
        self._begun = threading.Event()
        self._trouble = None
        self._thread = threading.Thread(target=self._main, name="operator")

    @contextmanager
    def running(self):
        self._thread.start()
        assert self._begun.wait(WAIT_S)
        try:
            assert self._trouble is None, self._trouble
            with httpx.Client(base_url=self.url, timeout=WAIT_S) as self.http:
                yield self
        finally:
            if self._trouble is None:
                self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(WAIT_S)
        assert self._trouble is None, self._trouble

    def _main(self):
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._trouble = error
        finally:
            self._begun.set()

    async def _serve(self):
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        async with Api() as self.api, kmock.Server(self.api):
            self.url = str(self.api.servers[0].url).rstrip("/")
            kubeconfig = self._folder / "kubeconfig"
            kubeconfig.write_text(
                f"""apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "{self.url}"}}}}]
users: [{{name: u, user: {{token: t}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""
            )
            settings = Settings(poll_s=self.poll_s, secret_delay_s=0)
            with closing(Cluster(settings.taints, str(kubeconfig))) as cluster:
                await asyncio.to_thread(cluster.find_others)
                self.controller = Controller(cluster, settings, lambda _: self.coordinator)
                registry = make_registry(self.controller, settings)
                operator = kopf.operator(registry=registry, standalone=True, clusterwide=True, stop_flag=self._over)
                self._begun.set()
                try:
                    await operator
                finally:
                    for daemon in self._daemons:
                        daemon.cancel()
                    await asyncio.gather(*self._daemons, return_exceptions=True)

    def connect(self, address, token, tls, *names):
        """Daemons of these names, with a slot each, that run nothing (``fleet``)."""

        async def begin():
            turn = asyncio.Semaphore(len(names))
            for name in names:
                daemon = keep(Daemon(name, 1, Counts()), address, token, tls, turn, Counts())
                self._daemons.append(asyncio.create_task(daemon))

        asyncio.run_coroutine_threadsafe(begin(), self._loop).result(WAIT_S)

    # ---- what users do and see

    def submit(self, name, **spec):
        """Creates a BaguaJob."""
        metadata = {"name": name, "namespace": "n", "uid": f"uid-of-{name}", "generation": 1}
        body = {"apiVersion": "bagua.dev/v1", "kind": "BaguaJob", "metadata": metadata, "spec": spec}
        self.http.post(JOBS, json=body).raise_for_status()

    def change(self, path, **change):
        """Merges into an object."""
        self.http.patch(path, content=json.dumps(change), headers=MERGE).raise_for_status()

    def status(self, name):
        found = self.http.get(f"{JOBS}/{name}").raise_for_status().json().get("status", {})
        return found

    def names(self, path):
        return sorted(one["metadata"]["name"] for one in self.http.get(path).raise_for_status().json()["items"])

    def wait(self, condition):
        """The first true value."""
        deadline = time.monotonic() + WAIT_S
        while not (found := condition()):
            assert self._thread.is_alive(), self._trouble
            assert time.monotonic() < deadline, self.http.get(JOBS).text
            time.sleep(0.1)
        return found
