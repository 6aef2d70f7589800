"""The token and the certificates of a job: when they are made anew (pure), and how."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import secrets

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from bagua.enroll.certificates import Authority, key_pem, new_key
from bagua.operator import objects
from bagua.operator.facts import ROTATE, Action, MakeCredentials, Manifest, Secrets, Seen
from bagua.operator.job import GROUP
from bagua.operator.settings import Settings

DAY_S = 86_400.0
MADE_AT = f"{GROUP}/made-at"


def credentials_wanted(seen: Seen, settings: Settings, now: float) -> tuple[tuple[Action, ...], str]:
    """Returns (actions, the mark of the credentials that the coordinator should run with).

    New ones are made where there are none, on request, and in time before they expire."""
    found = seen.secrets
    asked = found.rotation != _rotation(seen)
    own = not settings.issuer  # else cert-manager makes and renews certificates
    soon = own and found.certificate and found.expires_at - now < settings.renew_before_days * DAY_S
    token = not found.token or asked
    certificate = own and (not found.certificate or asked or soon)
    actions: tuple[Action, ...] = (MakeCredentials(token, certificate),) if token or certificate else ()
    # The coordinator starts again with new ones when kubelets have handed them to all pods; a start harms no job.
    settled = now - found.made_at >= settings.secret_delay_s
    mark = found.mark if settled or not seen.coordinator_credentials else seen.coordinator_credentials
    return actions, mark


def _rotation(seen: Seen) -> str:
    return str(seen.body["metadata"].get("annotations", {}).get(ROTATE, ""))


def make_token() -> bytes:
    """Makes a token as the coordinator does."""
    return secrets.token_urlsafe(32).encode()


def token_secret(seen: Seen, token: bytes) -> Manifest:
    return _secret(seen, f"{seen.name}-token", "Opaque", {"token": token})


def tls_secret(seen: Seen, authority: Authority) -> Manifest:
    """The Secret with the certificate, good for all roles and for the names of the coordinator."""
    key = new_key()
    names = [*objects.certificate_names(seen), "localhost", "127.0.0.1"]
    certificate = authority.certify(key.public_key(), names)
    files = {"ca.crt": authority.pem(), "tls.crt": certificate, "tls.key": key_pem(key)}
    return _secret(seen, f"{seen.name}-tls", "kubernetes.io/tls", files)


def authority_secret(seen: Seen, authority: Authority) -> Manifest:
    """The Secret with the authority and its key: certificates that are made later are of the same authority, so nobody
    must trust a new one at the same moment as all others. No pod mounts it."""
    files = {"tls.crt": authority.pem(), "tls.key": authority.key_pem()}
    return _secret(seen, f"{seen.name}-authority", "kubernetes.io/tls", files)


def authority_of(data: dict[str, str]) -> Authority:
    """The authority in the data of ``authority_secret``."""
    key = serialization.load_pem_private_key(base64.b64decode(data["tls.key"]), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return Authority.restored(base64.b64decode(data["tls.crt"]), key)


def secrets_seen(token: Manifest | None, tls: Manifest | None) -> Secrets:
    """The facts about the Secrets that were read."""
    digest = hashlib.sha256()
    expires, made = 0.0, 0.0
    for one in (token, tls):
        for key, value in sorted(((one or {}).get("data") or {}).items()):
            digest.update(f"{key}={value};".encode())
        made = max(made, float(_note(one, MADE_AT) or 0))
    with contextlib.suppress(KeyError, TypeError, ValueError):  # where there is none that can be read, one is made
        certificate = x509.load_pem_x509_certificate(base64.b64decode((tls or {})["data"]["tls.crt"]))
        expires = certificate.not_valid_after_utc.timestamp()
        made = max(made, certificate.not_valid_before_utc.timestamp())  # cert-manager leaves no note
    rotation = _note(token, ROTATE)
    return Secrets(token is not None, expires > 0, rotation, made, expires, digest.hexdigest()[:16])


def noted(secret: Manifest, seen: Seen, now: float) -> Manifest:
    """The Secret with the time and the reason of its making."""
    notes = {MADE_AT: str(int(now)), ROTATE: _rotation(seen)}
    return {**secret, "metadata": {**secret["metadata"], "annotations": notes}}


def _note(secret: Manifest | None, name: str) -> str:
    return str(((secret or {}).get("metadata", {}).get("annotations") or {}).get(name, ""))


def _secret(seen: Seen, name: str, kind: str, files: dict[str, bytes]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": kind,
        "metadata": {
            "name": name,
            "namespace": seen.namespace,
            "labels": objects.labels(seen, "coordinator"),
            "ownerReferences": [objects.owner(seen)],
        },
        "data": {key: base64.b64encode(value).decode() for key, value in files.items()},
    }
