"""Credentials: the bearer token that every control call carries, and TLS for everything beyond loopback.

The token is made by the first coordinator that uses a state folder and lies there with mode 0600: whoever can read the
folder may control the service. TLS is mutual; ``bagua certs`` makes the files.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from bagua.base.address import is_loopback, split_address
from bagua.base.errors import ConfigError
from bagua.base.secrets import read_private

METADATA_KEY = "authorization"


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files: the authority that both sides trust, and this side's certificate and key."""

    ca: Path
    cert: Path
    key: Path

    @staticmethod
    def in_folder(folder: Path) -> TlsFiles:
        """The names that ``bagua certs`` gives: ca.pem, cert.pem, key.pem."""
        return TlsFiles(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Returns (ca, cert, key). Raises ConfigError naming the file that can't be read, and a key that others can
        read.
        """
        found = []
        for path in (self.ca, self.cert, self.key):
            try:
                found.append(read_private(path, "The private key") if path is self.key else path.read_bytes())
            except OSError as error:
                remedy = (
                    f"Give it to the user that runs this program: `chown -R USER: {path.parent}`."
                    if isinstance(error, PermissionError)
                    else "Copy the coordinator's folder of them; for a new service `bagua certs` makes one."
                )
                raise ConfigError(f"TLS file {path} can't be read: {error.strerror}. {remedy} [BG808]") from error
        ca, cert, key = found
        if words := self._trouble(ca, cert, key):  # gRPC's library says something else, or ends the process
            raise ConfigError(
                f"{words} Copy the folder that the coordinator uses again; for a new service `bagua certs` makes one. "
                "[BG808]"
            )
        return ca, cert, key

    def _trouble(self, ca: bytes, cert: bytes, key: bytes) -> str:
        """The reason why they can't be used; empty: they can."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_verify_locations(cadata=ca.decode("ascii"))
        except (ssl.SSLError, ValueError):
            return f"TLS file {self.ca} holds no certificate."
        try:
            _load_pair(context, cert, key)
        except (ssl.SSLError, OSError, ValueError) as error:
            if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
                return f"TLS files {self.cert} and {self.key} are no pair: the key is that of another certificate."
            return f"TLS files {self.cert} and {self.key} are no certificate and its key: one of them is damaged."
        return ""


def create_token(path: Path) -> str:
    """The secret in ``path``, for the program that it belongs to; made (mode 0600) if there is none. Safe when two
    processes do it at once. Raises ConfigError if it can't be made or read."""
    remedy = "Remove it: the next start makes another one. Copy that to wherever the old one was used."
    if path.exists():
        return _read_token(path, remedy, remedy)
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # mode 0600
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32))
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)  # atomic: a reader never sees half a token
        finally:
            os.unlink(temporary)
    except OSError as error:
        raise ConfigError(
            f"The token file {path} can't be made: {error.strerror}. Name another one. [BG804]"
        ) from error
    return _read_token(path, remedy, remedy)


def read_token(path: Path) -> str:
    """The token in ``path``, for those who call a service. Raises ConfigError if there is none, or if others can read
    it: whoever has it may run any command on every node."""
    name = "Or name another file with --token-file or BAGUA_TOKEN_FILE."
    administrator = "an administrator of the service gives you one (`bagua token create`)"
    missing = f"Put your token there; {administrator}. {name} For a service of your own start `bagua coordinator`."
    return _read_token(path, missing, f"Write your token into it again; {administrator}. {name}")


def _read_token(path: Path, missing: str, damaged: str) -> str:
    """Remedies: for a file that can't be read, and for one that holds no token."""
    try:
        token = read_private(path, "The token file").decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"The token file {path} is damaged: a token is plain text. {damaged} [BG804]") from error
    except OSError as error:
        raise ConfigError(f"No credential: {path} can't be read ({error.strerror}). {missing} [BG804]") from error
    if not token:
        raise ConfigError(f"The token file {path} is empty. {damaged} [BG804]")
    return checked_token(token, f"The token file {path}")


def checked_token(token: str, source: str) -> str:
    """``token``, if it can be sent. Raises ConfigError: gRPC's own words name neither the token nor ``source``."""
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(
            f"{source} has more than one line, or characters that no token has. Leave one token there. [BG804]"
        )
    return token


def call_metadata(token: str) -> Sequence[tuple[str, str]]:
    """Metadata to send with every call."""
    return ((METADATA_KEY, f"Bearer {token}"),)


def check_listen_address(address: str, tls: TlsFiles | None) -> None:
    """Raises ConfigError for an address beyond loopback without TLS."""
    host, _ = split_address(address)
    if tls is None and not is_loopback(host):
        raise ConfigError(
            f"Refusing to listen on {address} without TLS: anybody who reaches that address could run code here. Make "
            f"certificates with `bagua certs DIR --host {host}` and pass --tls DIR, or listen on 127.0.0.1. [BG807]"
        )


class _NewestFiles:
    """TLS files as they were when they could last be used."""

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = tls
        self.found = tls.read()

    def replaced(self) -> bool:
        """Looks again: whether there are others since the last look. Those that can't be used don't count: between two
        writes a key and a certificate are no pair."""
        with contextlib.suppress(ConfigError, OSError):
            found = self._tls.read()
            if found != self.found:
                self.found = found
                return True
        return False


def server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Mutual TLS: clients must show a certificate of an authority in ``tls.ca``. Files that are replaced count for the
    next connection; those that can't be used don't."""
    files = _NewestFiles(tls)

    def configuration() -> grpc.ServerCertificateConfiguration:
        ca, cert, key = files.found
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)

    def newer() -> grpc.ServerCertificateConfiguration | None:
        return configuration() if files.replaced() else None

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        newer,  # type: ignore[arg-type]  # its types know no None, which is "no news"
        require_client_authentication=True,
    )


def follow_files(context: ssl.SSLContext, tls: TlsFiles) -> None:
    """The same for a server that was given ``context``, made of ``tls``. Nobody need name a server for it: the callback
    for names is asked at each handshake."""
    files = _NewestFiles(tls)
    newest = context

    def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, asked: ssl.SSLContext) -> None:
        nonlocal newest
        if files.replaced():
            ca, cert, key = files.found
            newest = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            _load_pair(newest, cert, key)
            newest.load_verify_locations(cadata=ca.decode("ascii"))
            newest.verify_mode = context.verify_mode
        connection.context = newest  # not the old one with more in it: that would trust former authorities for ever

    context.sni_callback = choose


def _load_pair(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    """Loads the key and its certificate. Raises ssl.SSLError, OSError, ValueError."""
    with tempfile.TemporaryDirectory() as folder:  # 0700; the standard library takes files alone
        paths = os.path.join(folder, "cert.pem"), os.path.join(folder, "key.pem")
        for path, data in zip(paths, (cert, key), strict=True):
            with open(path, "wb") as file:
                file.write(data)
        context.load_cert_chain(paths[0], paths[1], password="")  # nobody is asked for one


def channel_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """Makes the client's credentials for mutual TLS."""
    ca, cert, key = tls.read()
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def handshake_words(details: str, tls: bool) -> str:
    """The remedy for a connection that failed, by gRPC's words; empty: it was not because of TLS."""
    if "certificate has expired" in details or "CERTIFICATE_EXPIRED" in details:
        return (
            "A certificate has expired: its own, or that of these TLS files. Its administrator renews them with `bagua "
            "certs DIR --rotate` (docs/security.md). Or a clock is wrong, here or there."
        )
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return (
            "Its certificate is of another authority, or for another address, than these TLS files say: take a copy of "
            "the folder that the coordinator was started with (its administrator has it), and the address that it was "
            "made for."
        )
    if "WRONG_VERSION_NUMBER" in details:
        return "It speaks without TLS: leave --tls and BAGUA_TLS out."
    if not tls and "Socket closed" in details and "failed to connect" in details:
        return "It hung up at once. If it uses TLS, give a copy of its folder of certificates: --tls DIR or BAGUA_TLS."
    return ""


def check_dial_address(address: str, tls: TlsFiles | None) -> None:
    """Raises ConfigError if a call to ``address`` would carry the token in clear beyond loopback."""
    if address.startswith("unix:"):
        return
    host, _ = split_address(address)
    if tls is None and not is_loopback(host):
        raise ConfigError(
            f"Refusing to call {address} without TLS: pass --tls DIR or set BAGUA_TLS, a copy of the folder of "
            "certificates that the coordinator uses (its administrator made it with `bagua certs`). [BG807]"
        )
