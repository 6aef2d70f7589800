"""A real Kubernetes control plane for tests: etcd, API server and controllers on loopback, without kubelets
(``kubelet`` plays them). Programs come from the folder KUBEBUILDER_ASSETS, else from PATH."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx

from rig.ports import free_ports

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager")
START_S = 240.0
TOKEN, OPERATOR_TOKEN = "t0ken", "0perator"
OPERATOR = "system:serviceaccount:bagua-system:bagua-operator"
"""The user that deploy/kubernetes/base/rbac.yaml gives rights to."""


def program(name):
    """Path of a program; None: this machine has none."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    if folder and (Path(folder) / name).is_file():
        return str(Path(folder) / name)
    return shutil.which(name)


def missing():
    """Why there can be no control plane here; empty: there can."""
    absent = [name for name in (*PROGRAMS, "openssl") if program(name) is None]
    return f"no {', '.join(absent)} in KUBEBUILDER_ASSETS or PATH" if absent else ""


class ControlPlane:
    """``start`` returns when the API answers."""

    def __init__(self, folder):
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"
        self.operator_kubeconfig = folder / "kubeconfig.operator"
        self._processes = []
        self._ports = free_ports(4)

    def start(self):
        """Raises AssertionError, with the log, if it does not come."""
        api, clients, peers, controllers = self._ports
        certs = self.folder / "certs"
        certs.mkdir(parents=True)
        key = certs / "sa.key"
        subprocess.run([str(program("openssl")), "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        users = f"{TOKEN},admin,admin,system:masters\n{OPERATOR_TOKEN},{OPERATOR},{OPERATOR}\n"
        (self.folder / "tokens.csv").write_text(users)
        first, second = f"http://127.0.0.1:{clients}", f"http://127.0.0.1:{peers}"
        self._run(
            *("etcd", "--data-dir", str(self.folder / "etcd"), "--listen-client-urls", first),
            *("--advertise-client-urls", first, "--listen-peer-urls", second, "--unsafe-no-fsync=true"),
            *("--initial-advertise-peer-urls", second, "--initial-cluster", f"default={second}"),
        )
        self._run(
            *("kube-apiserver", "--etcd-servers", first, "--cert-dir", str(certs), "--secure-port", str(api)),
            *("--bind-address", "127.0.0.1", "--service-account-issuer", "https://k.local"),
            *("--service-account-key-file", str(key), "--service-account-signing-key-file", str(key)),
            *("--token-auth-file", str(self.folder / "tokens.csv"), "--authorization-mode", "RBAC"),
            *("--service-cluster-ip-range", "10.0.0.0/24", "--disable-admission-plugins", "ServiceAccount"),
        )
        for path, token in ((self.kubeconfig, TOKEN), (self.operator_kubeconfig, OPERATOR_TOKEN)):
            self._write_kubeconfig(path, token, api, certs / "apiserver.crt")
        self._wait_until_ready(certs / "apiserver.crt", api)
        wanted = "garbagecollector,namespace,replicaset,deployment,statefulset,endpoint,disruption,pvc-protection"
        arguments = ["kube-controller-manager", "--kubeconfig", str(self.kubeconfig), "--leader-elect=false"]
        arguments += ["--controllers", wanted, "--secure-port", str(controllers), "--bind-address", "127.0.0.1"]
        arguments += ["--service-account-private-key-file", str(key), "--use-service-account-credentials=false"]
        if self.version() < (1, 24):
            arguments += ["--port", "0"]
        self._run(*arguments)

    def version(self):
        """Of the API server."""
        text = subprocess.run([str(program("kube-apiserver")), "--version"], check=True, capture_output=True, text=True)
        found = re.search(r"v(\d+)\.(\d+)", text.stdout)
        assert found, text.stdout
        return int(found[1]), int(found[2])

    def api(self):
        return httpx.Client(
            base_url=f"https://127.0.0.1:{self._ports[0]}",
            verify=_trust(self.folder / "certs" / "apiserver.crt"),
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=120.0,
        )

    def stop(self):
        """Ends what was started, the last first."""
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM if process is not self._processes[0] else signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait(10)

    def _run(self, name, *arguments):
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [str(program(name)), *arguments]
            self._processes.append(
                subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder)
            )

    def _write_kubeconfig(self, path, token, port, authority):
        path.write_text(
            f"""apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "https://127.0.0.1:{port}", certificate-authority: {authority}}}}}]
users: [{{name: u, user: {{token: {token}}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""
        )

    def _wait_until_ready(self, authority, port):
        deadline = time.monotonic() + START_S
        while True:
            for process in self._processes:
                assert process.poll() is None, self._logs()
            if authority.is_file():
                with contextlib.suppress(httpx.HTTPError, OSError), self.api() as client:
                    if client.get("/readyz").status_code == 200:
                        return
            assert time.monotonic() < deadline, self._logs()
            time.sleep(0.2)

    def _logs(self):
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))


def _trust(authority):
    import ssl

    return ssl.create_default_context(cafile=str(authority))
