"""A small kubelet for tests: runs each pod's first container as a process, with its environment, Secrets and folders.

A pod has an address of its own (127.x.y.z), and a mount namespace in which its volumes lie where the pod mounts them
below /var/lib, and in which /etc/hosts knows the pods and headless Services, as the cluster's DNS would. Limits,
probes, init containers and all other mounts are left out, and of images there are their programs alone (``IMAGES``).
A service account is a kubeconfig (``accounts``), not a folder. Nothing is served: no logs, no commands in pods.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

TICK_S = 0.1
SECRETS_S = 1.0
"""Between two looks at the Secrets of pods that run. Real kubelets take a minute or more."""
MOUNTS = "/var/lib"
SCRIPT = """
set -e
mount --bind "$POD_HOSTS" /etc/hosts
mount -t tmpfs tmpfs /var/lib
while read -r source target; do mkdir -p "$target"; mount --bind "$source" "$target"; done < "$POD_MOUNTS"
unset POD_HOSTS POD_MOUNTS
exec "$@"
"""

IMAGES = {
    "postgres": """
bin=$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | tail -1)
PATH="$PATH:$bin"
as=
if [ "$(id -u)" = 0 ]; then
    as="setpriv --reuid=postgres --regid=postgres --clear-groups"
    chown postgres "$(dirname "$PGDATA")"
fi
if [ ! -f "$PGDATA/made" ]; then
    password=$(dirname "$PGDATA")/password
    echo "$POSTGRES_PASSWORD" > "$password"
    chmod 644 "$password"
    $as initdb -D "$PGDATA" -U "$POSTGRES_USER" -A scram-sha-256 --pwfile "$password" -E UTF8 --locale C --no-sync
    echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
    echo "CREATE DATABASE $POSTGRES_DB" | $as postgres --single -D "$PGDATA" postgres
    touch "$PGDATA/made"
fi
$as postgres -D "$PGDATA" -c listen_addresses="$0" -c unix_socket_directories= -c fsync=off &
trap "kill -INT $!" TERM  # the image's STOPSIGNAL: clients are not waited for
wait $! || wait $!
"""
}
"""Shell programs in place of those that images run where a pod has no command of its own; $0 is the pod's address."""


def missing():
    """Why pods can't run here; empty: they can."""
    if not shutil.which("unshare"):
        return "no unshare (util-linux)"
    done = subprocess.run([*unshared(), "true"], capture_output=True, text=True)
    return f"mount namespaces can't be made here: {done.stderr.strip()}" if done.returncode else ""


def unshared():
    """The beginning of a command in a mount namespace of its own."""
    return ["unshare", "--mount", "--propagation", "private", *([] if os.geteuid() == 0 else ["--map-root-user"])]


@dataclass
class Running:
    """A pod's process."""

    process: subprocess.Popen[bytes]
    folder: Path
    address: str
    ends_at: float = 0.0  # monotonic
    grace: float | None = None  # None: nobody has asked for its end
    told: bool = False
    secrets: dict[str, Path] = field(default_factory=dict)


class Kubelet(threading.Thread):
    """Serves all pods of a cluster on ``machines``, which it registers. ``capacity``: pods of daemons that may run at
    once; more stay unplaced."""

    def __init__(self, api, folder, accounts=None, machines=2, capacity=100):
        super().__init__(name="kubelet", daemon=True)
        self.api = api
        self.folder = folder
        self.accounts = accounts or {}
        self.machines = [f"machine-{number}" for number in range(machines)]
        self.capacity = capacity
        self.hosts = folder / "hosts"
        self.running = {}
        self.errors = []
        self._over = threading.Event()
        self._net = secrets.randbelow(90) + 30
        self._next = 1
        self._secrets_at = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        self.hosts.write_text("127.0.0.1 localhost\n")
        reached = {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}]}
        for name in self.machines:
            body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": reached}
            self.api.post("/api/v1/nodes", json=body).raise_for_status()
            self.taint(name)  # none: the API server gives new ones a taint, until a kubelet says that it is ready

    def run(self):
        while not self._over.wait(TICK_S):
            try:
                self._tick()
            except httpx.HTTPError as error:
                self.errors.append(f"{type(error).__name__}: {error}")

    def close(self):
        """Kills what runs."""
        self._over.set()
        self.join(30)
        for one in self.running.values():
            _kill(one.process)

    def taint(self, machine, key=""):
        """Gives a machine this taint alone; empty: none."""
        taints = [{"key": key, "effect": "NoSchedule"}] if key else None
        headers = {"Content-Type": "application/merge-patch+json"}
        content = json.dumps({"spec": {"taints": taints}})
        self.api.patch(f"/api/v1/nodes/{machine}", content=content, headers=headers).raise_for_status()

    def log(self, name):
        """The output of the newest pod of this name."""
        found = sorted(self.folder.glob(f"{name}.*/log"), key=lambda path: path.stat().st_mtime)
        return found[-1].read_text(errors="replace") if found else ""

    def pid(self, name):
        """The process of the pod of this name. Raises LookupError if none runs."""
        found = [one for one in self.running.values() if one.folder.name.startswith(f"{name}.")]
        if not found:
            raise LookupError(name)
        return found[-1].process.pid

    def logs(self):
        """The end of all outputs."""
        texts = [
            f"--- {path.parent.name}\n{path.read_text(errors='replace')[-3000:]}" for path in self.folder.glob("*/log")
        ]
        return "\n".join([*texts, *self.errors[-5:]])

    # ---- one look at all pods

    def _tick(self):
        pods = self.api.get("/api/v1/pods").raise_for_status().json()["items"]
        present = {pod["metadata"]["uid"] for pod in pods}
        for uid in [uid for uid in self.running if uid not in present]:
            _kill(self.running.pop(uid).process)
        secrets_too = time.monotonic() >= self._secrets_at
        if secrets_too:
            self._secrets_at = time.monotonic() + SECRETS_S
        for pod in pods:
            self._serve(pod, secrets_too)
        self._write_hosts(pods)

    def _serve(self, pod, secrets_too):
        metadata, uid = pod["metadata"], pod["metadata"]["uid"]
        one = self.running.get(uid)
        if one is None:
            if "deletionTimestamp" in metadata:
                self._forget(pod)
            elif pod["status"].get("phase") == "Pending":
                self._place_or_start(pod)
            return
        for name, folder in one.secrets.items() if secrets_too else ():
            self._write_secret(metadata["namespace"], name, folder, pod)
        code = one.process.poll()
        if "deletionTimestamp" in metadata:
            grace = metadata.get("deletionGracePeriodSeconds", 30)
            if one.grace is None:
                with contextlib.suppress(ProcessLookupError):
                    one.process.send_signal(signal.SIGTERM)
            if one.grace is None or grace < one.grace:  # a second deletion may give less time, never more
                one.ends_at, one.grace = time.monotonic() + grace, grace
            if code is not None or time.monotonic() > one.ends_at:
                _kill(one.process)
                del self.running[uid]
                self._forget(pod)
        elif code is not None and not one.told:
            one.told = True
            self._ended(pod, code)

    def _place_or_start(self, pod):
        if not pod["spec"].get("nodeName"):
            if len(self.running) < self.capacity:
                self._bind(pod)
            return
        with contextlib.suppress(LookupError):  # a Secret that is not there yet
            self._start(pod)

    def _bind(self, pod):
        metadata = pod["metadata"]
        nodes = self.api.get("/api/v1/nodes").raise_for_status().json()["items"]
        free = [one["metadata"]["name"] for one in nodes if not one["spec"].get("taints")]
        if not free:
            return
        target = {"apiVersion": "v1", "kind": "Node", "name": free[len(self.running) % len(free)]}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": metadata["name"]}, "target": target}
        self.api.post(f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/binding", json=body)

    def _start(self, pod):
        metadata, container = pod["metadata"], pod["spec"]["containers"][0]
        folder = self.folder / f"{metadata['name']}.{metadata['uid'][:8]}"
        folder.mkdir(exist_ok=True)
        address = f"127.{self._net}.{self._next // 250}.{self._next % 250 + 1}"
        volumes, written = self._volumes(pod, folder)
        mounts = [
            f"{volumes[mount['name']]} {mount['mountPath']}\n"
            for mount in container.get("volumeMounts", [])
            if mount["name"] in volumes and mount["mountPath"].startswith(MOUNTS)
        ]
        self._next += 1
        (folder / "mounts").write_text("".join(mounts))
        pod["status"]["podIP"] = address
        given = {}
        for one in container.get("envFrom", []):
            for kind, plural in (("secretRef", "secrets"), ("configMapRef", "configmaps")):
                found = self._data(pod, plural, one[kind]["name"]) if kind in one else {}
                given |= {one.get("prefix", "") + key: value for key, value in found.items()}
        given |= {one["name"]: self._value(pod, one) for one in container.get("env", [])}
        # The programs of the image: this interpreter's, and the core that was built for it.
        base = {name: value for name, value in os.environ.items() if not name.startswith("BAGUA_") and name != "HOME"}
        base["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        if account := self.accounts.get(pod["spec"].get("serviceAccountName", "")):
            given["KUBECONFIG"] = str(account)
        given["BAGUA_CACHE_DIR"] = os.environ.get("BAGUA_CACHE_DIR") or str(Path.home() / ".cache" / "bagua")
        self._write_status(pod, {"podIP": address, "hostIP": "127.0.0.1", "phase": "Pending"})
        self._write_hosts([pod], more=True)
        command = [_expand(part, given) for part in (*container.get("command", []), *container.get("args", []))]
        command = command or ["bash", "-ec", IMAGES[container["image"].partition(":")[0]], address]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*unshared(), "bash", "-c", SCRIPT, "pod", *command],
                env={**base, **given, "POD_HOSTS": str(self.hosts), "POD_MOUNTS": str(folder / "mounts")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.running[metadata["uid"]] = Running(process, folder, address, secrets=written)
        ready = {"type": "Ready", "status": "True"}
        self._write_status(pod, {"phase": "Running", "podIP": address, "conditions": [ready]})

    def _volumes(self, pod, folder):
        """(folders by the names of volumes, folders of Secrets by their names). A claim's folder outlives pods. Raises
        LookupError for a Secret or a claim that there is not."""
        volumes = {}
        written = {}
        for volume in pod["spec"].get("volumes", []):
            place = folder / volume["name"]
            if "persistentVolumeClaim" in volume:
                place = self._claim(pod["metadata"]["namespace"], volume["persistentVolumeClaim"]["claimName"])
            place.mkdir(exist_ok=True)
            volumes[volume["name"]] = place
            if "secret" in volume:
                written[volume["secret"]["secretName"]] = place
                if not self._write_secret(pod["metadata"]["namespace"], volume["secret"]["secretName"], place, pod):
                    raise LookupError(volume["secret"]["secretName"])
        return volumes, written

    def _claim(self, namespace, name):
        """One that was made again has another volume."""
        answer = self.api.get(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}")
        if answer.status_code != 200:
            raise LookupError(name)
        return self.folder / f"claim.{name}.{answer.json()['metadata']['uid'][:8]}"

    def _write_secret(self, namespace, name, folder, pod):
        answer = self.api.get(f"/api/v1/namespaces/{namespace}/secrets/{name}")
        if answer.status_code != 200:
            return False
        volume = next(one for one in pod["spec"]["volumes"] if one.get("secret", {}).get("secretName") == name)
        data = answer.json().get("data", {})
        items = volume["secret"].get("items") or [{"key": key, "path": key} for key in data]
        for item in items:
            path, value = folder / item["path"], base64.b64decode(data[item["key"]])
            if not path.is_file() or path.read_bytes() != value:
                path.with_suffix(".new").write_bytes(value)
                path.with_suffix(".new").chmod(0o400)
                path.with_suffix(".new").replace(path)
        return True

    def _value(self, pod, variable):
        source = variable.get("valueFrom")
        if source is None:
            return str(variable.get("value", ""))
        for kind, plural in (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps")):
            if kind in source:
                return self._data(pod, plural, source[kind]["name"])[source[kind]["key"]]
        part = pod
        for name in source["fieldRef"]["fieldPath"].split("."):
            part = part[name]
        return str(part)

    def _data(self, pod, plural, name):
        """What is in a Secret or a ConfigMap. Raises LookupError."""
        answer = self.api.get(f"/api/v1/namespaces/{pod['metadata']['namespace']}/{plural}/{name}")
        if answer.status_code != 200:
            raise LookupError(name)
        data = answer.json().get("data", {})
        return data if plural == "configmaps" else {key: base64.b64decode(one).decode() for key, one in data.items()}

    def _ended(self, pod, code):
        metadata, name = pod["metadata"], pod["spec"]["containers"][0]["name"]
        if pod["spec"]["restartPolicy"] == "Always":
            self.running.pop(metadata["uid"])
            with contextlib.suppress(LookupError):  # all of the job goes
                self._start(pod)
            return
        state = {"terminated": {"exitCode": code % 256}}
        container = {"name": name, "state": state, "ready": False, "restartCount": 0, "image": "", "imageID": ""}
        self._write_status(pod, {"phase": "Failed" if code else "Succeeded", "containerStatuses": [container]})

    def _forget(self, pod):
        metadata = pod["metadata"]
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        self.api.request("DELETE", path, content=json.dumps(body), headers={"Content-Type": "application/json"})

    def _write_status(self, pod, status):
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
        headers = {"Content-Type": "application/merge-patch+json"}
        self.api.patch(path, content=json.dumps({"status": status}), headers=headers)

    def _write_hosts(self, pods, more=False):
        """In place: pods have mounted this very file."""
        lines = [] if more else ["127.0.0.1 localhost\n"]
        for pod in pods:
            address, name, spec = pod["status"].get("podIP"), pod["metadata"]["name"], pod["spec"]
            if address and pod["status"].get("phase") not in ("Failed", "Succeeded"):
                service = spec.get("subdomain", "")
                names = f"{service} {service}.{pod['metadata']['namespace']}.svc" if service else ""
                lines.append(f"{address} {name} {names}\n")
        text = (self.hosts.read_text() if more else "") + "".join(lines)
        if text != self.hosts.read_text():
            with self.hosts.open("r+") as file:
                file.write(text)
                file.truncate()


def _expand(text, variables):
    for name, value in variables.items():
        text = text.replace(f"$({name})", value)
    return text


def _kill(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
