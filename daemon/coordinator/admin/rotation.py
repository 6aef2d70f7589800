"""Replaces the certificates of a cluster without a stop, in three steps.

1. ``begin``: a new authority is trusted beside the old one. Nobody shows a certificate of it yet.
2. ``switch``: machines show certificates of the new authority. Those that were not reached yet still trust it.
3. ``finish``: the old authority is trusted no more.

After each step the folder is handed to every machine. Coordinators read it at each new connection, daemons whenever
they connect; connections that stand go on. The authority's key lives as long as ``begin`` runs: the certificate for
``switch`` is made with it, and waits in the folder.
"""

from __future__ import annotations

import datetime
import enum
import os
import time
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from bagua.base.errors import ConfigError
from bagua.base.paths import write_private
from bagua.base.security import TlsFiles
from bagua.enroll.certificates import Authority, key_pem, new_key

_NEXT_CERT, _NEXT_KEY = "next-cert.pem", "next-key.pem"
_PEM = serialization.Encoding.PEM


class Step(enum.StrEnum):
    """Step of a rotation of certificates."""

    BEGIN = "begin"
    SWITCH = "switch"
    FINISH = "finish"


@dataclass(frozen=True)
class Status:
    """The state of a folder. ``next_step``: what a rotation needs next; None: none is under way."""

    hosts: tuple[str, ...]
    ends: datetime.datetime
    authorities: int
    next_step: Step | None

    @property
    def days_left(self) -> int:
        """Days until the certificate ends; negative: since it has ended."""
        return (self.ends - datetime.datetime.now(datetime.UTC)).days


def status(folder: Path) -> Status:
    """Raises ConfigError for a folder without certificates, or with damaged ones."""
    certificate, authorities = _read(folder)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = tuple(str(name.value) for name in names)
    waiting = (folder / _NEXT_CERT).exists()
    step = Step.SWITCH if waiting else Step.FINISH if len(authorities) > 1 else None
    return Status(hosts, certificate.not_valid_after_utc, len(authorities), step)


def rotate(folder: Path, step: Step) -> Status:
    """Makes one step. Raises ConfigError for one that does not come next."""
    expected = status(folder).next_step or Step.BEGIN
    if step is not expected:
        raise ConfigError(
            f"{folder}: the next step is `bagua certs {folder} --rotate {expected}`, not {step}. `bagua certs {folder} "
            "--show` tells what lies there. [BG808]"
        )
    {Step.BEGIN: _begin, Step.SWITCH: _switch, Step.FINISH: _finish}[step](folder)
    return status(folder)


def _begin(folder: Path) -> None:
    files = TlsFiles.in_folder(folder)
    _, authorities = _read(folder)
    # Another name than the old one: both are trusted for a while.
    authority, key = Authority(f"bagua authority {int(time.time())}"), new_key()
    certificate = authority.certify(key.public_key(), status(folder).hosts)
    write_private(files.ca, b"".join(one.public_bytes(_PEM) for one in authorities) + authority.pem(), 0o644)
    write_private(folder / _NEXT_KEY, key_pem(key))
    write_private(folder / _NEXT_CERT, certificate, 0o644)  # last: it shows that the step was made


def _switch(folder: Path) -> None:
    """A key and a certificate that do not fit together are seen for a moment: whoever reads waits for the next pair."""
    files = TlsFiles.in_folder(folder)
    os.replace(folder / _NEXT_KEY, files.key)
    os.replace(folder / _NEXT_CERT, files.cert)


def _finish(folder: Path) -> None:
    certificate, authorities = _read(folder)
    own = [one for one in authorities if one.subject == certificate.issuer]
    write_private(TlsFiles.in_folder(folder).ca, b"".join(one.public_bytes(_PEM) for one in own), 0o644)


def _read(folder: Path) -> tuple[x509.Certificate, list[x509.Certificate]]:
    """The certificate, and all authorities that are trusted."""
    ca, cert, _ = TlsFiles.in_folder(folder).read()
    try:
        return x509.load_pem_x509_certificate(cert), x509.load_pem_x509_certificates(ca)
    except ValueError as error:
        raise ConfigError(f"The certificates in {folder} can't be read: {error}. [BG808]") from error
