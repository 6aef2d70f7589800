"""The operator keeps a client for each job's coordinator."""

import base64

import pytest

from bagua.base.errors import ServiceError
from bagua.enroll.certificates import Authority, key_pem, new_key
from bagua.operator.service import Connections

JOB = ("default", "digits")
NOBODY = "127.0.0.1:1"


def secret(**files):
    return {"data": {name: base64.b64encode(data).decode() for name, data in files.items()}}


@pytest.fixture(scope="module")
def tls():
    authority, key = Authority(), new_key()
    certificate = authority.certify(key.public_key(), ["localhost"])
    return secret(**{"ca.crt": authority.pem(), "tls.crt": certificate, "tls.key": key_pem(key)})


def test_a_client_lasts_while_its_secrets_do(tls):
    connections = Connections(lambda job: None)
    first = connections.client(JOB, NOBODY, secret(token=b"t" * 32), tls)
    assert connections.client(JOB, NOBODY, secret(token=b"t" * 32), tls) is first
    with pytest.raises(ServiceError, match="No coordinator answers"):
        first.nodes()  # its files are gone, and not needed
    other = connections.client(JOB, NOBODY, secret(token=b"u" * 32), tls)
    assert other is not first and closed(first) and not closed(other)
    connections.drop(JOB)
    connections.drop(JOB)
    assert closed(other) and connections.client(JOB, NOBODY, secret(token=b"u" * 32), tls) is not other
    connections.drop(JOB)


def closed(client):
    """It refuses calls, without asking anybody."""
    return client._closed.is_set()
