"""The wire between keeper and daemon, and the keeper's command line. Real processes are in integration/node."""

import os
import socket
import subprocess
import sys

import pytest

from bagua.daemon.node.keeper.keeper import Keeper
from bagua.daemon.node.keeper.wire import Wire


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    one, other = Wire(ours), Wire(theirs)
    yield one, other
    one.close()
    other.close()


def test_messages_keep_their_order_and_their_descriptors(ends):
    one, other = ends
    readers = []
    for number in range(3):
        reader, writer = os.pipe()
        one.send({"number": number}, [writer] * number)
        os.close(writer)
        readers.append(reader)
    found = other.receive()
    assert [message for message, _ in found] == [{"number": number} for number in range(3)]
    assert [len(descriptors) for _, descriptors in found] == [0, 1, 2]
    for number, (_, descriptors) in enumerate(found):
        for descriptor in descriptors:
            assert not os.get_inheritable(descriptor)
            os.write(descriptor, bytes([number]))
            os.close(descriptor)
    assert [os.read(reader, 9) for reader in readers] == [b"", b"\x01", b"\x02\x02"], "nobody else has them"
    for reader in readers:
        os.close(reader)


def test_what_does_not_fit_is_sent_later(ends):
    one, other = ends
    large = "x" * (4 << 20)
    reader, writer = os.pipe()
    one.send({"text": large}, [reader])
    one.send({"text": "after"}, [writer])
    assert not one.idle and other.receive() == []
    found = []
    while len(found) < 2:
        one.flush()
        found += other.receive()
    assert one.idle and [message["text"] for message, _ in found] == [large, "after"]
    for descriptor in (reader, writer, *(descriptor for _, got in found for descriptor in got)):
        os.close(descriptor)


def test_the_last_words_of_an_end_are_heard(ends):
    one, other = ends
    one.send({"text": "bye"})
    one.close()
    assert other.receive() == [({"text": "bye"}, [])]
    with pytest.raises(EOFError):
        other.receive()
    with pytest.raises(OSError):
        other.send({"text": "too late"})


def test_the_last_words_of_a_daemon_are_heard_though_it_hears_nothing_more(ends):
    one, other = ends
    keeper = Keeper(lambda fd, first: ([], []), restart=True)
    keeper._wire = one
    other.send({"do": "note", "job": "job", "note": "words"})
    other.close()
    keeper._say({"say": "exited", "pid": 1, "code": 0})
    keeper._hear()
    assert keeper._notes == {"job": "words"}


def alone(code):
    """Runs ``code`` in a process of its own, where ``exhaust()`` leaves no descriptor; what it prints."""
    head = """
import os, resource, socket, sys
from bagua.daemon.node.keeper import keeper
from bagua.daemon.node.keeper.keeper import Keeper
from bagua.daemon.node.keeper.wire import Wire
one, other = (Wire(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
def exhaust():
    first_free = os.dup(0)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
def restore():
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
"""
    done = subprocess.run([sys.executable, "-P", "-c", head + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_message_whose_descriptors_find_no_room_is_told_and_the_next_ones_keep_theirs():
    code = """
readers = [os.pipe() for _ in range(3)]
one.send({"number": 1}, [readers[0][0], readers[0][1]])
one.send({"number": 2})
exhaust()
print(other.receive())
one.send({"number": 3}, [readers[1][1]])  # needs no copy: it is sent at once
print(other.receive())
restore()
one.send({"number": 4}, [readers[2][1]])
(message, (writer,)), = other.receive()
os.write(writer, b"x")
print(message, os.read(readers[2][0], 9))
"""
    assert alone(code).splitlines() == [
        "[({'number': 1}, None), ({'number': 2}, [])]",
        "[({'number': 3}, None)]",
        "{'number': 4} b'x'",
    ]


def test_a_keeper_without_descriptors_refuses_with_words_and_keeps_the_rest():
    code = """
kept = Keeper(lambda fd, first: ([], []), restart=True)
kept._wire = one
pipe = os.pipe()
def heard():
    kept._hear()
    assert kept._wire is one
    return other.receive()
other.send({"do": "memory", "job": "first"}, [pipe[0]])
assert heard() == [] and list(kept._memory) == ["first"]
exhaust()
other.send({"do": "spawn", "id": 7, "name": "job/0", "argv": [], "env": {}, "cwd": ""}, [*pipe, *pipe])
other.send({"do": "memory", "job": "second"}, [pipe[0]])
other.send({"do": "connections"}, [pipe[0]])
other.send({"do": "note", "job": "job", "note": "words"})
(spawned, _), *others = heard()
print(spawned["id"], spawned["errno"], spawned["text"])
for refused, _ in others:
    print(refused["say"], refused["what"], refused["job"])
print(kept._below() == [], kept._notes, list(kept._memory))
restore()
other.send({"do": "memory", "job": "second"}, [pipe[0]])
assert heard() == []
print(list(kept._memory))
"""
    spawned, *rest = alone(code).splitlines()
    assert spawned.startswith("7 24 the keeper of this node has no file descriptor left (its limit is ")
    assert rest == [
        "not kept memory second",
        "not kept connections ",
        "True {'job': 'words'} ['first']",
        "['first', 'second']",
    ]
