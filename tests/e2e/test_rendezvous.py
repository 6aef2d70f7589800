"""An attacker at the rendezvous store: he reads all that passes, changes it, and tries what he has learnt.

Two hosts on loopback meet at a store of torchrun's kind, through a relay that is the attacker's.
"""

from __future__ import annotations

import base64
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from rig.limits import SOON_S
from rig.peer_relay import Relay
from rig.ranks import forking
from torch.distributed import TCPStore

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError, ForbiddenError
from bagua.base.security import TlsFiles
from bagua.client import Client
from bagua.daemon.coordinator.admin.certs import make_certificates
from bagua.proto import common_pb2

DEADLINE_S = 120.0
SECRET = "7c4f0e5a91d2b3867c4f0e5a91d2b386"


def rank_meets(folder):
    """In a rank: joins, waits until it may go on, sums."""
    bagua.init_process_group()
    Path(folder, f"joined-{bagua.get_rank()}").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.05)
    tensor = torch.full((1000,), float(bagua.get_rank() + 1))
    bagua.allreduce_inplace(tensor)
    print("sum", int(tensor[0]))
    return int(tensor[0])


@dataclass(frozen=True)
class Ended:
    """A rank that has ended, and all that it printed."""

    code: int
    text: str


class Attacker(Relay):
    """``seen``: all bytes. ``tamper`` changes what ranks send."""

    def __init__(self, target, tamper):
        self.seen, self.tamper = bytearray(), tamper
        super().__init__(target)

    def change(self, data):
        self.seen += data
        return self.tamper(data)

    def change_answer(self, data):
        self.seen += data
        return data


class Hosts:
    """Two ranks on two hosts. They are forked: a rank that imports torch by itself costs two seconds of a core."""

    def __init__(self, sandbox, change=bytes):
        self.sandbox = sandbox
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.relay = Attacker(f"127.0.0.1:{self.store.port}", change)
        self.port = self.relay.address.rpartition(":")[2]
        self._ranks = []

    def start(self, *environments):
        folder = self.sandbox.folder
        for rank, environment in enumerate(environments):
            env = {
                "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port, "TORCHELASTIC_USE_AGENT_STORE": "True",
                "BAGUA_TORCH_DISTRIBUTED": "0", **environment,
            }  # fmt: skip
            arguments = json.dumps({"folder": str(folder)})
            command = [forking.RANK_MAIN, __file__, "rank_meets", folder / f"{rank}.pt", arguments]
            log = folder / f"rank-{rank}.log"
            with log.open("wb") as output:
                process = forking.server().fork(list(map(str, command)), {**self.sandbox.env, **env}, output.fileno())
            assert process is not None, "torch has started threads, so no rank can be forked"
            self._ranks.append((process, log))

    def finish(self):
        return [Ended(process.wait(DEADLINE_S), log.read_text()) for process, log in self._ranks]

    def close(self):
        for process, _ in self._ranks:
            process.kill()
        self.relay.close()


@pytest.fixture
def hosts(sandbox):
    made = []

    def make(change=bytes):
        made.append(Hosts(sandbox, change))
        return made[-1]

    yield make
    for one in made:
        one.close()


def secrets_of(runtime):
    """Everything secret that the job's services have written down, by name."""
    found = {"the job's secret": SECRET.encode()}
    for path in runtime.rglob("*"):
        if path.name == "token":
            found[str(path)] = path.read_bytes().strip()
        elif path.name == "key.pem":
            text = b"".join(path.read_bytes().splitlines()[1:-1])
            found[str(path)] = text
            found[f"{path} (DER)"] = base64.b64decode(text)
    return found


def coordinator_of(sandbox):
    """Where the coordinator listens."""
    pid = next(pid for pid, command in sandbox.marked().items() if "daemon.ephemeral" in command)
    found = [c.laddr for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return [(address.ip.removeprefix("::ffff:"), address.port) for address in found]


def attempts_to_submit(address, secrets, own):
    """All fail, even with the coordinator's token, which he can't know."""
    tokens = [value.decode() for name, value in secrets.items() if name.endswith("token")]
    for tls in (None, own):
        for token in ("guessed", *tokens):
            with Client(address, token=token, tls=tls) as client, pytest.raises(BaguaError):
                client.submit(common_pb2.JobSpec(entry="id", no_python=True, nnodes=1, nproc_per_node=1))


def test_who_reads_everything_learns_nothing_that_opens_a_door(hosts, sandbox, tmp_path):
    pair = hosts()
    pair.start(*[{"BAGUA_JOB_SECRET": SECRET}] * 2)
    sandbox.wait_until(lambda: all((sandbox.folder / f"joined-{rank}").exists() for rank in (0, 1)), 100)
    secrets = secrets_of(sandbox.runtime)
    seen = bytes(pair.relay.seen)
    messages = [base64.b64decode(text) for text in re.findall(rb'"message": "([A-Za-z0-9+/=]+)"', seen)]
    for name, secret in secrets.items():
        for text in (seen, *messages):
            assert secret not in text and base64.b64encode(secret) not in text, name
    # The scan looked at the right place, for the right things: a hello and a welcome; tokens and keys of both hosts.
    assert len(messages) >= 2
    assert [sum(name.endswith(kind) for name in secrets) for kind in ("token", "key.pem")] == [2, 2]
    assert not pair.store.check(["bagua/1/info"])
    ((host, port),) = coordinator_of(sandbox)
    assert host == "127.0.0.1"
    attempts_to_submit(f"{host}:{port}", secrets, make_certificates(tmp_path / "own", ["127.0.0.1"]))
    (folder,) = {path.parent for path in sandbox.runtime.rglob("cert.pem")} - {
        path.parent for path in sandbox.runtime.rglob("cert.pem") if (path.parent.parent / "coordinator").exists()
    }
    token = (folder.parent / "token").read_text()
    with Client(f"{host}:{port}", token=token, tls=TlsFiles.in_folder(folder)) as member:
        with pytest.raises(ForbiddenError, match="does not allow SubmitJob"):
            member.submit(common_pb2.JobSpec(entry="id", no_python=True, nnodes=1, nproc_per_node=1))
    (sandbox.folder / "go").touch()
    done = pair.finish()
    assert all(one.code == 0 and "sum 3\n" in one.text for one in done), "\n".join(one.text for one in done)
    assert all(secret not in pair.relay.seen for secret in secrets.values())
    sandbox.assert_all_gone(within=SOON_S)


def flip(number):
    """Changes one letter of the ``number``-th message between hosts."""
    passed = 0

    def change(data):
        nonlocal passed
        at = data.find(b'"message": "')
        if at < 0:
            return data
        passed += 1
        if passed != number:
            return data
        where = at + 100
        return data[:where] + (b"B" if data[where:][:1] == b"A" else b"A") + data[where + 1 :]

    return change


@pytest.mark.parametrize(
    "number, words",
    [(1, "Host 1 does not prove"), pytest.param(2, "first host's answer can't be trusted", marks=pytest.mark.full)],
)
def test_a_message_that_was_changed_ends_the_job_on_all_hosts(hosts, sandbox, number, words):
    pair = hosts(flip(number))
    pair.start(*[{"BAGUA_JOB_SECRET": SECRET}] * 2)
    refused(pair, words, "somebody changed the message")
    sandbox.assert_all_gone(within=SOON_S)


def test_a_host_with_another_secret_ends_the_job_on_all_hosts(hosts, sandbox):
    pair = hosts()
    pair.start({"BAGUA_JOB_SECRET": SECRET}, {"BAGUA_JOB_SECRET": SECRET[::-1]})
    refused(pair, "Host 1 does not prove", "BAGUA_JOB_SECRET")
    sandbox.assert_all_gone(within=SOON_S)


@pytest.mark.full
def test_a_secret_that_others_can_read_ends_the_job_on_all_hosts(hosts, sandbox, tmp_path):
    for name, mode in (("mine", 0o600), ("everybodys", 0o644)):
        (tmp_path / name).write_text(SECRET)
        (tmp_path / name).chmod(mode)
    pair = hosts()
    pair.start(*({"BAGUA_JOB_SECRET_FILE": str(tmp_path / name)} for name in ("mine", "everybodys")))
    refused(pair, "everybodys is open to other users of this machine", "chmod 600")
    sandbox.assert_all_gone(within=SOON_S)


def refused(pair, *words):
    """Both ranks end, each with all these words."""
    for done in pair.finish():
        assert done.code != 0 and all(word in done.text for word in words), done.text


@pytest.mark.full
def test_a_closed_network_does_without_and_says_so(hosts, sandbox):
    pair = hosts()
    (sandbox.folder / "go").touch()
    pair.start(*[{"BAGUA_INSECURE_RENDEZVOUS": "1"}] * 2)
    done = pair.finish()
    assert all(one.code == 0 and "sum 3\n" in one.text for one in done), "\n".join(one.text for one in done)
    assert all("BAGUA_INSECURE_RENDEZVOUS=1: whoever reaches MASTER_ADDR" in one.text for one in done)
    for name, secret in secrets_of(sandbox.runtime).items():
        assert secret not in pair.relay.seen, name
    sandbox.assert_all_gone(within=SOON_S)
