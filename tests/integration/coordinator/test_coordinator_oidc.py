"""Accounts of an OpenID Connect provider: a small real issuer on loopback."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from bagua.base.errors import ConfigError, ForbiddenError, NotFoundError, UnauthenticatedError
from bagua.client import Client
from bagua.daemon.coordinator.rules.identity import Role
from bagua.daemon.coordinator.use.oidc import Grant, check_url, parse_grants
from bagua.proto import common_pb2 as c

jwt = pytest.importorskip("jwt")


class Issuer:
    """Serves a discovery document and keys, and signs."""

    def __init__(self):
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        document = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key()))
        keys = {"keys": [{**document, "kid": "one", "use": "sig", "alg": "RS256"}]}
        issuer = self
        self.asked = 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                issuer.asked += 1
                about = {"issuer": issuer.url, "jwks_uri": f"{issuer.url}/keys"}
                body = json.dumps(keys if self.path == "/keys" else about).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def token(self, key=None, algorithm="RS256", kid="one", **claims):
        base = {"iss": self.url, "aud": "bagua", "sub": "ann", "exp": time.time() + 600, "groups": ["ml"]}
        found = {name: value for name, value in {**base, **claims}.items() if value is not None}
        return str(jwt.encode(found, key or self.key, algorithm=algorithm, headers={"kid": kid}))

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def issuer():
    made = Issuer()
    yield made
    made.close()


def test_signed_tokens_of_the_provider_are_accounts(issuer, start):
    options = ["--oidc-issuer", issuer.url, "--oidc-audience", "bagua", "--oidc-unix-user", "login"]
    for grant in ("groups=ml:submit:vision", "groups=ops:admin", "email=eve@example.org:read"):
        options += ["--oidc-grant", grant]
    coordinator = start(*options)
    assert not coordinator.error

    def client(token):
        return Client(coordinator.address, token=token)

    with client(issuer.token()) as ann:
        assert (ann.accounts.whoami().name, ann.accounts.whoami().namespace) == ("oidc:ann", "vision")
        job = ann.submit(c.JobSpec(name="x", entry="x", nnodes=1, nproc_per_node=1, placement_timeout_s=60))
        assert (job.namespace, job.submitted_by, job.unix_user) == ("vision", "oidc:ann", "")
        with pytest.raises(ForbiddenError):
            ann.accounts.list()
    for claim, user in (("ann", "ann"), (["ann"], ""), ("ann ann", "")):
        with client(issuer.token(login=claim)) as ann:
            assert ann.accounts.whoami().unix_user == user
    with client(issuer.token(sub="bob", groups=["ops"])) as bob:
        assert bob.accounts.list() == [] and bob.get(job.job_id).namespace == "vision"
    with client(issuer.token(sub="eve", groups=[], email="eve@example.org", email_verified=True)) as eve:
        with pytest.raises(ForbiddenError):
            eve.cancel(job.job_id)
    for unverified in ({}, {"email_verified": False}, {"email_verified": "false"}):
        with client(issuer.token(sub="mallory", groups=[], email="eve@example.org", **unverified)) as mallory:
            with pytest.raises(UnauthenticatedError):
                mallory.list()
        with client(issuer.token(sub="mallory", email="eve", login="mallory", **unverified)) as mallory:
            assert mallory.accounts.whoami().unix_user == "mallory"
    with client(issuer.token(sub="s" * 250 + "a")) as one, client(issuer.token(sub="s" * 250 + "b")) as other:
        assert one.accounts.whoami().name != other.accounts.whoami().name
    another = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    unsigned = jwt.encode({"iss": issuer.url, "aud": "bagua", "sub": "x", "exp": time.time() + 60}, None, "none")
    public = json.dumps(json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(issuer.key.public_key())))
    bad = {
        "expired": issuer.token(exp=time.time() - 600),
        "for another program": issuer.token(aud="another"),
        "of another issuer": issuer.token(iss="http://127.0.0.1:1"),
        "signed by another": issuer.token(another),
        "an unknown key": issuer.token(kid="two"),
        "granted nothing": issuer.token(groups=["else"]),
        "without an end": issuer.token(exp=None),
        "unsigned": str(unsigned),
        "signed with what everybody knows": issuer.token("x" * 32 + public, "HS256"),
        "none at all": "a.b.c",
    }
    asked = issuer.asked
    for why, token in bad.items():
        with client(token) as stranger, pytest.raises(UnauthenticatedError):
            stranger.list()
            raise AssertionError(why)
    assert issuer.asked == asked  # strangers don't make the coordinator ask: it has asked a moment ago
    with client(coordinator.token) as administrator:
        assert {"oidc:ann"} == {entry.who for entry in administrator.accounts.audit(target=job.job_id)}
        with pytest.raises(NotFoundError):
            administrator.accounts.revoke("oidc:ann")  # the provider's to do
    for _ in range(30):
        for token in (bad["expired"], bad["granted nothing"]):
            with client(token) as stranger, pytest.raises(UnauthenticatedError):
                stranger.list()
    code, errors = coordinator.end()
    assert "Traceback" not in errors
    lines = [line for line in errors.splitlines() if "oidc_" in line]
    assert code == 0 and 2 <= len(lines) <= len(bad), lines  # one for each kind


def test_grants():
    assert parse_grants(["groups=a:b:submit:red"]) == (Grant("groups", "a:b", Role.SUBMIT, "red"),)
    assert parse_grants(["groups=a:b:read"]) == (Grant("groups", "a:b", Role.READ, "*"),)
    for text in ("", "a", "a=b", "a=b:king", "a=b:submit", "a=b:admin:red", "=b:read", "a=:read", "a=b:read:NO"):
        with pytest.raises(ConfigError, match="--oidc-grant"):
            parse_grants([text])
    check_url("https://login.example.org/realm")
    for url in ("http://login.example.org", "ftp://x", "https://"):
        with pytest.raises(ConfigError):
            check_url(url)
