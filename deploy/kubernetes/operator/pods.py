"""Manifest of the pod of a node daemon."""

from __future__ import annotations

from typing import Any

from bagua.operator import objects
from bagua.operator.facts import HASH, INDEX_LABEL, Manifest, Seen
from bagua.operator.job import CONTAINER, GangScheduler, Spec
from bagua.operator.objects import FOLDER, PORT

SECRETS = f"{FOLDER}/secrets"
KUEUE = "kueue.x-k8s.io"
DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
VOLCANO = "scheduling.volcano.sh"


def gang_scheduler(seen: Seen, spec: Spec) -> GangScheduler:
    """The program that places the pods of this job together."""
    policy = spec.run_policy.scheduling_policy
    if policy.gang_scheduler is not GangScheduler.AUTO:
        return policy.gang_scheduler
    if policy.queue and KUEUE in seen.api_groups:
        return GangScheduler.KUEUE
    return GangScheduler.VOLCANO if VOLCANO in seen.api_groups else GangScheduler.OPERATOR


def pod_name(seen: Seen, index: int) -> str:
    """The pod's name, which is its node's id."""
    return f"{seen.name}-{index}"


def pod(seen: Seen, spec: Spec, index: int, attempt: int, grouped: bool) -> Manifest:
    """A pod for one node daemon. Its annotation HASH tells pods of another specification. ``grouped``: it is one of the
    minimum, which is placed together."""
    template = spec.template
    inner = dict(template.get("spec", {}))
    given: Manifest = spec.daemon
    others = [one for one in inner.get("containers", []) if one.get("name") != CONTAINER]
    volumes, mounts = _volumes(seen, spec)
    container = _container(spec, mounts, given)
    # Kubernetes takes the last of equal names.
    container["env"] = [*_environment(seen, spec), *_sourced(spec), *given.get("env", [])]
    made = {
        "restartPolicy": "Never",  # a daemon that comes back in the same pod has lost its ranks: a new pod is as good
        "automountServiceAccountToken": False,  # programs of users run here
        "enableServiceLinks": False,  # they would add variables that begin with BAGUA_COORDINATOR_ (see objects)
        # Drain, then stop of ranks, then the daemon's own end.
        "terminationGracePeriodSeconds": spec.run_policy.drain_grace_seconds + spec.run_policy.stop_grace_seconds + 30,
        **inner,  # the template changes what stands above; what follows is joined with its own
        "securityContext": {**objects.SECURITY, **inner.get("securityContext", {})},
        "containers": [container, *others],
        "volumes": [*volumes, *inner.get("volumes", [])],
    }
    metadata = template.get("metadata", {})
    policy = spec.run_policy.scheduling_policy
    if policy.priority_class:
        made["priorityClassName"] = policy.priority_class
    manifest: Manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": seen.namespace,
            "labels": {**metadata.get("labels", {}), **objects.labels(seen, "daemon")},
            "annotations": {DEFAULT_CONTAINER: CONTAINER, **metadata.get("annotations", {})},
            "ownerReferences": [objects.owner(seen)],
        },
        "spec": made,
    }
    mark = objects.hash_of(objects.stamped(manifest))  # the same for all pods of the job
    manifest["metadata"]["name"] = pod_name(seen, index)
    manifest["metadata"]["labels"][INDEX_LABEL] = str(index)
    manifest["metadata"]["annotations"][HASH] = mark
    _group(manifest, seen, spec, attempt, grouped)
    return manifest


def wanted_hash(seen: Seen, spec: Spec) -> str:
    """The hash of a pod of this specification."""
    return objects.hash_of(pod(seen, spec, 0, 0, False))


def secret_files(spec: Spec) -> dict[str, str]:
    """Name of a secret variable -> the file in which a pod has its value."""
    return {one.name: f"{SECRETS}/{one.name}/{one.key}" for one in spec.run.secret_env}


def _container(spec: Spec, mounts: list[Manifest], given: Manifest) -> dict[str, Any]:
    # Pods have no names in DNS, so peers get the address.
    command = ["bagua", "daemon", "--name", "$(POD_NAME)", "--node-id", "$(POD_NAME)", "--data-host", "$(POD_IP)"]
    command += ["--slots", str(spec.ranks), "--drain-grace", str(spec.run_policy.drain_grace_seconds)]
    made: dict[str, Any] = {
        "image": spec.image,
        "command": command,
        "resources": spec.resources,
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the status says how it ended
        **given,
        "name": CONTAINER,
        "securityContext": {**objects.CONTAINER_SECURITY, **given.get("securityContext", {})},
        "volumeMounts": [*mounts, *given.get("volumeMounts", [])],
    }
    if spec.image_pull_policy:
        made["imagePullPolicy"] = spec.image_pull_policy
    return made


def _environment(seen: Seen, spec: Spec) -> list[Manifest]:
    home = f"{FOLDER}/home"
    return [
        objects.field_env("POD_NAME", "metadata.name"),
        objects.field_env("POD_IP", "status.podIP"),
        *objects.plain_env(
            BAGUA_CACHE_DIR=f"{home}/cache",  # the image's own can't be written
            BAGUA_ECHO="1",  # for `kubectl logs`
            BAGUA_PASS_ENV="*",  # what the image, ``env`` and ``envFrom`` say is for the program
            BAGUA_COORDINATOR=f"{objects.service_name(seen)}:{PORT}",
            BAGUA_STATE_DIR=f"{home}/state",
            BAGUA_TLS=f"{FOLDER}/tls",
            BAGUA_TOKEN_FILE=f"{FOLDER}/token/token",
            HOME=home,
            PYTHONSAFEPATH="1",
        ),
    ]


def _sourced(spec: Spec) -> list[Manifest]:
    """Variables of ranks whose values the kubelet finds; daemons pass them on."""
    given = [one for one in spec.run.env if one.value_from is not None]
    return [one.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"value"}) for one in given]


def _volumes(seen: Seen, spec: Spec) -> tuple[list[Manifest], list[Manifest]]:
    volumes, mounts = objects.secret_volumes(seen)
    volumes += [
        {"name": "bagua-home", "emptyDir": {}},
        {"name": "bagua-tmp", "emptyDir": {}},
        # Containers have 64 MB there by default.
        {"name": "bagua-shm", "emptyDir": {"medium": "Memory", "sizeLimit": spec.shared_memory}},
    ]
    mounts += [
        {"name": "bagua-home", "mountPath": f"{FOLDER}/home"},
        {"name": "bagua-tmp", "mountPath": "/tmp"},
        {"name": "bagua-shm", "mountPath": "/dev/shm"},
    ]
    for number, one in enumerate(spec.run.secret_env):
        source = {
            "secretName": one.secret_name,
            "defaultMode": 0o400,
            "items": [{"key": one.key, "path": one.key}],
        }
        volumes.append({"name": f"bagua-secret-{number}", "secret": source})
        mounts.append({"name": f"bagua-secret-{number}", "mountPath": f"{SECRETS}/{one.name}", "readOnly": True})
    return volumes, mounts


def _group(manifest: Manifest, seen: Seen, spec: Spec, attempt: int, grouped: bool) -> None:
    """Marks a pod for the scheduler that places the minimum together."""
    scheduler, policy = gang_scheduler(seen, spec), spec.run_policy.scheduling_policy
    metadata = manifest["metadata"]
    if scheduler is GangScheduler.KUEUE:
        if policy.queue:
            metadata["labels"][f"{KUEUE}/queue-name"] = policy.queue
        if policy.workload_priority_class:
            metadata["labels"][f"{KUEUE}/priority-class"] = policy.workload_priority_class
        if grouped:  # pods that come later are admitted one by one
            metadata["labels"][f"{KUEUE}/pod-group-name"] = f"{seen.name}-{attempt}"
            metadata["annotations"][f"{KUEUE}/pod-group-total-count"] = str(spec.minimum)
    if scheduler is GangScheduler.VOLCANO:
        metadata["annotations"]["scheduling.k8s.io/group-name"] = seen.name
        manifest["spec"]["schedulerName"] = "volcano"
