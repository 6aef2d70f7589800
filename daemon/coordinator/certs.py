"""Certificates for mutual TLS: an authority that lives for one folder, and one certificate that serves every role.

Whoever holds the folder may be the coordinator, a node daemon or a client; copy it to each machine of the cluster. The
authority's key is not kept: to add a host, make a new folder and hand it out again.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from bagua.base.errors import ConfigError
from bagua.base.paths import make_private_dir
from bagua.base.security import TlsFiles

VALID_DAYS = 825
_ALWAYS = ("127.0.0.1", "localhost")


def make_certificates(folder: Path, hosts: Sequence[str], renew: bool = False) -> TlsFiles:
    """ca.pem, cert.pem and key.pem in ``folder`` (0700), for ``hosts`` and this machine's loopback. Files that are
    there and cover the hosts are kept, unless ``renew``. Raises ConfigError if they don't, or the folder can't be
    written."""
    files = TlsFiles.in_folder(make_private_dir(folder))
    names = tuple(dict.fromkeys((*hosts, *_ALWAYS)))
    if files.key.exists() and not renew:
        _check(files, names)
        return files
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _authority(authority_key)
    certificate = _certificate(key, names, authority, authority_key)
    _write(files.ca, authority.public_bytes(serialization.Encoding.PEM), 0o644)
    _write(files.cert, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    plain = serialization.NoEncryption()
    encoded = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    _write(files.key, encoded, 0o600)
    return files


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(f"{host!r} is neither a host name nor an address.") from error


def _builder(subject: str, issuer: x509.Name | None, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer or name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks of a cluster differ
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
    )


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    builder = _builder("bagua authority", None, key)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return builder.add_extension(usage, critical=True).sign(key, hashes.SHA256())


def _certificate(
    key: ec.EllipticCurvePrivateKey,
    names: Sequence[str],
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    roles = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = _builder("bagua", authority.subject, key)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
    builder = builder.add_extension(roles, critical=False).add_extension(issuer, critical=False)
    return builder.sign(authority_key, hashes.SHA256())


def _check(files: TlsFiles, names: Sequence[str]) -> None:
    _, cert, _ = files.read()
    folder = files.cert.parent
    advice = f"Remove {folder} (or renew it), make it again, and hand it to every machine of the cluster."
    try:
        certificate = x509.load_pem_x509_certificate(cert)
        covered = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"The certificate {files.cert} can't be used: {error}. {advice}") from error
    missing = [name for name in names if _alternative(name) not in covered]
    if missing:
        raise ConfigError(f"The certificate {files.cert} is not for {', '.join(missing)}. {advice}")
    if certificate.not_valid_after_utc <= datetime.datetime.now(datetime.UTC):
        raise ConfigError(f"The certificate {files.cert} has expired. {advice}")


def _write(path: Path, data: bytes, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
    temporary.replace(path)
