"""Serves logs of containers, and runs commands in them, as kubelets do for ``kubectl logs`` and ``kubectl exec``.

Commands come as a WebSocket (v5.channel.k8s.io): each message begins with the number of its stream. Clients older than
kubectl 1.31 speak SPDY, which is not served here.
"""

import base64
import hashlib
import json
import os
import ssl
import struct
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from bagua.enroll.certificates import Authority, key_pem, new_key

PROTOCOL = "v5.channel.k8s.io"
STDOUT, STDERR, STATUS = 1, 2, 3
MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""Of RFC 6455."""
COMMAND_S = 60.0


class KubeletServer:
    """``log``: the output of a pod by its name; ``pid``: its process. Serves on ``port`` of loopback."""

    def __init__(self, folder, log, pid):
        authority, key = Authority(), new_key()
        made = folder / "kubelet.pem"
        made.write_bytes(key_pem(key) + authority.certify(key.public_key(), ["127.0.0.1"]))
        made.chmod(0o600)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(made)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(log, pid))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="kubelet server", daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def _handler(log, pid):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            asked = urlsplit(self.path)
            kind, _, pod, _ = asked.path.strip("/").split("/")
            if kind == "containerLogs":
                body = log(pod).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            elif PROTOCOL in self.headers.get("Sec-WebSocket-Protocol", ""):
                self._command(pod, parse_qs(asked.query)["command"])
            else:
                self.send_error(400, f"only {PROTOCOL} is served here")

        def do_POST(self):
            self.send_error(400, "no SPDY here")

        def _command(self, pod, command):
            key = (self.headers["Sec-WebSocket-Key"] + MAGIC).encode()
            self.send_response(101)
            self.send_header("Upgrade", "websocket")
            self.send_header("Connection", "Upgrade")
            self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key).digest()).decode())
            self.send_header("Sec-WebSocket-Protocol", PROTOCOL)
            self.end_headers()
            done = _run_in(pid(pod), command)
            self._say(STDOUT, done.stdout)
            self._say(STDERR, done.stderr)
            self._say(STATUS, json.dumps(_status(done.returncode)).encode())
            self.wfile.write(struct.pack("!BBH", 0x88, 2, 1000))  # a normal end
            self.close_connection = True

        def _say(self, stream, data):
            self.wfile.write(struct.pack("!BBQB", 0x82, 127, len(data) + 1, stream) + data)

        def log_message(self, *_):
            pass

    return Handler


def _run_in(pid, command):
    """In the mount namespace of a process, with its environment."""
    given = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    environment = dict(part.split(b"=", 1) for part in given if b"=" in part)
    enter = ["nsenter", "-t", str(pid), "-m", *([] if os.geteuid() == 0 else ["-U", "--preserve-credentials"])]
    return subprocess.run(
        [*enter, *command], env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_S
    )


def _status(code):
    if code == 0:
        return {"status": "Success"}
    cause = {"reason": "ExitCode", "message": str(code)}
    return {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [cause]}, "message": "it failed"}
