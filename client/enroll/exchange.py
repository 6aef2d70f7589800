"""The two messages by which a host becomes part of an ephemeral cluster. Others may carry, read and change them.

The host asks with a certificate request for a key of its own; the first host answers with a certificate, the authority,
and a token for this job and host. Both messages are those of one Noise handshake (``noise.py``): only holders of the
job's secret can make or read them, and they belong to one job, one attempt and one host.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bagua.base.address import is_loopback, split_address
from bagua.base.errors import BaguaError, ConfigError, ServiceError
from bagua.base.job_token import Scope, make_token
from bagua.enroll.certificates import Authority, key_pem, make_request, new_key
from bagua.enroll.noise import Handshake, HandshakeError

_VERSION = "bagua enrolment 1"
_DOUBT = (
    "Its job secret (BAGUA_JOB_SECRET, BAGUA_JOB_SECRET_FILE, ~/.config/bagua/job-secret; none with "
    "BAGUA_INSECURE_RENDEZVOUS=1) is another one, or somebody changed the message on its way through the rendezvous "
    "store."
)


@dataclass(frozen=True)
class Grant:
    """The first host's answer to an applicant. ``ca`` and ``cert`` are PEM."""

    coordinator: str
    job_id: str
    node_id: str
    token: str
    ca: str
    cert: str


def node_id(host: int) -> str:
    """The id of the daemon on this host of an ephemeral cluster."""
    return f"node-{host:05d}"


class Applicant:
    """A host that wants to take part: ``hello``, then ``finish`` with the answer."""

    def __init__(self, key: bytes, context: str, host: int) -> None:
        self._handshake = Handshake(key, _prologue(context, host))
        self._key = new_key()

    def hello(self) -> str:
        """The message to the first host."""
        wish = {
            "request": make_request(self._key).decode(),
            "hostname": socket.gethostname(),
            "loopback": loopback_identity(),
        }
        return _encode(self._handshake.write(json.dumps(wish).encode()))

    def finish(self, message: str) -> Grant:
        """Opens the first host's answer. Raises ServiceError if the message is not from a holder of the secret."""
        try:
            return Grant(**json.loads(self._handshake.read(_decode(message))))
        except (HandshakeError, TypeError, ValueError) as error:
            raise ServiceError(f"The first host's answer can't be trusted: {_text(error)}. {_DOUBT} [BG912]") from None

    def key_pem(self) -> bytes:
        """The private key, for this host alone."""
        return key_pem(self._key)


class Registrar:
    """The first host's side: answers each of the other hosts once."""

    def __init__(
        self, key: bytes, context: str, hosts: int, authority: Authority, coordinator: str, token: str, job_id: str
    ) -> None:
        """``token``: the coordinator's own, from which those of the hosts are made."""
        self._key = key
        self._context = context
        self._authority = authority
        self._coordinator = coordinator
        self._token = token
        self._job_id = job_id
        self._waiting = set(range(1, hosts))

    def answer(self, host: int, message: str) -> str:
        """The message to ``host`` (counted from 1). Raises ServiceError if it does not hold the secret, ConfigError if
        it could not reach the coordinator."""
        if host not in self._waiting:
            raise ServiceError(f"Host {host} is none of this job's that still has to join. [BG912]")
        self._waiting.discard(host)  # before it is read: each host has one try
        handshake = Handshake(self._key, _prologue(self._context, host))
        try:
            wish = json.loads(handshake.read(_decode(message)))
            request, hostname, loopback = (str(wish[name]) for name in ("request", "hostname", "loopback"))
        except (HandshakeError, KeyError, TypeError, ValueError) as error:
            raise ServiceError(
                f"Host {host} does not prove that it belongs to the job: {_text(error)}. {_DOUBT} [BG912]"
            ) from None
        name = node_id(host)
        cert = self._authority.certify_client(request.encode(), name).decode()
        scoped = make_token(self._token, Scope(self._job_id, name))
        grant = Grant(self._coordinator, self._job_id, name, scoped, self._authority.pem().decode(), cert)
        address, _ = split_address(grant.coordinator)
        if is_loopback(address) and loopback != loopback_identity():
            raise ConfigError(
                f"Host {host} ({hostname}) is another machine, but MASTER_ADDR means a loopback address ({address}) on "
                "the first one. Set MASTER_ADDR to an address of the first host by which the others reach it. [BG913]"
            )
        return _encode(handshake.write(json.dumps(asdict(grant)).encode()))


def loopback_identity() -> str:
    """The same text in all processes that share a loopback interface, another one elsewhere."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    # Namespaces of two machines may have the same number.
    return f"{boot.read_text().strip() if boot.exists() else ''} {os.stat('/proc/self/ns/net').st_ino}"


def _prologue(context: str, host: int) -> bytes:
    return json.dumps([_VERSION, context, host]).encode()


def _encode(message: bytes) -> str:
    return base64.b64encode(message).decode()


def _decode(message: Any) -> bytes:
    try:
        return base64.b64decode(message, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise HandshakeError("the message is garbled") from None


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, BaguaError) else "it holds something else than it should"
