"""Makes a folder of certificates for mutual TLS: an authority and one certificate for every role.

Whoever holds the folder may be the coordinator, a node daemon or a client; copy it to each machine of the cluster. The
authority's key is not kept: to add a host, make a new folder and hand it out again.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509

from bagua.base.errors import ConfigError
from bagua.base.paths import make_private_dir, write_private
from bagua.base.security import TlsFiles
from bagua.enroll.certificates import VALID_DAYS as VALID_DAYS
from bagua.enroll.certificates import Authority, alternative, key_pem, new_key

_ALWAYS = ("127.0.0.1", "localhost")


def make_certificates(folder: Path, hosts: Sequence[str], renew: bool = False) -> TlsFiles:
    """ca.pem, cert.pem and key.pem in ``folder`` (0700), for ``hosts`` and this machine's loopback. Files that are
    there and cover the hosts are kept, unless ``renew``. Raises ConfigError if they don't, or the folder can't be
    written."""
    files = TlsFiles.in_folder(make_private_dir(folder, "Choose another folder."))
    names = tuple(dict.fromkeys((*hosts, *_ALWAYS)))
    if files.key.exists() and not renew:
        _check(files, names)
        return files
    authority, key = Authority(), new_key()
    certificate = authority.certify(key.public_key(), names)
    write_private(files.ca, authority.pem(), 0o644)
    write_private(files.cert, certificate, 0o644)
    write_private(files.key, key_pem(key))  # last: where it is, the other two are
    return files


def _check(files: TlsFiles, names: Sequence[str]) -> None:
    _, cert, _ = files.read()
    folder = files.cert.parent
    advice = f"Remove {folder} (or renew it), make it again, and hand it to every machine of the cluster."
    try:
        certificate = x509.load_pem_x509_certificate(cert)
        covered = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"The certificate {files.cert} can't be used: {error}. {advice} [BG808]") from error
    missing = [name for name in names if alternative(name) not in covered]
    if missing:
        raise ConfigError(f"The certificate {files.cert} is not for {', '.join(missing)}. {advice} [BG808]")
    if certificate.not_valid_after_utc <= datetime.datetime.now(datetime.UTC):
        raise ConfigError(f"The certificate {files.cert} has expired. {advice} [BG808]")
