"""One look at a job, one decision, and what follows from it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import httpx2
from lightkube import ApiError

from bagua.base.errors import BaguaError, ConflictError
from bagua.client import Client
from bagua.enroll.certificates import Authority
from bagua.operator import credentials, facts, service, status
from bagua.operator.cluster import CONFLICT, Cluster
from bagua.operator.facts import Action, Manifest, Seen
from bagua.operator.job import parse
from bagua.operator.reconcile import attempt_name, reconcile
from bagua.operator.settings import Settings

log = logging.getLogger("bagua.operator")
RETRY_S = 1.0
"""After a change that came in between, or an API that did not answer."""


class Controller:
    """Serves jobs by their names; several threads may do so for different jobs. ``address``: where a job's coordinator
    listens, as HOST:PORT."""

    def __init__(self, cluster: Cluster, settings: Settings, address: Callable[[Seen], str] = service.address) -> None:
        self._cluster = cluster
        self._settings = settings
        self._address = address
        self.connections = service.Connections()

    def serve(self, namespace: str, name: str) -> float | None:
        """Returns after how many seconds to serve the job again; None: when something has changed."""
        try:
            return self._serve(namespace, name)
        except ApiError as error:
            if error.status.code != CONFLICT:
                log.warning("%s/%s: the Kubernetes API refuses: %s", namespace, name, error)
            return RETRY_S
        except httpx2.HTTPError as error:
            first = str(error).partition("\n")[0]  # more lines are of no use here
            log.warning("%s/%s: the Kubernetes API does not answer: %s", namespace, name, first)
            return RETRY_S

    def _serve(self, namespace: str, name: str) -> float | None:
        body = self._cluster.job(namespace, name)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self.connections.drop((namespace, name))
            return None  # what the BaguaJob owns goes with it
        hashes, started_with = self._cluster.hashes(namespace, name)
        token = self._cluster.secret(namespace, f"{name}-token")
        tls = self._cluster.secret(namespace, f"{name}-tls")
        seen = Seen(
            body=body,
            pods=self._cluster.pods(namespace, name),
            hashes=hashes,
            secrets=credentials.secrets_seen(token, tls),
            coordinator_credentials=started_with,
            api_groups=self._cluster.api_groups(),
        )
        if token is None or tls is None or seen.status.get("phase") in status.ENDED or not started_with:
            self.connections.drop((namespace, name))
            return self._act(seen, None)
        client = self.connections.client((namespace, name), self._address(seen), token, tls)
        answer = service.look(client, attempt_name(seen, seen.status.get("attempt", 0)))
        seen = replace(
            seen,
            reachable=answer.reachable,
            trouble=answer.trouble,
            task=answer.task,
            former_attempts=answer.others,
            nodes=answer.nodes,
        )
        if answer.task is not None and not answer.task.ended:
            self.connections.follow((namespace, name), answer.task.job_id)
        try:
            return self._act(seen, client)
        finally:
            if not answer.reachable:
                self.connections.drop((namespace, name))

    def _act(self, seen: Seen, client: Client | None) -> float | None:
        """The status is written first: when this process dies in between, the actions follow from the next look, while
        a counter that was lost would be counted twice."""
        now = time.time()
        plan = reconcile(seen, self._settings, now)
        if plan.status != seen.status:
            self._cluster.write_status(seen.body, plan.status)
            self._tell(seen, plan.status, now)
        for action in plan.actions:
            try:
                self._perform(seen, action, client)
            except ConflictError as error:  # as the last node that has state, which can't be drained
                log.warning("%s/%s: %s", seen.namespace, seen.name, error)
            except BaguaError as error:
                log.warning("%s/%s: %s", seen.namespace, seen.name, error)
                return RETRY_S
        return plan.again_s

    def _tell(self, seen: Seen, new: Manifest, now: float) -> None:
        if new.get("phase") != seen.status.get("phase"):
            log.info("%s/%s: %s. %s", seen.namespace, seen.name, new["phase"], new.get("message", ""))
            self._cluster.tell(seen.body, new["phase"], new.get("message") or new["phase"], status.stamp(now))

    def _perform(self, seen: Seen, action: Action, client: Client | None) -> None:
        match action:
            case facts.Apply(manifest):
                self._cluster.apply(manifest)
            case facts.Create(manifest):
                self._cluster.create(manifest)
            case facts.Delete(kind, name):
                self._cluster.delete(kind, seen.namespace, name)
            case facts.MakeCredentials():
                self._make_credentials(seen, action)
            case _:
                if client is not None:
                    self._call(seen, action, client)

    def _call(self, seen: Seen, action: Action, client: Client) -> None:
        log.info("%s/%s: %s", seen.namespace, seen.name, action)
        match action:
            case facts.Submit(key, name):
                client.submit(service.specification(parse(seen.body["spec"]), name), idempotency_key=key)
            case facts.Cancel(job_id, reason):
                client.cancel(job_id, reason)
            case facts.Scale(job_id, nodes):
                client.scale(job_id, nodes)
            case facts.Pause(job_id):
                client.pause(job_id)
            case facts.Resume(job_id):
                client.resume(job_id)
            case facts.Drain(node_id, _):
                client.drain(node_id)

    def _make_credentials(self, seen: Seen, wanted: facts.MakeCredentials) -> None:
        now = time.time()
        if wanted.token:
            made = credentials.token_secret(seen, credentials.make_token())
            self._cluster.apply(credentials.noted(made, seen, now))
        if wanted.certificate:
            kept = self._cluster.secret(seen.namespace, f"{seen.name}-authority")
            if kept is None:
                authority = Authority()
                self._cluster.apply(credentials.authority_secret(seen, authority))
            else:
                authority = credentials.authority_of(kept["data"])
            self._cluster.apply(credentials.noted(credentials.tls_secret(seen, authority), seen, now))
