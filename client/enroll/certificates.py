"""Certificates for mutual TLS: an authority, and what it signs. Keys are made where they are used."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from bagua.base.errors import ConfigError

VALID_DAYS = 825
_PEM = serialization.Encoding.PEM


def new_key() -> ec.EllipticCurvePrivateKey:
    """A key on the curve P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The private key, not encrypted: for a file of mode 0600."""
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def make_request(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A certificate request (PEM) that proves that its sender holds ``key``. Names are the authority's to give."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(_name("bagua"))
    return builder.sign(key, hashes.SHA256()).public_bytes(_PEM)


class Authority:
    """Lives as long as this object, unless its key is kept (``key_pem``, ``restored``). Two that are trusted at once
    need different names."""

    @classmethod
    def restored(cls, certificate: bytes, key: ec.EllipticCurvePrivateKey) -> Authority:
        """The authority whose certificate (PEM) and key were kept."""
        found = cls.__new__(cls)
        found._key, found._certificate = key, x509.load_pem_x509_certificate(certificate)
        return found

    def __init__(self, name: str = "bagua authority") -> None:
        self._key = new_key()
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
        builder = _builder(_name(name), _name(name), self._key.public_key())
        # path_length=0: it signs no further authorities.
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False
        )
        self._certificate = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())

    def pem(self) -> bytes:
        """The certificate that both sides of a connection trust."""
        return self._certificate.public_bytes(_PEM)

    def key_pem(self) -> bytes:
        """Returns its private key, not encrypted. Whoever has it can be any part of the service."""
        return key_pem(self._key)

    def certify(self, key: ec.EllipticCurvePublicKey, hosts: Sequence[str]) -> bytes:
        """A certificate (PEM) for every role, the server's among them, at the names and addresses ``hosts``. Raises
        ConfigError for one that is neither."""
        names = x509.SubjectAlternativeName([alternative(host) for host in hosts])
        builder = _builder(_name("bagua"), self._certificate.subject, key).add_extension(names, critical=False)
        # Coordinators over one database call each other, too.
        return self._sign(builder, [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])

    def certify_client(self, request: bytes, name: str) -> bytes:
        """A certificate (PEM) for the key of a certificate request. It is good for calling a service, not for being
        one. Raises ConfigError if the request is not sound."""
        try:
            asked = x509.load_pem_x509_csr(request)
            key, sound = asked.public_key(), asked.is_signature_valid
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"The certificate request of {name} can't be read: {error}. [BG912]") from None
        if not sound or not isinstance(key, ec.EllipticCurvePublicKey):
            raise ConfigError(f"The certificate request of {name} is not signed with its own key. [BG912]")
        return self._sign(
            _builder(_name(f"bagua {name}"), self._certificate.subject, key), [ExtendedKeyUsageOID.CLIENT_AUTH]
        )

    def _sign(self, builder: x509.CertificateBuilder, roles: Sequence[x509.ObjectIdentifier]) -> bytes:
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(roles), critical=False)
        signed = builder.add_extension(issuer, critical=False).sign(self._key, hashes.SHA256())
        return signed.public_bytes(_PEM)


def alternative(host: str) -> x509.GeneralName:
    """A name or an address, as certificates hold it. Raises ConfigError."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(f"{host!r} is neither a host name nor an address. [BG101]") from error


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks of a cluster differ
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
    )
