"""The loop over jobs: one look at a job, one decision, and what follows from it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import httpx2
from lightkube import ApiError

from bagua.base.errors import BaguaError, ConfigError, ConflictError, UnavailableError
from bagua.client import Client
from bagua.enroll.certificates import Authority
from bagua.operator import credentials, facts, service, status
from bagua.operator.cluster import CONFLICT, Cluster, ends
from bagua.operator.facts import Action, Manifest, Pods, Seen
from bagua.operator.job import KIND, parse
from bagua.operator.memory import Memory, Numbers, Objects
from bagua.operator.objects import hash_of
from bagua.operator.queue import Key
from bagua.operator.reconcile import attempt_name, reconcile
from bagua.operator.settings import Settings

log = logging.getLogger("bagua.operator")
LASTS_S = 300.0  # what was read is read again after so long, though nothing has told of a change
RETRY_S = 1.0  # after an API that refused, or did not answer
SOON_S = 0.2  # after a change that came in between
# A pod mostly runs so long after a kubelet has taken it, if its image is there; so often events are asked for, at last.
LATE_S, LATEST_S = 10.0, 60.0
NOT_STARTED = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox")  # of kubelets, in events alone
END_S = 30  # time for pods of a deleted job to end, where their daemons can't be told
DELETED = "its BaguaJob was deleted"


class Controller:
    """Serves jobs by their names; several threads may do so for different jobs. ``address``: where a job's coordinator
    listens, as HOST:PORT. ``wake`` is called from other threads: a job's coordinator has told of a change."""

    def __init__(self, cluster: Cluster, settings: Settings, address: Callable[[Seen], str] = service.address) -> None:
        self._cluster = cluster
        self._settings = settings
        self._address = address
        self._memories: dict[Key, Memory] = {}
        self.numbers = Numbers()
        self.wake: Callable[[Key], object] = lambda job: None
        self.connections = service.Connections(lambda job: self.wake(job))

    def phases(self) -> Counter[str]:
        """Counts BaguaJobs by their phase; from any thread."""
        bodies = [memory.body.peek() for memory in list(self._memories.values())]
        return Counter(str((body.get("status") or {}).get("phase", "none")) for body in bodies if body is not None)

    def serve(self, namespace: str, name: str) -> float | None:
        """Returns after how many seconds to serve the job again; None: when something has changed."""
        self.numbers.looks += 1
        try:
            again_s = self._serve(namespace, name)
            self._tell((namespace, name))
            return again_s
        except ApiError as error:
            self._memory((namespace, name)).body.change()  # a conflict says that what is kept is old
            if error.status.code == CONFLICT:
                return SOON_S
            self.numbers.refusals[str(error.status.code)] += 1
            if ends(error):
                log.info("%s/%s: the namespace is being deleted", namespace, name)
                self._leave((namespace, name))
                return None
            log.warning("%s/%s: the Kubernetes API refuses: %s", namespace, name, error)
            return RETRY_S
        except httpx2.HTTPError as error:
            self.numbers.refusals["none"] += 1
            first = str(error).partition("\n")[0]  # more lines are of no use here
            log.warning("%s/%s: the Kubernetes API does not answer: %s", namespace, name, first)
            return RETRY_S
        except Exception as error:  # of our own code: the other jobs go on
            return self._mistaken((namespace, name), error)

    def _mistaken(self, job: Key, error: Exception) -> float:
        """Tells of a mistake once, in the job's status, too; returns when to try again."""
        memory, body = self._memory(job), self._memory(job).body.peek()
        words = f"The operator made a mistake, and tries again. Please report it, with its log: {error!r}. [BG834]"
        trouble = facts.Trouble("Mistake", words)
        self.numbers.faults += 1
        if trouble != memory.refusal:
            log.exception("%s/%s: a mistake of the operator, which tries again; please report it", *job)
        generation = Seen(body).generation if body else ""
        memory.refused(trouble, generation, time.monotonic())
        if body is not None:
            now = time.time()
            former = body.get("status") or status.with_phase({}, status.PENDING, "Pending", "", now)
            try:
                memory.written(self._cluster.write_status(body, status.with_trouble(former, trouble, now)))
            except (ApiError, httpx2.HTTPError):  # the next try says it
                memory.body.change()
        return memory.pause_s(generation, time.monotonic())

    # ---- what the API server tells, from any thread; true: there is something to do

    def job_changed(self, job: Key, body: Mapping[str, Any], deleted: bool) -> bool:
        """The BaguaJob has changed. What this process has written itself is known."""
        memory = self._memory(job)
        if not deleted and memory.has_written(body):
            return False
        memory.body.change()
        return True

    def pods_changed(self, job: Key) -> None:
        """A pod of the job has changed."""
        self._memory(job).pods.change()

    def listed(self) -> None:
        """All jobs or pods are told of, and those that went unseen are not: the next look at each job reads."""
        for memory in list(self._memories.values()):
            memory.body.change()
            memory.pods.change()

    def object_changed(self, job: Key, kind: str, body: Mapping[str, Any], deleted: bool) -> bool:
        """An object of the job that the operator alone should write has changed; or its status, which tells nothing
        but how its pod does."""
        objects = self._memory(job).objects
        kept = objects.peek()
        known = kept.hashes.get((kind, str(body["metadata"]["name"]))) if kept is not None else None
        if not deleted and known == hash_of(dict(body)):
            return kind == "StatefulSet"
        objects.change()
        return True

    def machine_changed(self, name: str, body: Mapping[str, Any], deleted: bool) -> bool:
        """A machine has changed; true: so that pods must leave it, or need not any more."""
        if not self._cluster.machine_changed(name, None if deleted else dict(body)):
            return False
        for memory in list(self._memories.values()):
            memory.pods.change()
        return True

    def _memory(self, job: Key) -> Memory:
        return self._memories.setdefault(job, Memory())

    def _serve(self, namespace: str, name: str) -> float | None:
        job = namespace, name
        now = time.monotonic()
        body = self._memory(job).body.get(lambda: self._cluster.get(KIND, namespace, name), now, LASTS_S)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._leave(job)
            return None  # what the BaguaJob owns goes with it
        memory = self._memory(job)
        if memory.uid != body["metadata"]["uid"]:  # another one of the same name
            self._leave(job)
            memory = self._memories[job] = Memory(body["metadata"]["uid"])
        uid = memory.uid
        kept = memory.objects.get(lambda: self._read_objects(job, uid), now, LASTS_S)
        if kept.access is None:  # nothing tells when cert-manager has made a Secret
            memory.objects.change()
        made = ("StatefulSet", f"{name}-coordinator") in kept.hashes
        pods = memory.pods.get(lambda: self._read_pods(body, made), now, self._lasts_s(body, memory.pods.peek(), made))
        seen = Seen(
            body=body,
            pods=pods.daemons,
            coordinator_trouble=pods.trouble,
            ends=memory.ends(pods.daemons),
            hashes=kept.hashes,
            secrets=credentials.secrets_seen(kept.token, kept.tls),
            coordinator_credentials=kept.started_with,
            api_groups=self._cluster.api_groups,
        )
        if (ended := memory.journal.looked(seen)) is not None:  # others would end, too, as by a wrong image
            memory.refused(ended, seen.generation, now)
        seen = replace(seen, refusal=memory.refusal, waits=memory.pause_s(seen.generation, now) > 0)
        try:
            parse(body["spec"])
            memory.spec = body["spec"]
        except ConfigError as error:
            seen = replace(seen, valid_spec=memory.spec, invalid=str(error) if memory.spec else "")
        # Its coordinator is scaled to 0: there is nobody to ask.
        if seen.status.get("phase") in status.ENDED and all(pod.ended or pod.leaving for pod in seen.pods):
            memory.running = ""
            self.connections.drop(job)
            return self._act(seen, None)
        if kept.access is None:  # not made yet, or somebody has deleted them: what is known of the attempt stays
            return self._act(seen, None)
        client = self.connections.client(job, self._address(seen), *kept.access)
        seen = service.look(client, seen, attempt_name(seen, seen.status.get("attempt", 0)))
        if seen.task is not None and not seen.task.ended:
            self._follow(seen, seen.task.job_id)
        elif seen.reachable:
            memory.running = ""
        try:
            return self._act(seen, client)
        finally:
            if not seen.reachable:
                self.connections.drop(job)

    def _leave(self, job: Key) -> None:
        """Leaves a BaguaJob that was deleted, or all of its namespace, and whose pods go. Its attempt is cancelled,
        else their daemons would drain: wait for ranks to leave a job that others go on with. Where that is not
        possible, as the coordinator's pod was gone first, they get no time for it.
        """
        memory, client = self._memories.pop(job, None), self.connections.kept(job)
        if memory is not None and memory.running:
            try:
                if client is None:
                    raise UnavailableError("The coordinator is gone. [BG801]")
                client.cancel(memory.running, DELETED)
                log.info("%s/%s was deleted: %s is cancelled", *job, memory.running)
            except BaguaError as error:
                log.warning("%s/%s was deleted, and its pods end without a drain: %s", *job, error)
                self._cluster.end_pods(*job, memory.uid, END_S)
        self.connections.drop(job)

    def _read_pods(self, body: Manifest, made: bool) -> Pods:
        """``made``: the StatefulSet of the coordinator is there."""
        one = Seen(body)
        found, trouble = self._cluster.pods(*one.key, one.uid), None
        if made and not found.coordinator:
            since = status.seconds_of(body["metadata"].get("creationTimestamp", status.stamp(0.0)))
            trouble = self._cluster.told(one.namespace, f"{one.name}-coordinator", since, "FailedCreate")
        elif found.trouble is None and found.starting is not None and time.time() - found.starting[1] >= LATE_S:
            trouble = self._cluster.told(one.namespace, *found.starting, *NOT_STARTED)
        return replace(found, trouble=trouble or found.trouble)

    def _lasts_s(self, body: Manifest, pods: Pods | None, made: bool) -> float:
        """Returns for how long pods need not be read again. Nothing tells of events: they are asked for while a job
        waits, the longer the rarer."""
        since = body.get("status", {}).get("gangSince")
        if since is None or pods is None or (pods.starting is None and (pods.coordinator or not made)):
            return LASTS_S
        return min(max(time.time() - status.seconds_of(since), LATE_S), LATEST_S)

    def _read_objects(self, job: Key, uid: str) -> Objects:
        hashes, started_with = self._cluster.hashes(*job, uid)
        token = self._cluster.owned("Secret", job[0], f"{job[1]}-token", uid)
        return Objects(hashes, started_with, token, self._cluster.certificate_secret(*job, uid))

    def _follow(self, seen: Seen, job_id: str) -> None:
        self._memory(seen.key).running = job_id
        self.connections.follow(seen.key, job_id)

    def _act(self, seen: Seen, client: Client | None) -> float | None:
        """Writes the status, then acts."""
        now = time.time()
        plan = reconcile(seen, self._settings, now)
        # First: if this process dies before the actions, the next look asks for them again; a count would be lost.
        seen = self._write(seen, plan.status, now)
        memory, refused = self._memory(seen.key), seen.waits
        for action in plan.actions:
            makes = isinstance(action, facts.Apply | facts.Create | facts.MakeCredentials | facts.Submit)
            if makes and refused:
                continue
            try:
                if self._perform(seen, action, client):
                    memory.journal.did(action)
            except ConflictError as error:  # as the last node that has state, which can't be drained
                log.warning("%s/%s: %s", seen.namespace, seen.name, error)
            except UnavailableError as error:
                log.warning("%s/%s: %s", seen.namespace, seen.name, error)
                return RETRY_S
            except (ApiError, facts.NotOwnedError, BaguaError) as error:
                trouble = _refusal(error) if makes or isinstance(error, BaguaError) else None
                if trouble is None:
                    raise
                if trouble != memory.refusal:
                    log.warning("%s/%s: refused: %s", seen.namespace, seen.name, trouble.message)
                self.numbers.refusals[trouble.reason] += 1
                memory.refused(trouble, seen.generation, time.monotonic())
                refused = True
        if not refused:
            memory.refusal = None
            return plan.again_s if seen.refusal is None else SOON_S  # the next look says that nothing is refused
        if memory.refusal != seen.refusal:
            self._write(seen, status.with_trouble(seen.status, memory.refusal, now), now)
        pause_s = memory.pause_s(seen.generation, time.monotonic())
        return pause_s if plan.again_s is None else min(pause_s, max(plan.again_s, RETRY_S))

    def _write(self, seen: Seen, new: Manifest, now: float) -> Seen:
        """Returns the same facts, with the new status. Raises ApiError if the BaguaJob has changed meanwhile."""
        if new == seen.status:
            return seen
        body = self._cluster.write_status(seen.body, new)
        self._memory(seen.key).written(body)
        self._memory(seen.key).journal.wrote(seen.status, new)
        if new.get("phase") != seen.status.get("phase"):
            log.info("%s/%s: %s. %s", seen.namespace, seen.name, new["phase"], new.get("message", ""))
        return replace(seen, body=body)

    def _tell(self, job: Key) -> None:
        if (memory := self._memories.get(job)) is None:
            return
        for news in memory.journal.take():
            try:
                self._cluster.write_event(job, memory.uid, news, status.stamp(time.time()))
            except ApiError as error:  # by a quota, or as the namespace goes: no job waits for that
                log.warning("%s/%s: the event %s is refused: %s", *job, news.reason, error)

    def _perform(self, seen: Seen, action: Action, client: Client | None) -> bool:
        """Returns false if nothing was to be done."""
        memory = self._memory(seen.key)
        match action:
            case facts.Apply(manifest):
                memory.objects.change()
                self._cluster.apply(manifest)
            case facts.Create(manifest):
                memory.pods.change()
                return self._cluster.create(manifest)
            case facts.Delete(kind, name):
                memory.change()
                self._cluster.delete(kind, seen.namespace, name)
            case facts.MakeCredentials():
                memory.objects.change()
                self._make_credentials(seen, action)
            case _:
                if client is None:
                    return False
                self._call(seen, action, client)
        return True

    def _call(self, seen: Seen, action: Action, client: Client) -> None:
        log.info("%s/%s: %s", seen.namespace, seen.name, action)
        match action:
            case facts.Submit(key, name):
                spec = service.specification(parse(seen.spec), name)
                self._follow(seen, client.submit(spec, idempotency_key=key).job_id)
            case facts.Cancel(job_id, reason):
                client.cancel(job_id, reason)
            case facts.Scale(job_id, nodes):
                client.scale(job_id, nodes)
            case facts.Pause(job_id):
                client.pause(job_id)
            case facts.Resume(job_id):
                client.resume(job_id)
            case facts.Gone(node_id, why):
                client.gone(node_id, why)
            case facts.Drain(node_id, _):
                client.drain(node_id, this_run=True)  # a later pod may have the same name
            case facts.End(node_id, exit_code):
                client.drain(node_id, this_run=True, exit_code=exit_code)

    def _make_credentials(self, seen: Seen, wanted: facts.MakeCredentials) -> None:
        now = time.time()
        if wanted.token:
            made = credentials.token_secret(seen, credentials.make_token())
            self._cluster.apply(credentials.noted(made, seen, now))
        if wanted.certificate:
            kept = self._cluster.owned("Secret", seen.namespace, f"{seen.name}-authority", seen.uid)
            if kept is None:
                authority = Authority()
                self._cluster.apply(credentials.authority_secret(seen, authority))
            else:
                authority = credentials.authority_of(kept["data"])
            self._cluster.apply(credentials.noted(credentials.tls_secret(seen, authority), seen, now))


def _refusal(error: ApiError | facts.NotOwnedError | BaguaError) -> facts.Trouble | None:
    """Returns the words of a refusal; None: another look decides anew, or nothing can be made any more."""
    if not isinstance(error, ApiError):
        return facts.Trouble("NotOwned" if isinstance(error, facts.NotOwnedError) else "Refused", str(error))
    if error.status.code == CONFLICT or ends(error):
        return None
    return facts.Trouble(error.status.reason or "Refused", error.status.message or str(error))
