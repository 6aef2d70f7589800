"""Manifests of the objects of a BaguaJob, the pods of its daemons apart (``pods``).

<job>-coordinator    StatefulSet of one pod, headless Service, volume, NetworkPolicy
<job>-token, -tls, -authority    Secrets; the last holds the authority's key, and no pod sees it
<job>                PodDisruptionBudget and NetworkPolicy of the daemons; PodGroup of Volcano
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from bagua.operator.facts import CREDENTIALS, HASH, JOB_LABEL, ROLE_LABEL, Manifest, Seen
from bagua.operator.job import GROUP, KIND, VERSION, Spec
from bagua.operator.settings import Settings

PORT = 7670
METRICS_PORT = 9670
SCRAPES = {f"{GROUP}/metrics": "true"}  # label of the namespaces whose pods may read metrics
FOLDER = "/var/lib/bagua"  # Everything that a pod of ours mounts lies there, but /tmp and /dev/shm
USER = 10001
SECURITY: Manifest = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Manifest = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def labels(seen: Seen, role: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "bagua", JOB_LABEL: seen.name, ROLE_LABEL: role}


def owner(seen: Seen) -> Manifest:
    """The BaguaJob as the owner: what it owns goes with it."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": seen.name,
        "uid": seen.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def stamped(manifest: Manifest) -> Manifest:
    """The manifest with its own hash as an annotation: the same again is not written again."""
    text = json.dumps(manifest, sort_keys=True).encode()
    mark = hashlib.sha256(text).hexdigest()[:16]
    metadata = manifest["metadata"]
    return {
        **manifest,
        "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), HASH: mark}},
    }


def hash_of(manifest: Manifest) -> str:
    """The hash that ``stamped`` wrote."""
    return str(manifest["metadata"].get("annotations", {}).get(HASH, ""))


def service_name(seen: Seen) -> str:
    """The name by which pods and the operator reach the coordinator."""
    return f"{seen.name}-coordinator.{seen.namespace}.svc"


def certificate_names(seen: Seen) -> list[str]:
    service = f"{seen.name}-coordinator"
    return [f"{service}.{seen.namespace}.svc", f"{service}-0.{service}.{seen.namespace}.svc", service, f"{service}-0"]


def infrastructure(seen: Seen, spec: Spec, credentials: str, running: bool) -> list[Manifest]:
    """Makes all objects but certificates, Secrets and pods. ``credentials``: mark of those that the coordinator should
    run with. ``running``: false for a job that has ended, or gave its pods back.
    """
    made = [
        _service(seen),
        _coordinator_network(seen),
        _daemon_network(seen),
        _coordinator(seen, spec, credentials, running),
        _budget(seen, spec),
    ]
    if spec.coordinator.database is None and not spec.coordinator.ephemeral:
        made.insert(0, _volume(seen, spec))
    return [stamped(one) for one in made]


def _object(seen: Seen, api: str, kind: str, name: str, role: str, spec: Manifest) -> Manifest:
    metadata = {
        "name": name,
        "namespace": seen.namespace,
        "labels": labels(seen, role),
        "ownerReferences": [owner(seen)],
    }
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


def _service(seen: Seen) -> Manifest:
    spec = {
        "clusterIP": "None",  # a refused connection must come from the coordinator's own host: no proxy in between
        # Daemons wait for a name that resolves; an unknown host looks like a typing error.
        "publishNotReadyAddresses": True,
        "selector": labels(seen, "coordinator"),
        "ports": [
            {"name": name, "port": port, "targetPort": port, "protocol": "TCP"}
            for name, port in (("grpc", PORT), ("metrics", METRICS_PORT))
        ],
    }
    return _object(seen, "v1", "Service", f"{seen.name}-coordinator", "coordinator", spec)


def _volume(seen: Seen, spec: Spec) -> Manifest:
    claim: Manifest = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": spec.coordinator.storage}},
    }
    if spec.coordinator.storage_class:
        claim["storageClassName"] = spec.coordinator.storage_class
    return _object(seen, "v1", "PersistentVolumeClaim", f"{seen.name}-coordinator", "coordinator", claim)


def secret_volumes(seen: Seen) -> tuple[list[Manifest], list[Manifest]]:
    """Returns (volumes, mounts) of the token and the certificate, under the names that --tls DIR expects."""
    files = [("ca.crt", "ca.pem"), ("tls.crt", "cert.pem"), ("tls.key", "key.pem")]
    items = [{"key": key, "path": path} for key, path in files]
    volumes = [
        {"name": "bagua-token", "secret": {"secretName": f"{seen.name}-token", "defaultMode": 0o400}},
        {"name": "bagua-tls", "secret": {"secretName": f"{seen.name}-tls", "defaultMode": 0o400, "items": items}},
    ]
    mounts = [
        {"name": "bagua-token", "mountPath": f"{FOLDER}/token", "readOnly": True},
        {"name": "bagua-tls", "mountPath": f"{FOLDER}/tls", "readOnly": True},
    ]
    return volumes, mounts


def field_env(name: str, path: str) -> Manifest:
    """A variable with a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def plain_env(**values: str) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _coordinator(seen: Seen, spec: Spec, credentials: str, running: bool) -> Manifest:
    wanted = spec.coordinator
    volumes, mounts = secret_volumes(seen)
    data = (
        {"name": "data", "emptyDir": {}}
        if wanted.ephemeral or wanted.database
        else {"name": "data", "persistentVolumeClaim": {"claimName": f"{seen.name}-coordinator"}}
    )
    command = ["bagua", "coordinator", "--listen", f"$(POD_NAME):{PORT}", "--state-dir", f"{FOLDER}/data/state"]
    command += ["--tls", f"{FOLDER}/tls", "--token-file", f"{FOLDER}/token/token"]
    command += ["--fence-after", str(wanted.fence_after_seconds), "--keep", "30d,100"]
    environment = [
        field_env("POD_NAME", "metadata.name"),
        *plain_env(
            BAGUA_COORDINATOR_METRICS_PLAIN="true",  # Prometheus has no job's certificate; a policy protects the port
            BAGUA_COORDINATOR_METRICS_PORT=str(METRICS_PORT),
            HOME=f"{FOLDER}/data",  # the root file system is read-only
            PYTHONSAFEPATH="1",
        ),
    ]
    if wanted.database is not None:
        reference = {"secretKeyRef": {"name": wanted.database.secret_name, "key": wanted.database.key}}
        environment.append({"name": "BAGUA_COORDINATOR_DATABASE_URL", "valueFrom": reference})
    container: dict[str, Any] = {
        "name": "coordinator",
        "image": wanted.image or spec.image,
        "command": command,
        "env": environment,
        "ports": [
            {"name": "grpc", "containerPort": PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"},
        ],
        # Kubernetes' own gRPC probe speaks no TLS
        "readinessProbe": {"tcpSocket": {"port": "grpc"}, "periodSeconds": 5},
        "resources": wanted.resources or {"requests": {"cpu": "100m", "memory": "128Mi"}},
        "securityContext": CONTAINER_SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            *mounts,
            {"name": "data", "mountPath": f"{FOLDER}/data"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    if spec.image_pull_policy:
        container["imagePullPolicy"] = spec.image_pull_policy
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,  # it never calls the Kubernetes API
        "enableServiceLinks": False,  # a Service bagua-coordinator would set BAGUA_COORDINATOR_PORT, and others like it
        "securityContext": SECURITY,
        "terminationGracePeriodSeconds": 30,
        "containers": [container],
        "volumes": [*volumes, data, {"name": "tmp", "emptyDir": {}}],
    }
    for key in ("imagePullSecrets", "tolerations", "nodeSelector"):
        if key in spec.template.get("spec", {}):
            pod[key] = spec.template["spec"][key]
    if spec.run_policy.scheduling_policy.priority_class:
        pod["priorityClassName"] = spec.run_policy.scheduling_policy.priority_class
    metadata = {"labels": labels(seen, "coordinator"), "annotations": {CREDENTIALS: credentials}}
    whole = {
        "serviceName": f"{seen.name}-coordinator",
        "replicas": 1 if running else 0,
        # Else a pod that never gets ready, as by a wrong image, blocks its own update.
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels(seen, "coordinator")},
        "template": {"metadata": metadata, "spec": pod},
    }
    return _object(seen, "apps/v1", "StatefulSet", f"{seen.name}-coordinator", "coordinator", whole)


def _budget(seen: Seen, spec: Spec) -> Manifest:
    """Voluntary evictions leave the minimum of an elastic job, and nothing of a static one."""
    rule = {"minAvailable": spec.minimum, "selector": {"matchLabels": labels(seen, "daemon")}}
    return _object(seen, "policy/v1", "PodDisruptionBudget", seen.name, "daemon", rule)


def _of_job(seen: Seen) -> Manifest:
    return {"podSelector": {"matchLabels": {JOB_LABEL: seen.name}}}


def _coordinator_network(seen: Seen) -> Manifest:
    """Lets the job's own pods and the operator reach the coordinator, and Prometheus its metrics."""
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}}}
    spec = {
        "podSelector": {"matchLabels": labels(seen, "coordinator")},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [_of_job(seen), operator], "ports": [{"port": PORT, "protocol": "TCP"}]},
            {
                "from": [{"namespaceSelector": {"matchLabels": SCRAPES}}],
                "ports": [{"port": METRICS_PORT, "protocol": "TCP"}],
            },
        ],
    }
    return _object(seen, "networking.k8s.io/v1", "NetworkPolicy", f"{seen.name}-coordinator", "coordinator", spec)


def _daemon_network(seen: Seen) -> Manifest:
    """Daemons and ranks are reached by the job's own pods, at any port: NCCL and gloo choose theirs."""
    spec = {
        "podSelector": {"matchLabels": labels(seen, "daemon")},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [_of_job(seen)]}],
    }
    return _object(seen, "networking.k8s.io/v1", "NetworkPolicy", seen.name, "daemon", spec)


def certificate(seen: Seen, settings: Settings) -> Manifest:
    """cert-manager makes the Secret with the certificate."""
    kind, _, name = settings.issuer.partition("/")
    spec = {
        "secretName": f"{seen.name}-tls",
        "commonName": "bagua",
        "dnsNames": [*certificate_names(seen), "localhost"],
        "ipAddresses": ["127.0.0.1"],
        # One certificate for both ends of all connections.
        "usages": ["digital signature", "server auth", "client auth"],
        "privateKey": {"algorithm": "ECDSA", "size": 256, "encoding": "PKCS8", "rotationPolicy": "Always"},
        "issuerRef": {"group": "cert-manager.io", "kind": kind, "name": name},
    }
    return stamped(_object(seen, "cert-manager.io/v1", "Certificate", f"{seen.name}-tls", "coordinator", spec))


def volcano_group(seen: Seen, spec: Spec) -> Manifest:
    """Volcano places all of the minimum, or none."""
    policy = spec.run_policy.scheduling_policy
    wanted: Manifest = {"minMember": spec.minimum}
    if policy.queue:
        wanted["queue"] = policy.queue
    if policy.priority_class:
        wanted["priorityClassName"] = policy.priority_class
    return stamped(_object(seen, "scheduling.volcano.sh/v1beta1", "PodGroup", seen.name, "daemon", wanted))
