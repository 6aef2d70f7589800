"""How a host is taken in: what each side believes, and what the certificate and token are good for."""

import base64
import json

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from bagua.base.errors import ConfigError, ServiceError
from bagua.base.job_token import Scope, read_scope
from bagua.enroll import exchange
from bagua.enroll.certificates import Authority, make_request, new_key
from bagua.enroll.exchange import Applicant, Registrar

KEY = bytes(range(32))
TOKEN = "the-coordinators-own-token"
JOB = "run 1 x"


def registrar(address="10.0.0.1:7000", hosts=3, key=KEY, context=JOB):
    return Registrar(key, context, hosts, Authority(), address, TOKEN, "job-1")


def test_a_host_gets_a_certificate_for_its_own_key_and_a_token_for_the_job():
    applicant = Applicant(KEY, JOB, 2)
    grant = applicant.finish(registrar().answer(2, applicant.hello()))
    assert (grant.coordinator, grant.job_id, grant.node_id) == ("10.0.0.1:7000", "job-1", "node-00002")
    assert read_scope(TOKEN, grant.token) == Scope("job-1", "node-00002")
    cert = x509.load_pem_x509_certificate(grant.cert.encode())
    cert.verify_directly_issued_by(x509.load_pem_x509_certificate(grant.ca.encode()))
    own = serialization.load_pem_private_key(applicant.key_pem(), None)
    assert own.public_key() == cert.public_key()


def test_a_hosts_certificate_does_not_make_it_a_coordinator():
    key = new_key()
    cert = x509.load_pem_x509_certificate(Authority().certify_client(make_request(key), "node-00001"))
    roles = cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(roles) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert not cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_no_secret_is_in_the_messages():
    applicant = Applicant(KEY, JOB, 1)
    hello = applicant.hello()
    answer = registrar().answer(1, hello)
    seen = base64.b64decode(hello) + base64.b64decode(answer) + hello.encode() + answer.encode()
    grant = applicant.finish(answer)
    key = b"".join(applicant.key_pem().splitlines()[1:-1])
    for secret in (KEY, TOKEN.encode(), grant.token.encode(), key, base64.b64decode(key)):
        assert secret not in seen


@pytest.mark.parametrize(
    "other", [registrar(key=bytes(32)), registrar(context="run 2 x")], ids=["another secret", "another attempt"]
)
def test_a_host_that_can_not_prove_it_is_refused(other):
    with pytest.raises(ServiceError, match=r"Host 1 does not prove that it belongs to the job.*BAGUA_JOB_SECRET"):
        other.answer(1, Applicant(KEY, JOB, 1).hello())


def test_a_message_is_good_for_its_own_host_and_once():
    side = registrar()
    hello = Applicant(KEY, JOB, 1).hello()
    with pytest.raises(ServiceError, match="Host 2 does not prove"):
        side.answer(2, hello)
    side.answer(1, hello)
    for host in (0, 1, 2, 3, -1):
        with pytest.raises(ServiceError, match="none of this job's that still has to join"):
            side.answer(host, hello)


def test_a_host_believes_the_first_host_alone():
    applicant, other = Applicant(KEY, JOB, 1), Applicant(KEY, JOB, 1)
    stranger = registrar(key=bytes(32))
    hello = applicant.hello()
    for answer in (
        hello,  # reflected
        registrar().answer(1, other.hello()),  # replayed
        "AAAA" * 100,
        "no base64",
    ):
        with pytest.raises(ServiceError, match="can't be trusted"):
            Applicant.finish(applicant, answer)
        applicant = Applicant(KEY, JOB, 1)
        hello = applicant.hello()
    with pytest.raises(ServiceError, match="does not prove"):
        stranger.answer(1, hello)


def test_a_request_must_be_signed_with_its_key():
    pem = make_request(new_key()).decode().splitlines()
    der = bytearray(base64.b64decode("".join(pem[1:-1])))
    der[-1] ^= 1
    changed = "\n".join([pem[0], base64.b64encode(der).decode(), pem[-1]]).encode()
    for request in (changed, b"", b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n"):
        with pytest.raises(ConfigError, match="certificate request of node-00001"):
            Authority().certify_client(request, "node-00001")


def test_a_coordinator_on_loopback_serves_its_own_machine_alone(monkeypatch):
    near = Applicant(KEY, JOB, 1)
    near.finish(registrar("127.0.0.1:7000").answer(1, near.hello()))
    side = registrar("127.0.0.1:7000")
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "loopback_identity", lambda: "another machine")
        hello = Applicant(KEY, JOB, 1).hello()
    with pytest.raises(ConfigError, match="Set MASTER_ADDR"):
        side.answer(1, hello)


def test_tokens_carry_their_scope():
    from bagua.base.job_token import make_token

    scope = Scope("job-1", "node-00001")
    token = make_token(TOKEN, scope)
    assert read_scope(TOKEN, token) == scope
    parts = token.split("~")
    for index in range(4):
        changed = "~".join(part + "x" if i == index else part for i, part in enumerate(parts))
        assert read_scope(TOKEN, changed) is None
    assert read_scope("another", token) is None and read_scope(TOKEN, TOKEN) is None and read_scope(TOKEN, "") is None
    for job_id in ("a~b", "", "ü", "a\nb"):
        with pytest.raises(ValueError, match="can't be written"):
            make_token(TOKEN, Scope(job_id, "n"))


def test_a_holder_of_the_secret_who_sends_something_else():
    class Odd(Applicant):
        def hello(self):
            return exchange._encode(self._handshake.write(json.dumps(["odd"]).encode()))

    with pytest.raises(ServiceError, match="holds something else"):
        registrar().answer(1, Odd(KEY, JOB, 1).hello())
