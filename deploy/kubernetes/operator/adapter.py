"""kopf listens; what it hears names a job, which the controller then looks at as a whole. No handler decides anything,
and there are no finalizers: a BaguaJob can be deleted while no operator runs (its pods drain then)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import kopf

from bagua.operator.controller import Controller
from bagua.operator.facts import JOB_LABEL
from bagua.operator.job import GROUP, PLURAL, VERSION
from bagua.operator.queue import Key, Queue
from bagua.operator.settings import Settings

# Objects of jobs beside their pods: kinds, and what kopf calls them. Secrets of others are none of the operator's
# business, so it may not watch any.
WATCHED = {
    "StatefulSet": ("apps", "v1", "statefulsets"),
    "Service": ("", "v1", "services"),
    "PersistentVolumeClaim": ("", "v1", "persistentvolumeclaims"),
    "NetworkPolicy": ("networking.k8s.io", "v1", "networkpolicies"),
    "PodDisruptionBudget": ("policy", "poddisruptionbudgets"),  # of two versions
}
log = logging.getLogger("bagua.operator")


def make_registry(controller: Controller, settings: Settings) -> kopf.OperatorRegistry:
    """Makes the handlers that wake jobs."""
    registry = kopf.OperatorRegistry()

    async def serve(key: Key) -> float | None:
        return await asyncio.to_thread(controller.serve, *key)

    queue = Queue(serve)

    @kopf.on.login(registry=registry, retries=5)
    def login(**arguments: Any) -> kopf.ConnectionInfo | None:
        # A pod has one; elsewhere a kubeconfig counts.
        return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)

    @kopf.on.startup(registry=registry)
    async def begin(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False  # kopf makes Events of log lines; the operator makes its own
        settings.scanning.disabled = True  # kopf would watch definitions and namespaces, and need rights for that
        # A watch whose connection died without a word is begun anew after so long.
        settings.watching.server_timeout = 120
        loop = asyncio.get_running_loop()
        # It is called from threads that follow coordinators.
        controller.wake = lambda job: loop.call_soon_threadsafe(queue.wake, job)

    def deleted(event: kopf.RawEvent) -> bool:
        if event["type"] is None:  # kopf begins to watch anew; what went meanwhile is not told
            controller.listed()
        return event["type"] == "DELETED"

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job_changed(namespace: str | None, name: str | None, event: kopf.RawEvent, **_: Any) -> None:
        job = str(namespace), str(name)
        if controller.job_changed(job, event["object"], deleted(event)):
            queue.wake(job)

    @kopf.on.event("", "v1", "pods", labels={JOB_LABEL: kopf.PRESENT}, registry=registry)
    async def pod_changed(namespace: str | None, labels: kopf.Labels, event: kopf.RawEvent, **_: Any) -> None:
        job = str(namespace), str(labels[JOB_LABEL])
        deleted(event)
        controller.pods_changed(job)
        queue.wake(job)

    async def object_changed(
        namespace: str | None, labels: kopf.Labels, event: kopf.RawEvent, param: Any = None, **_: Any
    ) -> None:
        job = str(namespace), str(labels[JOB_LABEL])
        if controller.object_changed(job, param, event["object"], event["type"] == "DELETED"):
            queue.wake(job)

    for kind, place in WATCHED.items():
        labels = {JOB_LABEL: kopf.PRESENT}
        kopf.on.event(*place, labels=labels, id=kind, param=kind, registry=registry)(object_changed)

    if not settings.namespaces:  # else the operator may not look at machines

        @kopf.on.event("", "v1", "nodes", registry=registry)
        async def machine_changed(name: str | None, event: kopf.RawEvent, **_: Any) -> None:
            if controller.machine_changed(str(name), event["object"], event["type"] == "DELETED"):
                for key in queue.waiting():
                    queue.wake(key)

    @kopf.on.cleanup(registry=registry)
    async def end(**_: Any) -> None:
        await queue.close()
        controller.connections.close()

    return registry
