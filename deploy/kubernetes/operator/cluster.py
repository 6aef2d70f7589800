"""Looks at the Kubernetes API and changes it. Objects are dictionaries, as in manifests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httpx2
from lightkube import ApiError, Client, KubeConfig
from lightkube.core.exceptions import ConfigError as KubeConfigError
from lightkube.generic_resource import create_global_resource, create_namespaced_resource

from bagua.base.errors import ConfigError
from bagua.operator.facts import (
    CREDENTIALS,
    INDEX_LABEL,
    JOB_LABEL,
    ROLE_LABEL,
    Manifest,
    News,
    NotOwnedError,
    Pod,
    Pods,
    Trouble,
)
from bagua.operator.job import CONTAINER, GROUP, KIND, PLURAL, VERSION
from bagua.operator.objects import hash_of
from bagua.operator.status import seconds_of

MANAGER = "bagua-operator"
KINDS: dict[str, Any] = {
    kind: create_namespaced_resource(group, version, kind, plural)
    for kind, group, version, plural in (
        (KIND, GROUP, VERSION, PLURAL),
        ("Certificate", "cert-manager.io", "v1", "certificates"),
        ("Event", "", "v1", "events"),
        ("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies"),
        ("PersistentVolumeClaim", "", "v1", "persistentvolumeclaims"),
        ("Pod", "", "v1", "pods"),
        ("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets"),
        ("PodGroup", "scheduling.volcano.sh", "v1beta1", "podgroups"),
        ("Secret", "", "v1", "secrets"),
        ("Service", "", "v1", "services"),
        ("StatefulSet", "apps", "v1", "statefulsets"),
    )
}
OLD_BUDGET = create_namespaced_resource("policy", "v1beta1", "PodDisruptionBudget", "poddisruptionbudgets")
JOB_STATUS: Any = create_namespaced_resource(GROUP, VERSION, KIND, PLURAL).Status
# Definitions of what the operator works with where it is installed.
OTHERS = ("workloads.kueue.x-k8s.io", "podgroups.scheduling.volcano.sh", "certificates.cert-manager.io")
DEFINITION = create_global_resource(
    "apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions"
)
NODE = create_global_resource("", "v1", "Node", "nodes")
FORBIDDEN, NOT_FOUND, CONFLICT = 403, 404, 409


def ends(error: ApiError) -> bool:
    """True if the namespace is being deleted: nothing can be made in it any more."""
    causes = error.status.details.causes if error.status.details is not None else None
    return any(one.reason == "NamespaceTerminating" for one in causes or ())


def belongs(body: Manifest, uid: str) -> bool:
    """True if the BaguaJob with this uid owns the object."""
    return any(one["uid"] == uid for one in body["metadata"].get("ownerReferences") or ())


def check_owner(found: Manifest, wanted: Manifest) -> None:
    """Raises NotOwnedError if the object that was found is not that of the BaguaJob which wants it."""
    kind, name = wanted["kind"], wanted["metadata"]["name"]
    [job] = wanted["metadata"]["ownerReferences"]
    if belongs(found, job["uid"]):
        return
    owners = found["metadata"].get("ownerReferences") or [{"kind": "", "name": ""}]
    if (owners[0]["kind"], owners[0]["name"]) == (KIND, job["name"]):
        raise NotOwnedError(
            f"{kind} {name} is left of an earlier {KIND} {job['name']}: this one waits until it is gone."
        )
    whose = f"It belongs to {owners[0]['kind']} {owners[0]['name']}. " if owners[0]["kind"] else ""
    raise NotOwnedError(
        f"There is a {kind} {name} already, which is not of this {KIND}, and stays as it is. {whose}"
        f"Delete it, or give the {KIND} another name. [BG833]"
    )


class Cluster:
    """Client of the API server for all jobs. Several threads may use it. Raises ConfigError if the API can't be found;
    methods raise ApiError and httpx2.HTTPError.
    """

    def __init__(self, taints: Iterable[str], kubeconfig: str = "") -> None:
        try:
            config = KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_env()
            found = config.get()
        except (KubeConfigError, OSError) as error:
            raise ConfigError(f"The Kubernetes API can't be found: {error}. Give --kubeconfig FILE. [BG831]") from error
        self._server = found.cluster.server if found else ""
        self._client = Client(config=config, field_manager=MANAGER, timeout=httpx2.Timeout(15.0))
        self._taints = frozenset(taints)
        self._kinds = dict(KINDS)
        self._notices: dict[str, str | None] = {}  # by machine, where machines are watched
        self._watched = False
        self.api_groups: frozenset[str] = frozenset()  # of OTHERS that were installed at the last ``find_others``

    def close(self) -> None:
        self._client.close()

    # ---- looks

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """An object; None: there is none."""
        return self._find(KINDS[kind], name, namespace=namespace)

    def owned(self, kind: str, namespace: str, name: str, uid: str) -> Manifest | None:
        """An object of the BaguaJob with this uid; None: there is none, or it is of others."""
        found = self.get(kind, namespace, name)
        return found if found is not None and belongs(found, uid) else None

    def certificate_secret(self, namespace: str, name: str, uid: str) -> Manifest | None:
        """The Secret with the certificate of a job: its own, or made by cert-manager for its Certificate."""
        found = self.get("Secret", namespace, f"{name}-tls")
        notes = (found or {}).get("metadata", {}).get("annotations") or {}
        made = notes.get("cert-manager.io/certificate-name") == f"{name}-tls"
        return found if found is not None and (made or belongs(found, uid)) else None

    def pods(self, namespace: str, name: str, uid: str) -> Pods:
        notices: dict[str, str | None] = {}
        found = sorted(self._labelled(namespace, name), key=lambda one: one["metadata"]["name"])
        daemons = tuple(self._pod(one, notices) for one in found if _is_daemon(one, uid))
        coordinator = next((one for one in found if one["metadata"]["name"] == f"{name}-coordinator-0"), None)
        trouble = None if coordinator is None else trouble_of(coordinator)
        return Pods(daemons, coordinator is not None, trouble, next(filter(None, map(_starting, found)), None))

    def told(self, namespace: str, name: str, since: float, *reasons: str) -> Trouble | None:
        """Returns the last event about the object of this name with one of these reasons; of earlier ones of its name
        there may be others. ``since``: seconds since the epoch."""
        about: dict[str, Any] = {"involvedObject.name": name}
        try:
            events = [dict(one) for one in self._client.list(KINDS["Event"], namespace=namespace, fields=about)]
        except ApiError as error:
            if error.status.code != FORBIDDEN:
                raise
            return None
        told = [one for one in events if one.get("reason") in reasons and _happened(one) >= since]
        last = max(told, key=_happened, default=None)
        return None if last is None else Trouble(last["reason"], f"{name}: {last.get('message', '')}")

    def hashes(self, namespace: str, name: str, uid: str) -> tuple[dict[tuple[str, str], str], str]:
        """Returns (hashes of the objects of the BaguaJob with this uid by kind and name, the credentials that its
        coordinator was started with).
        """
        found, credentials = {}, ""
        for kind in ("NetworkPolicy", "PersistentVolumeClaim", "PodDisruptionBudget", "Service", "StatefulSet"):
            for one in self._client.list(self._kinds[kind], namespace=namespace, labels={JOB_LABEL: name}):
                if not belongs(one, uid):
                    continue
                found[kind, str(one["metadata"]["name"])] = hash_of(dict(one))
                if kind == "StatefulSet":
                    template = one["spec"]["template"]["metadata"]
                    credentials = str((template.get("annotations") or {}).get(CREDENTIALS, ""))
        for kind, suffix in (("PodGroup", ""), ("Certificate", "-tls")):
            other = self.owned(kind, namespace, f"{name}{suffix}", uid) if kind in self._optional() else None
            if other is not None:
                found[kind, f"{name}{suffix}"] = hash_of(other)
        return found, credentials

    def machine_changed(self, name: str, body: Manifest | None) -> bool:
        """Notes a machine as it is now, None: gone; true if its notice has changed since it was asked for."""
        self._watched = True
        notice = self._notice_of(body)
        former = self._notices.get(name, notice)
        self._notices[name] = notice
        return former != notice

    def find_others(self) -> frozenset[str]:
        """Looks which of OTHERS are installed, and returns their groups. Where the operator may not look, none is.
        Kubernetes before 1.21 has budgets in another version. Raises ConfigError if the API can't be used."""
        try:
            return self._find_others()
        except ApiError as error:
            words = f"The Kubernetes API at {self._server} refuses the operator: {error}. Its rights: rbac.yaml."
            raise ConfigError(f"{words} [BG831]") from error
        except httpx2.HTTPError as error:
            words = f"The Kubernetes API at {self._server} does not answer: {error}. Is it the right kubeconfig?"
            raise ConfigError(f"{words} [BG831]") from error

    def _find_others(self) -> frozenset[str]:
        try:
            # Whichever namespace: 404 says that there is no such version.
            next(iter(self._client.list(KINDS["PodDisruptionBudget"], namespace="default")), None)
        except ApiError as error:
            if error.status.code == NOT_FOUND:
                self._kinds["PodDisruptionBudget"] = OLD_BUDGET
            elif error.status.code != FORBIDDEN:
                raise
        self.api_groups = frozenset(
            name.partition(".")[2] for name in OTHERS if self._find(DEFINITION, name, FORBIDDEN)
        )
        return self.api_groups

    # ---- changes

    def apply(self, manifest: Manifest) -> None:
        """Creates an object, or changes the one that belongs to the same BaguaJob. Raises NotOwnedError if it belongs
        to others."""
        metadata, kind = manifest["metadata"], self._kinds[manifest["kind"]]
        if manifest["kind"] == "Certificate":
            self._check_certificate_secret(manifest)
        found = self._find(kind, metadata["name"], namespace=metadata["namespace"])
        if found is None:  # a conflict means that another operator was faster: the next look decides anew
            self._make(manifest)
            return
        check_owner(found, manifest)
        # A replacement of the version that was checked: it is refused if the object changes hands meanwhile.
        parts = {
            part: {**found["metadata"].get(part, {}), **metadata.get(part, {})} for part in ("labels", "annotations")
        }
        whole = {**found, **manifest, "apiVersion": found["apiVersion"], "metadata": {**found["metadata"], **parts}}
        if "spec" in manifest:  # with what the cluster has filled in: a volume, an address
            whole["spec"] = {**found["spec"], **manifest["spec"]}
        self._client.replace(kind(whole), metadata["name"], namespace=metadata["namespace"])

    def create(self, manifest: Manifest) -> bool:
        """Creates an object; false: the same BaguaJob has one of that name. Raises NotOwnedError if others have."""
        metadata = manifest["metadata"]
        try:
            self._make(manifest)
        except ApiError as error:
            if error.status.code != CONFLICT:
                raise
            found = self._find(self._kinds[manifest["kind"]], metadata["name"], namespace=metadata["namespace"])
            if found is None:
                raise
            check_owner(found, manifest)
            return False
        return True

    def _check_certificate_secret(self, certificate: Manifest) -> None:
        """cert-manager writes into a Secret of that name, whosesoever it is."""
        metadata, [owner] = certificate["metadata"], certificate["metadata"]["ownerReferences"]
        name = certificate["spec"]["secretName"]
        if self.certificate_secret(metadata["namespace"], owner["name"], owner["uid"]) is None:
            found = self.get("Secret", metadata["namespace"], name)
            if found is not None:
                check_owner(found, {**certificate, "kind": "Secret"})

    def delete(self, kind: str, namespace: str, name: str, seconds: int | None = None) -> None:
        """Deletes an object, within so many seconds. It is no error if there is none."""
        try:
            self._client.delete(KINDS[kind], name, namespace=namespace, grace_period=seconds)
        except ApiError as error:
            if error.status.code != NOT_FOUND:
                raise

    def end_pods(self, namespace: str, name: str, owner: str, seconds: int) -> None:
        """Ends the daemons' pods of the BaguaJob with the uid ``owner`` within so many seconds; those that are on their
        way out, too, whatever time they were given.
        """
        for one in self._labelled(namespace, name):
            if not _is_daemon(one, owner):
                continue
            self.delete("Pod", namespace, one["metadata"]["name"], seconds)

    def write_status(self, body: Manifest, status: Manifest) -> Manifest:
        """The BaguaJob with the new status, unless it has changed meanwhile (then this decision is void)."""
        metadata = body["metadata"]
        whole = {**body, "status": status}
        # Its resourceVersion makes the API refuse an older one.
        return dict(self._client.replace(JOB_STATUS(whole), metadata["name"], namespace=metadata["namespace"]))

    def write_event(self, job: tuple[str, str], uid: str, news: News, now: str) -> None:
        namespace, name = job
        about = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": name, "uid": uid}
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{name}-", "namespace": namespace},  # one job has many Events
            "involvedObject": {**about, "namespace": namespace},
            "reason": news.reason,
            "message": news.message[:1000],  # Kubernetes allows 1024 bytes
            "type": "Warning" if news.warning else "Normal",
            "source": {"component": MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        self._client.create(KINDS["Event"](event))

    # ---- helpers

    def _make(self, manifest: Manifest) -> None:
        kind = self._kinds[manifest["kind"]]
        body = manifest if kind is not OLD_BUDGET else {**manifest, "apiVersion": "policy/v1beta1"}
        self._client.create(kind(body))

    def _optional(self) -> set[str]:
        groups = {"scheduling.volcano.sh": "PodGroup", "cert-manager.io": "Certificate"}
        return {kind for group, kind in groups.items() if group in self.api_groups}

    def _find(self, resource: Any, name: str, *absent: int, namespace: str | None = None) -> Manifest | None:
        """An object; None: there is none, or the API answers with one of the codes ``absent``."""
        try:
            return dict(self._client.get(resource, name, namespace=namespace))
        except ApiError as error:
            if error.status.code in (NOT_FOUND, *absent):
                return None
            raise

    def _labelled(self, namespace: str, name: str) -> list[Manifest]:
        return [dict(one) for one in self._client.list(KINDS["Pod"], namespace=namespace, labels={JOB_LABEL: name})]

    def _pod(self, body: Manifest, notices: dict[str, str | None]) -> Pod:
        metadata, machine = body["metadata"], body["spec"].get("nodeName", "")
        if machine and machine not in notices:
            notices[machine] = self._notice(machine)
        notice = notices.get(machine) or ""
        for condition in body.get("status", {}).get("conditions", []):
            if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
                notice = f"evicted: {condition.get('reason', '')}"
        phase, end = body.get("status", {}).get("phase", "Pending"), _end(body)
        if machine and notices[machine] is None:  # its phase stays as it was until Kubernetes collects the pod
            phase, end = "Failed", f"its machine {machine} is gone"
        return Pod(
            name=metadata["name"],
            index=int(metadata["labels"].get(INDEX_LABEL, 0)),
            phase=phase,
            end=end,
            scheduled=bool(machine),
            leaving="deletionTimestamp" in metadata,
            hash=hash_of(body),
            notice=notice,
            daemon_ended=_daemon_ended(body),
            trouble=trouble_of(body),
        )

    def _notice(self, machine: str) -> str | None:
        """Says why a machine will go away; empty: it stays, or the operator serves some namespaces only. None: it is
        gone."""
        if machine in self._notices:
            return self._notices[machine]
        try:
            found = self._notice_of(self._find(NODE, machine))
        except ApiError as error:
            if error.status.code != FORBIDDEN:
                raise
            return ""
        return self._notices.setdefault(machine, found) if self._watched else found

    def _notice_of(self, body: Manifest | None) -> str | None:
        if body is None:
            return None
        taints = [one["key"] for one in body["spec"].get("taints") or []]
        return next((f"{body['metadata']['name']} has the taint {one}" for one in taints if one in self._taints), "")


def _is_daemon(body: Manifest, uid: str) -> bool:
    """True for a pod of the BaguaJob with this uid, its coordinator's apart."""
    return body["metadata"]["labels"].get(ROLE_LABEL) == "daemon" and belongs(body, uid)


def trouble_of(pod: Manifest) -> Trouble | None:
    """Returns why a pod is not placed, or which of its containers can't be started, in the words of the scheduler or
    the kubelet; None: nothing stands in the way, as far as is known."""
    found, name = pod.get("status", {}), pod["metadata"]["name"]
    if "deletionTimestamp" in pod["metadata"] or found.get("phase", "Pending") not in ("Pending", "Running"):
        return None
    for one in found.get("conditions") or []:
        if one["type"] == "PodScheduled" and one["status"] == "False" and one.get("reason") == "Unschedulable":
            return Trouble("Unschedulable", f"Pod {name}: {one.get('message') or 'it finds no machine'}")
    # They run first: containers wait for them without words.
    for one in [*(found.get("initContainerStatuses") or []), *(found.get("containerStatuses") or [])]:
        waits = one.get("state", {}).get("waiting", {})
        if waits.get("reason") not in (None, "", "ContainerCreating", "PodInitializing"):
            last = one.get("lastState", {}).get("terminated", {})
            more = f" (it ended with {_last_words(last)})" if last else ""
            words = f"Pod {name}, container {one['name']}: {waits.get('message') or waits['reason']}{more}"
            return Trouble(waits["reason"], words)
    return None


def _starting(pod: Manifest) -> tuple[str, float] | None:
    """The name of a pod that a kubelet has taken, and that does not run yet, without a word, and when that was."""
    found = pod.get("status", {})
    starts = found.get("phase") == "Pending" and "startTime" in found and "deletionTimestamp" not in pod["metadata"]
    if not starts or trouble_of(pod) is not None:
        return None
    return pod["metadata"]["name"], seconds_of(found["startTime"])


def _daemon_ended(body: Manifest) -> bool:
    found = body.get("status", {}).get("containerStatuses") or []
    return any(one["name"] == CONTAINER and "terminated" in one.get("state", {}) for one in found)


def _end(body: Manifest) -> str:
    """Says how the daemon of a pod has ended; empty: it has not, or nobody says."""
    found = body.get("status", {})
    words = [": ".join(part for part in (found.get("reason"), found.get("message")) if part)]
    for one in found.get("containerStatuses") or []:
        if one["name"] == CONTAINER and (over := one.get("state", {}).get("terminated")):
            words.append(_last_words(over))
    return ", ".join(part for part in words if part)


def _last_words(over: Manifest) -> str:
    """Says how a container has ended, with the last line of what it, or who should have started it, has said."""
    words = f"{over.get('reason') or 'its daemon ended'} (exit code {over.get('exitCode')})"
    said = str(over.get("message") or "").split("\n")
    return ": ".join([words, *[line.strip() for line in said if line.strip()][-1:]])


def _happened(event: Manifest) -> float:
    when = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp")
    return seconds_of(when) if when else 0.0
