"""Accounts against a real coordinator: roles, namespaces, revocation, the audit log, secrets in memory."""

import hashlib
import json
import re
import time

import grpc
import pytest
from typer.testing import CliRunner

from bagua.base.errors import ConflictError, ForbiddenError, InvalidRequestError, NotFoundError, UnauthenticatedError
from bagua.cli.app import app
from bagua.client import Client, pack
from bagua.proto import common_pb2 as c
from bagua.proto import node_pb2

from .conftest import CoordinatorProcess

WAIT_S = 60.0


def spec(name="x", **more):
    return c.JobSpec(name=name, entry="x", nnodes=1, nproc_per_node=1, placement_timeout_s=600, **more)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    process = CoordinatorProcess(tmp_path_factory.mktemp("accounts"), "--log-json")
    assert not process.error
    yield process
    code, errors = process.end()
    assert code == 0, errors


@pytest.fixture(scope="module")
def admin(service):
    with service.client() as made:
        yield made


@pytest.fixture(scope="module")
def as_user(service, admin):
    made = []

    def one(name, role, namespace=""):
        made.append(Client(service.address, token=admin.accounts.create(name, role, namespace).secret))
        return made[-1]

    yield one
    for client in made:
        client.close()


@pytest.fixture(scope="module")
def people(as_user):
    return {
        "ann": as_user("ann", "submit", "red"),
        "ben": as_user("ben", "submit", "red"),
        "eve": as_user("eve", "submit", "blue"),
        "rae": as_user("rae", "read", "red"),
        "roy": as_user("roy", "read"),
    }


@pytest.fixture(scope="module")
def job(people):
    return people["ann"].submit(spec("secretive", env={"PLAN": "hidden-plan"}), idempotency_key="one")


def test_another_namespace_sees_no_job_at_all(job, people):
    eve = people["eve"]
    for look in (
        eve.get,
        lambda job_id: list(eve.events(job_id)),
        lambda job_id: list(eve.watch(job_id)),
        lambda job_id: list(eve.logs(job_id)),
        eve.trace,
        eve.cancel,
        eve.pause,
        lambda job_id: eve.find(job_id[:8]),
    ):
        with pytest.raises(NotFoundError) as of_another:
            look(job.job_id)
        with pytest.raises(NotFoundError) as of_none:
            look("job-0000000000")
        words = [re.sub(r"job-[0-9a-f]*", "job", str(one.value)) for one in (of_another, of_none)]
        assert words[0] == words[1]  # nor whether there is one


def test_a_namespace_lists_its_own_alone(job, people, admin):
    assert (job.namespace, job.submitted_by) == ("red", "ann")
    assert people["eve"].list() == ()
    own = people["eve"].submit(spec("eve's"))
    assert [one.job_id for one in people["eve"].list()] == [own.job_id]
    assert {one.job_id for one in people["roy"].list()} >= {own.job_id, job.job_id}  # reads all
    assert own.job_id not in {one.job_id for one in people["ann"].list()}
    assert {one.namespace for one in admin.list(namespace="red")} == {"red"}
    assert people["eve"].list(namespace="red") == ()
    admin.cancel(own.job_id)


def test_the_namespace_of_a_job_is_the_callers(people, admin):
    with pytest.raises(ForbiddenError, match="namespace red, not to blue"):
        people["ann"].submit(spec(), namespace="blue")
    with pytest.raises(InvalidRequestError, match="namespace"):
        admin.submit(spec(), namespace="No Good")
    made = admin.submit(spec(), namespace="blue")
    assert people["eve"].get(made.job_id).submitted_by == "administrator"
    admin.cancel(made.job_id)


def test_keys_of_namespaces_do_not_meet(job, people):
    stored = "sha256:" + hashlib.sha256(b"red/one").hexdigest()  # as another namespace's key was stored once
    for name in ("eve", "ben"):
        for key in ("one", stored):
            other = people[name].submit(spec(), idempotency_key=key)
            assert other.job_id != job.job_id and other.submitted_by == name
            people[name].cancel(other.job_id)
    again = people["ann"].submit(spec("secretive", env={"PLAN": "hidden-plan"}), idempotency_key="one")
    assert again.job_id == job.job_id


def test_a_key_is_bound_to_the_unix_user(admin):
    job = admin.submit(spec(), idempotency_key="as", unix_user="ann")
    with pytest.raises(ConflictError, match="is another job"):
        admin.submit(spec(), idempotency_key="as", unix_user="ben")
    assert admin.submit(spec(), idempotency_key="as", unix_user="ann").job_id == job.job_id
    admin.cancel(job.job_id)


def test_code_is_a_namespaces_own(tmp_path, people):
    (tmp_path / "train.py").write_text("print('ours')")
    packed = pack(tmp_path)
    people["ann"].put_code(packed)
    stolen = spec()
    stolen.code.CopyFrom(packed.archive)
    with pytest.raises(InvalidRequestError, match="has no archive"):  # knowing its digest is not enough
        people["eve"].submit(stolen)
    people["eve"].put_code(packed)  # who has the files may send them
    made = people["eve"].submit(stolen)
    people["eve"].cancel(made.job_id)


def test_a_node_token_opens_a_session_and_nothing_else(service, admin, connect, people):
    token = admin.accounts.create("host-7", "node").secret
    connect(service, "node-7", token=token)
    with Client(service.address, token=token) as client:
        for ask in (client.list, client.nodes, lambda: client.submit(spec())):
            with pytest.raises(ForbiddenError, match="role node"):
                ask()
    user = admin.accounts.create("no-host", "submit", "red").secret
    with pytest.raises(grpc.RpcError) as caught:
        connect(service, "node-8", token=user)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_a_revoked_token_is_refused_and_its_calls_end(service, admin, job):
    made = admin.accounts.create("leaver", "read", "red")
    with Client(service.address, token=made.secret) as client:
        updates = client.watch(job.job_id)
        while next(updates).WhichOneof("update") != "job":
            pass
        assert [one.id for one in admin.accounts.revoke(made.token.id)] == [made.token.id]
        with pytest.raises(UnauthenticatedError, match="revoked"):
            next(updates)
        with pytest.raises(UnauthenticatedError):
            client.get(job.job_id)
    with pytest.raises(NotFoundError):
        admin.accounts.revoke(made.token.id)
    assert made.token.id not in {one.id for one in admin.accounts.list()}
    assert made.token.id in {one.id for one in admin.accounts.list(revoked=True)}


def test_a_token_ends_by_itself(service, admin):
    made = admin.accounts.create("guest", "read", lasts_s=0.5)
    deadline = time.monotonic() + WAIT_S
    with Client(service.address, token=made.secret) as client, pytest.raises(UnauthenticatedError) as refused:
        while time.monotonic() < deadline:
            client.list()
            time.sleep(0.05)
    assert "has expired" in str(refused.value)


def test_accounts_that_make_no_sense_are_refused(admin):
    for given, words in (
        (("a b", "read", ""), "name"),
        (("administrator", "read", ""), "state folder"),
        (("x", "king", ""), "role"),
        (("x", "submit", ""), "needs the one"),
        (("x", "admin", "red"), "whole cluster"),
        (("x", "read", "Red!"), "namespace"),
        (("x", "submit", "red", 0.0, "two words"), "can't be the name of a user"),
        (("x", "read", "red", 0.0, "ann"), "submits no jobs"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            admin.accounts.create(*given)


def test_a_job_has_the_unix_user_of_its_submitter(service, admin, people):
    made = admin.accounts.create("uma", "submit", "red", unix_user="uma")
    assert [one.account.unix_user for one in admin.accounts.list() if one.account.name == "uma"] == ["uma"]
    with Client(service.address, token=made.secret) as uma:
        assert uma.accounts.whoami().unix_user == "uma"
        job = uma.submit(spec())
        assert job.unix_user == uma.get(job.job_id).unix_user == "uma"
        assert [one.unix_user for one in uma.list() if one.job_id == job.job_id] == ["uma"]
        with pytest.raises(ForbiddenError, match="run as uma: only administrators choose another one, as root"):
            uma.submit(spec(), unix_user="root")
    with pytest.raises(ForbiddenError, match="have no Unix user"):
        people["ann"].submit(spec(), unix_user="uma")
    assert (people["ann"].submit(spec()).unix_user, admin.submit(spec(), unix_user="zed").unix_user) == ("", "zed")
    with pytest.raises(InvalidRequestError, match="can't be the name of a user"):
        admin.submit(spec(), unix_user="a/b")


def test_tokens_are_not_in_the_database_and_last_over_a_restart(start, tmp_path):
    first = start()
    with first.client() as client:
        secret = client.accounts.create("ann", "submit", "red").secret
    first.end()
    written = b"".join(path.read_bytes() for path in (tmp_path / "state" / "coordinator").glob("bagua.db*"))
    assert b"ann" in written and secret.encode() not in written and secret.split("_", 2)[2].encode() not in written
    again = start()
    with Client(again.address, token=secret) as client:
        assert client.accounts.whoami().namespace == "red"
        assert again.client().accounts.audit()[-1].method == "AccountService/CreateToken"
    with Client(again.address, token=secret[:-1] + "x") as client, pytest.raises(UnauthenticatedError):
        client.list()


def test_the_audit_log_has_changes_and_refusals(admin, people, job, service):
    with pytest.raises(ForbiddenError):
        people["rae"].cancel(job.job_id)
    with pytest.raises(NotFoundError):
        people["eve"].get(job.job_id)

    def told(**more):
        return {(one.who, one.method, one.outcome) for one in admin.accounts.audit(1_000, **more)}

    assert ("ann", "JobService/SubmitJob", "OK") in told(target=job.job_id)
    refused = told(refused=True)
    assert refused >= {("eve", "JobService/GetJob", "NOT_FOUND"), ("rae", "JobService/CancelJob", "PERMISSION_DENIED")}
    assert all(outcome != "OK" for _, _, outcome in refused)
    assert {one.who for one in admin.accounts.audit(who="eve")} == {"eve"}
    lines = [json.loads(line) for line in service._errors if '"coordinator.audit"' in line or '"call"' in line]
    assert any(line.get("who") == "eve" and line.get("outcome") == "NOT_FOUND" for line in lines)


def test_secrets_stay_in_memory_and_reach_nodes_of_the_job_alone(start, connect, tmp_path, until):
    first = start("--log-json")
    value = "never-written-3f9c"
    with first.client() as client:
        job = client.submit(spec(), secrets={"HF_TOKEN": value})
        assert list(job.spec.secrets) == ["HF_TOKEN"] and value not in str(job)
        stranger = connect(first, "node-b", slots=0)
        home = connect(first, "node-a")
        run = home.expect(node_pb2.RunJob)
        assert value not in str(run) and list(run.spec.secrets) == ["HF_TOKEN"]
        question = node_pb2.SecretsQuestion(request_id=1, job_id=job.job_id)
        home.send(node_pb2.NodeFact(secrets=question))
        assert dict(home.expect(node_pb2.SecretsAnswer).values) == {"HF_TOKEN": value}
        stranger.send(node_pb2.NodeFact(secrets=question))
        answer = stranger.expect(node_pb2.SecretsAnswer)
        assert not answer.values and "has no part" in answer.error
        written = b"".join(path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file())
        assert b"HF_TOKEN" in written and value.encode() not in written
        code, errors = first.end()
        assert code == 0 and value not in errors
    again = start(state_dir=tmp_path / "state")
    home = connect(again, "node-a", jobs=(node_pb2.LocalJob(job_id=job.job_id, generation=1, phase=1),))
    home.send(node_pb2.NodeFact(secrets=question))
    while not isinstance(answer := home.next(), node_pb2.SecretsAnswer):
        pass
    assert not answer.values and "started again" in answer.error and "Submit the job again" in answer.error


def test_secrets_are_given_once_and_with_their_values(admin):
    with pytest.raises(InvalidRequestError, match=r"is in spec\.env, too"):
        admin.submit(spec(env={"A": "1"}), secrets={"A": "2"})
    with pytest.raises(InvalidRequestError, match="value of 'A' is missing"):  # a job that is submitted again
        admin.submit(spec(secrets=["A"]))


def cli(service, token, *arguments):
    """(exit code, what it says)"""
    done = CliRunner().invoke(app, [*arguments, "--coordinator", service.address, "--token-file", str(token)])
    return done.exit_code, f"{done.output} {done.exception}"


def test_the_command_line_makes_lists_and_revokes(service, tmp_path):
    own, lost, admin = tmp_path / "zoe.token", tmp_path / "missing" / "yan.token", service.token_file
    new = ("token", "create", "zoe", "--role", "submit", "--namespace", "green", "--unix-user", "zoe-u")
    code, said = cli(service, admin, *new, "--expires", "30d", "--out", str(own))
    assert code == 0 and own.stat().st_mode & 0o777 == 0o600, said
    code, said = cli(service, admin, "token", "create", "yan", "--role", "read", "--out", str(lost))
    assert code == 1 and "No such file" in said
    assert "namespace green, Unix user zoe-u" in cli(service, own, "token", "whoami")[1]
    listed = cli(service, admin, "token", "list")[1]
    assert "zoe-u" in listed and "yan" not in listed, "a token that nobody has"
    assert cli(service, own, "audit")[0] != 0
    assert "is revoked" in cli(service, admin, "token", "revoke", "zoe")[1]
    assert "/CreateToken" in cli(service, admin, "audit", "--output", "json")[1]
    assert cli(service, own, "token", "whoami")[0] != 0
