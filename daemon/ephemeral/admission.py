"""Admits the other hosts of an ephemeral cluster: the job's secret, an authority for certificates, one address."""

from __future__ import annotations

import socket
from pathlib import Path

from bagua.base.address import is_loopback, join_address
from bagua.base.errors import ConfigError, ServiceError
from bagua.base.paths import make_private_dir, write_private
from bagua.base.security import TlsFiles
from bagua.enroll import secret
from bagua.enroll.certificates import Authority, key_pem, new_key
from bagua.enroll.exchange import Registrar


class Admission:
    """``address``: of the first host, by which the others reach it."""

    def __init__(self, hosts: int, master_addr: str, context: str) -> None:
        """``context`` names job and attempt, alike on all hosts. Raises ConfigError if the job has no secret."""
        self._hosts = hosts
        self._context = context
        self._key = secret.find_key(master_addr, first=True)
        secret.remove_from_environment()
        self._authority = Authority()
        self._registrar: Registrar | None = None
        self.address = own_address(master_addr)
        self.tls: Path | None = None

    @property
    def listen(self) -> str:
        """Address at which the coordinator listens."""
        return join_address(self.address, 0)

    def write_certificates(self, folder: Path) -> Path:
        """The files of the first host's services: ``folder``, made. Raises ConfigError if it can't be."""
        files = TlsFiles.in_folder(make_private_dir(folder))
        key = new_key()
        write_private(files.ca, self._authority.pem(), 0o644)
        write_private(files.cert, self._authority.certify(key.public_key(), [self.address]), 0o644)
        write_private(files.key, key_pem(key))
        self.tls = folder
        return folder

    def open(self, coordinator: str, token: str, job_id: str) -> None:
        """Admits hosts from now on."""
        self._registrar = Registrar(self._key, self._context, self._hosts, self._authority, coordinator, token, job_id)

    def answer(self, host: int, hello: str) -> str:
        """The message to ``host``. Raises ServiceError, ConfigError: see ``Registrar``."""
        if self._registrar is None:
            raise ServiceError("The cluster is not ready for other hosts. [BG912]")
        return self._registrar.answer(host, hello)


def own_address(master_addr: str) -> str:
    """The address of this machine that ``master_addr`` means: the coordinator and the first host's data listen there,
    and nowhere else. Raises ConfigError if it is none of this machine's."""
    try:
        found = socket.getaddrinfo(master_addr, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR {master_addr} means nothing on the first host: {error.strerror}. [BG913]"
        ) from None
    addresses = [str(entry[4][0]) for entry in found]
    for address in sorted(addresses, key=is_loopback):  # an /etc/hosts may name this machine's loopback, too
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((address, 0))
        except OSError:
            continue
        return "127.0.0.1" if is_loopback(address) else address
    raise ConfigError(
        f"MASTER_ADDR {master_addr} ({', '.join(dict.fromkeys(addresses))}) is no address of the first host. Set it to "
        "one by which the other hosts reach that. [BG913]"
    )
