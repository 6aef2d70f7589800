"""`bagua chaos`: the order of faults, and what it judges."""

import contextlib
import errno
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from bagua.base.address import join_address, split_address
from bagua.base.errors import ServiceError
from bagua.chaos import sockets
from bagua.chaos.diary import Diary, Epoch, violations
from bagua.chaos.firewall import Firewall, reason_against
from bagua.chaos.plan import KINDS, Fault, Plan
from bagua.chaos.relay import Relay
from bagua.cli.faults import campaign
from bagua.proto import common_pb2

SIOCOUTQNSD = 0x894B  # bytes of a connection that were not sent yet


def test_each_kind_comes_once_before_one_comes_again():
    plan, whole = Plan(7, list(KINDS)), {"a": 2, "b": 2, "c": 2}
    first = [plan.next(whole) for _ in KINDS]
    second = [plan.next(whole) for _ in KINDS]
    assert all(Counter(fault.kind for fault in part if fault) == Counter(list(KINDS)) for part in (first, second))
    again = Plan(7, list(KINDS))
    assert [again.next(whole) for _ in KINDS] == first
    assert all(fault and whole[list(whole)[fault.node]] > fault.rank for fault in first)


def test_replicas_that_differ():
    """A rank that makes no step after an epoch was put out: it may have seen a step that the others repeat."""
    right, wrong = (Epoch(digest, lost=0, doubled=0, whole=0, at=1.0) for digest in ("a", "b"))
    others, out, goes_on = Diary([0.5, 1.5], {0: right}), Diary([0.5], {0: wrong}), Diary([0.5, 1.5], {0: wrong})
    assert violations({1: others, 2: out}) == []
    for diaries in ({1: others, 2: goes_on}, {1: others, 2: out, 3: goes_on}, {1: Diary([0.5], {0: right}), 2: out}):
        assert [breach.promise for breach in violations(diaries)] == ["different"]


def test_an_address_that_moves():
    """A connection ends when it leaves the coordinator that it was to."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        relay = Relay()
        stack.callback(relay.close)
        for listener in listeners:
            relay.move(join_address(*listener.getsockname()))
            near = stack.enter_context(socket.create_connection(split_address(relay.address), 10.0))
            far = stack.enter_context(listener.accept()[0])
            far.settimeout(10.0)
            near.sendall(b"to it")
            assert far.recv(100) == b"to it"
            far.sendall(b"and back")
            assert near.recv(100) == b"and back"
            relay.move("127.0.0.1:1")
            assert (near.recv(100), far.recv(100)) == (b"", b"")


def test_faults_of_a_connection():
    me, before = os.getpid(), set(sockets.connections(os.getpid(), but=0))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        port = far.getsockname()[1]
        assert set(sockets.connections(me, but=0)) - before == {near.fileno(), far.fileno()}
        assert set(sockets.connections(me, but=port)) == before
        if before:
            return  # connections of the test runner: they are left alone
        near.settimeout(10.0)
        far.settimeout(10.0)
        with sockets.copies(me, 0) as found, sockets.held(found):
            unsent = 0
            for _ in range(20):  # the kernel sends it after 0.2 s: this process may stand still for so long
                near.sendall(b"held")
                unsent = max(unsent, int.from_bytes(fcntl.ioctl(near, SIOCOUTQNSD, bytes(4)), "little"))
            assert unsent
        assert far.recv(80, socket.MSG_WAITALL) == b"held" * 20
        assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK) == 0
        assert sockets.delay(me, 0, 0.0, 0.001) == 2
        assert sockets.corrupt(me, 0, b"garbage") == 1
        assert sockets.pace(me, 0, 1000) == sockets.pace(me, 0, sockets.UNLIMITED) == 2
        assert sockets.cut(me, 0) == 2
        assert sorted([near.recv(100) + near.recv(100), far.recv(100) + far.recv(100)]) == [b"", b"garbage"]
        assert sockets.connections(me, but=0) == []


CONNECT = """
import errno, socket, sys
for host, port in zip(sys.argv[1::2], sys.argv[2::2]):
    with socket.socket() as one:
        one.settimeout(0.3)
        found = one.connect_ex((host, int(port)))
        print(errno.errorcode.get(found, "no answer" if found else one.getsockname()[0]))
"""


def test_a_firewall():
    """The coordinator's port can be reached whatever is lost or refused, a host its own addresses whatever is lost, and
    connections come from the address."""
    if reason := reason_against():
        pytest.skip(f"no firewall here: {reason}")
    with contextlib.ExitStack() as stack:
        coordinator, near, far, *own = (
            stack.enter_context(socket.create_server((host, 0))).getsockname()
            for host in ("127.0.0.1", "127.0.0.3", "127.0.0.4", "127.0.0.1", "127.0.0.7")
        )
        firewall = Firewall("test", "127.0.0.7", coordinator[1])
        stack.callback(firewall.close)

        def connect(*addresses):
            words = [str(word) for address in addresses for word in address]
            command = [*firewall.prefix, sys.executable, "-S", "-c", CONNECT, *words]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

        mine = "127.0.0.7"
        for name in ("EACCES", "EPERM", "ENETDOWN", "EADDRNOTAVAIL"):
            with firewall.refused(getattr(errno, name)):
                assert connect(coordinator, near) == [mine, name]
        for sides in (("in",), ("out",)):
            with firewall.dropped(sides):
                assert connect(coordinator, *own) == [mine] * 3 and connect(near)[0] in ("EAGAIN", "EINPROGRESS")
            with firewall.dropped(sides, near[0]):
                assert connect(far)[0] == mine and connect(near)[0] in ("EAGAIN", "EINPROGRESS")
        assert connect(near, far) == [mine, mine]


@pytest.mark.parametrize(
    ("kind", "reason", "alarm"),
    [
        ("kill-coordinator", "node a has not been heard of for 31.5 s", campaign.LateError),
        ("kill-rank", "node a has not been heard of for 31.5 s", ServiceError),
        ("kill-coordinator", "rank 0 on node a exited with code 1", ServiceError),
    ],
)
def test_a_coordinator_that_starts_too_late_on_a_slow_machine_is_no_alarm(monkeypatch, tmp_path, kind, reason, alarm):
    """The nodes are right to end all ranks then. Nothing else that ends a job is excused by a long fault."""

    def never(*_):
        raise ServiceError("The job has ended.")

    monkeypatch.setattr(campaign, "until", never)
    job = SimpleNamespace(state=common_pb2.JOB_STATE_FAILED, reason=reason)
    cluster = SimpleNamespace(job=lambda _: job)
    wanted = campaign.Wanted(1.0, 1, 0, (kind,), 1, 1, 0, True)
    chaos = campaign.Chaos(wanted, cluster, tmp_path, print)
    with pytest.raises(alarm):
        chaos._wait_for_those_left(Fault(kind, 0, 0, True, 0.0), campaign.Trained("job", tmp_path, 1, {}), 0.0)


def test_another_job_begins_after_one_that_was_excused(monkeypatch, tmp_path):
    def late(*_):
        raise campaign.LateError("kill-coordinator took longer than 30 s on this machine")

    job = SimpleNamespace(job_id="job", state=common_pb2.JOB_STATE_RUNNING, ranks=())
    cluster = SimpleNamespace(call=lambda _: job, job=lambda _: job, nodes={"a": None})
    chaos = campaign.Chaos(campaign.Wanted(60.0, 9, 0, ("kill-coordinator",), 1, 1, 0, True), cluster, tmp_path, print)
    monkeypatch.setattr(campaign, "until", lambda *_: None)
    monkeypatch.setattr(chaos._plan, "next", lambda _: Fault("kill-coordinator", 0, 0, True, 0.0))
    monkeypatch.setattr(chaos, "_play", late)
    for count in (1, 2):
        chaos._one_job()
        assert chaos.findings.jobs == count


@pytest.mark.parametrize(("seconds", "excused"), [(5.0, False), (22.0, True)])
def test_nodes_count_from_an_answer_before_the_fault(monkeypatch, tmp_path, seconds, excused):
    """Ranks that end while the coordinator is away for less than the limit may have been right to do so."""
    wanted = campaign.Wanted(1.0, 1, 0, ("kill-coordinator",), 1, 1, 0, True)
    cluster = SimpleNamespace(connected=lambda _: True)
    chaos = campaign.Chaos(wanted, cluster, tmp_path, print)
    looked = []

    def ended(*_):
        raise ServiceError("Ranks ended.")

    began = time.monotonic() - seconds
    chaos._injector = SimpleNamespace(play=lambda *_: ("", began, began), repair=lambda *_: None)
    monkeypatch.setattr(chaos, "_wait_steps", ended)
    monkeypatch.setattr(chaos, "_wait_for_those_left", lambda *_: looked.append(True))
    monkeypatch.setattr(chaos, "_note", lambda *_: None)
    with contextlib.nullcontext() if excused else pytest.raises(ServiceError):
        chaos._play(Fault("kill-coordinator", 0, 0, True, 0.0), campaign.Trained("job", tmp_path, 1, {}))
    assert bool(looked) is excused
