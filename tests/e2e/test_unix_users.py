"""Ranks that run as the Unix user of their submitter: what they can do, and what they can't reach."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest
from rig.ranks.elastic import JOIN, PROGRAM
from rig.system import other_users

from bagua.base.daemon_process import daemon_pid
from bagua.client import Client
from bagua.proto import common_pb2

CHECKPOINTS = """
import torch
import bagua.torch_api as bagua

bagua.init_process_group()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = model.with_bagua([optimizer])
checkpointer = bagua.checkpoint.Checkpointer(every=1)
start = checkpointer.resume()
print("begins with", start.step if start else 0, flush=True)
for _ in range(2):
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    checkpointer.step()
checkpointer.wait()
"""
REASON = other_users.reason_to_skip()
pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(REASON), reason=REASON)]

FACTS = (
    JOIN
    + """
import json, pathlib, resource, stat
segment = rank.alloc(4096)
numbers = memoryview(segment).cast("f")
numbers[0] = 1.0
one = dict(comm=0, kind=core.KINDS["allreduce"], dtype=core.DTYPES["float32"], op=core.OPS["SUM"], count=1)
rank.wait(rank.submit(**one, src=(segment.id, 0), dst=(segment.id, 0)))
assert numbers[0] == 2.0
others = sys.argv[1:]

def reached(path):
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        return type(error).__name__
    return "read"

place = pathlib.Path(os.environ["BAGUA_DAEMON_SOCKET"])
(pathlib.Path(os.environ["OUT"]) / f"model-{os.environ['RANK']}").write_text("weights")
with open("/dev/stderr", "w") as stderr:
    print("a word to /dev/stderr", file=stderr)
umask = os.umask(0)
print("FACTS", json.dumps({
    "ids": os.getresuid() + os.getresgid(),
    "groups": sorted(os.getgroups()),
    "user": [os.environ[name] for name in ("USER", "LOGNAME", "HOME", "SHELL")],
    "umask": umask,
    "limits": [resource.getrlimit(resource.RLIMIT_CORE), resource.getrlimit(resource.RLIMIT_NOFILE)],
    "folder": os.getcwd(),
    "capabilities": [line for line in open("/proc/self/status") if line.startswith(("CapEff", "CapInh", "CapPrm"))],
    "socket": [place.stat().st_uid, stat.S_IMODE(place.stat().st_mode)],
    "others": {path: reached(path) for path in others},
}))
numbers.release()
rank.close()
"""
)


class Users:
    """A service whose node runs ranks as their submitters, two of whom have accounts."""

    def __init__(self, service, places):
        self.service = service
        self.places = places
        self.one, self.two = other_users.users()
        self.out = places / "out"  # of the first user
        self.out.mkdir()
        os.chown(self.out, self.one.pw_uid, self.one.pw_gid)
        service.start_coordinator()
        with self.administrator() as client:
            self.tokens = {
                user.pw_name: client.accounts.create(user.pw_name, "submit", "team", unix_user=user.pw_name).secret
                for user in (self.one, self.two)
            }
            self.tokens["none"] = client.accounts.create("none", "submit", "team").secret
        self.options = ("--run-as", "submitter", "--rank-dir", str(places / "ranks"), "--rank-limits", LIMITS)
        rights = ",".join(("-all", *(f"+{name}" for name in capabilities())))
        bounded = ["setpriv", "--no-new-privs", f"--bounding-set={rights}"]
        self.node = service.start_node("node-u", 8, *self.options, prefix=[*self.way(), *bounded])

    def way(self):
        """The beginning of a command in which others can run Python."""
        return other_users.way(Path(tempfile.mkdtemp(dir=self.service.sandbox.runtime)))

    def administrator(self):
        return Client(self.service.address, token=self.service._token.read_text())

    def client(self, name):
        return Client(self.service.address, token=self.tokens[name])

    def until(self, client, job_id, *states):
        found = []

        def reached():
            found[:] = [client.get(job_id)]
            return found[0].state in states

        self.service.sandbox.wait_until(reached, DEADLINE_S, lambda: f"{found} {self.log()}")
        return found[0]

    def log(self):
        return "".join(path.read_text() for path in self.service.sandbox.runtime.glob("daemon-*.log"))


DROP_IN = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "bagua-node-run-as-submitter.conf"
DEADLINE_S = 300.0
LIMITS = "core=0,nofile=4000"
ENDED = (common_pb2.JOB_STATE_SUCCEEDED, common_pb2.JOB_STATE_FAILED, common_pb2.JOB_STATE_CANCELLED)


def capabilities():
    """Of a daemon below systemd, as setpriv calls them."""
    (line,) = re.findall(r"^CapabilityBoundingSet=(.+)$", DROP_IN.read_text(), re.MULTILINE)
    return [name.removeprefix("CAP_").lower() for name in line.split()]


def output(client, job_id):
    return b"".join(chunk.data for chunk in client.logs(job_id)).decode()


@pytest.fixture(scope="module")
def users(core, tmp_path_factory):
    from tests.e2e.conftest import Service, sandbox_in

    places = Path(tempfile.mkdtemp(prefix="bgu-", dir="/tmp"))
    places.chmod(0o755)
    try:
        with sandbox_in(tmp_path_factory.mktemp("users")) as sandbox:
            yield Users(Service(sandbox), places)
    finally:
        shutil.rmtree(places)


def test_a_job_runs_as_its_user_and_reaches_nothing_of_another(users):
    sandbox = users.service.sandbox
    project = sandbox.folder / "project"
    project.mkdir(exist_ok=True)
    (project / "train.py").write_text(FACTS)
    secret = users.places / "secret"
    secret.write_text("of the second\n")
    secret.chmod(0o600)
    os.chown(secret, users.two.pw_uid, users.two.pw_gid)
    with users.client(users.two.pw_name) as two:
        words = ["-c", 'echo "the other has $HF_TOKEN"; setsid sleep 1000 & wait']
        other = two.submit(
            script="/bin/sh", args=words, no_python=True, workdir="/", secret_env={"HF_TOKEN": str(secret)}
        )
        other = users.until(two, other.job_id, common_pb2.JOB_STATE_RUNNING)
        sandbox.wait_until(lambda: "of the second" in output(two, other.job_id), DEADLINE_S)
        rank = other.ranks[0]
        (place,) = (users.places / "ranks").glob(f"*/{other.job_id}")
        closed = [rank.log_path, secret, f"/proc/{rank.pid}/environ", place / "meeting", users.service._token]
        with users.client(users.one.pw_name) as one:
            job = one.submit(
                script="train.py",
                args=[str(path) for path in closed],
                nproc_per_node=2,
                working_dir=project,
                env={"OUT": str(users.out)},
            )
            ended = users.until(one, job.job_id, *ENDED)
            said = output(one, job.job_id)
            assert ended.state == common_pb2.JOB_STATE_SUCCEEDED, f"{ended} {said} {users.log()}"
            # A namespace shares logs, through the service alone.
            assert "the other" in output(one, other.job_id)
        found = [json.loads(line.partition("FACTS ")[2]) for line in said.splitlines() if line.startswith("FACTS")]
        assert len(found) == 2 and said.count("a word to /dev/stderr") == 2
        user = users.one
        for facts in found:
            assert facts["ids"] == [user.pw_uid] * 3 + [user.pw_gid] * 3
            assert facts["groups"] == sorted(os.getgrouplist(user.pw_name, user.pw_gid))
            assert facts["user"] == [user.pw_name, user.pw_name, user.pw_dir, user.pw_shell]
            assert facts["umask"] == 0o022 and facts["limits"] == [[0, 0], [4000, 4000]]
            assert all(int(line.split()[1], 16) == 0 for line in facts["capabilities"])
            assert facts["socket"] == [user.pw_uid, 0o600]
            assert Path(facts["folder"]).is_relative_to(users.places / "ranks")
            assert facts["others"] == dict.fromkeys(map(str, closed), "PermissionError")
        written = [users.out / "model-0", users.out / "model-1"]
        assert [path.stat().st_uid for path in written] == [user.pw_uid] * 2
        log = Path(ended.ranks[0].log_path).stat()
        assert (log.st_uid, stat.S_IMODE(log.st_mode)) == (0, 0o600)
        assert not list((users.places / "ranks").glob(f"*/{job.job_id}")), "its place goes with the job"
        two.cancel(other.job_id)
        users.until(two, other.job_id, *ENDED)
    assert not any("sleep 1000" in line for line in sandbox.marked().values()), "root ends what another user left"


def test_jobs_without_a_user_of_their_own_are_refused(users):
    def reason(client, **words):
        job = client.submit(script="/bin/true", no_python=True, **{"workdir": "/", **words})
        ended = users.until(client, job.job_id, *ENDED)
        assert ended.state == common_pb2.JOB_STATE_FAILED
        return str(ended.reason)

    secret = users.places / "roots"
    secret.write_text("x")
    secret.chmod(0o600)
    closed = users.places / "closed"
    closed.mkdir(mode=0o700)
    with users.administrator() as administrator, users.client("none") as none, users.client(users.one.pw_name) as one:
        assert "this job has none" in reason(administrator)
        assert "this job has none" in reason(none)
        assert "which is root: not without --allow-root" in reason(administrator, unix_user="root")
        assert "there is no Unix user nobody-of-that-name" in reason(administrator, unix_user="nobody-of-that-name")
        # root's files are not read, nor looked at, for another
        assert "Permission denied" in reason(one, secret_env={"A": str(secret)})
        assert "Permission denied" in reason(one, workdir=str(closed))


def test_who_is_not_root_can_not_choose_users(users):
    other = users.one
    state = users.places / "state"
    state.mkdir(mode=0o700)
    os.chown(state, other.pw_uid, other.pw_gid)
    become = ["setpriv", f"--reuid={other.pw_uid}", f"--regid={other.pw_gid}", "--clear-groups"]
    command = [*users.way(), *become, *users.service.sandbox.command, "daemon", *users.options]
    environment = {**os.environ, "BAGUA_STATE_DIR": str(state), "BAGUA_RUNTIME_DIR": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, cwd="/")
    assert done.returncode == 2
    assert f"needs a daemon that root starts: this one runs as user {other.pw_uid}" in done.stderr


@pytest.mark.full
def test_ranks_of_a_user_outlive_the_daemon(users):
    (users.out / "elastic.py").write_text(PROGRAM)
    with users.client(users.one.pw_name) as one:
        job = one.submit(script="elastic.py", nproc_per_node=2, elastic=True, workdir=users.out)
        users.service.sandbox.wait_until(lambda: output(one, job.job_id).count("generation 1 ") == 2, DEADLINE_S)
        before = one.get(job.job_id).ranks
        os.kill(daemon_pid(users.node.pid), signal.SIGKILL)
        users.service.sandbox.wait_until(lambda: output(one, job.job_id).count("generation 2 ") == 2, DEADLINE_S)
        after = one.get(job.job_id).ranks
        assert [rank.pid for rank in after] == [rank.pid for rank in before]
        assert {Path(f"/proc/{rank.pid}").stat().st_uid for rank in after} == {users.one.pw_uid}
        (users.out / "stop").touch()
        assert users.until(one, job.job_id, *ENDED).state == common_pb2.JOB_STATE_SUCCEEDED


@pytest.mark.full
def test_checkpoints_of_a_user(users):
    (users.out / "checkpoints.py").write_text(CHECKPOINTS)
    with users.client(users.one.pw_name) as one:
        for begun in (0, 2):
            folder = users.out / "checkpoints"
            job = one.submit(script="checkpoints.py", nproc_per_node=2, workdir=users.out, checkpoint_dir=folder)
            ended = users.until(one, job.job_id, *ENDED)
            said = output(one, job.job_id)
            assert ended.state == common_pb2.JOB_STATE_SUCCEEDED and f"begins with {begun}" in said, said
    assert {path.stat().st_uid for path in folder.rglob("*")} == {users.one.pw_uid}
