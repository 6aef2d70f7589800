"""The wire between keeper and daemon, and the keeper's command line. Real processes are in integration/node."""

from __future__ import annotations

import os
import socket

import pytest

from bagua.daemon.node.keeper import Keeper, _value, _without
from bagua.daemon.node.keeper_wire import Wire


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


def test_a_later_life_gets_no_descriptors_of_the_first():
    given = ["--name", "n", "--ready-fd", "7", "--leash=9", "--slots", "2"]
    assert (_value(given, "--ready-fd"), _value(given, "--leash"), _value(given, "--tls")) == ("7", "9", None)
    assert _without(given, ["--ready-fd", "--leash"]) == ["--name", "n", "--slots", "2"]


def test_the_last_words_of_a_daemon_are_heard_though_it_hears_nothing_more(ends):
    one, other = ends
    keeper = Keeper(lambda fd, first: ([], []), restart=True)
    keeper._wire = one
    other.send({"do": "note", "job": "job", "note": "words"})
    other.close()
    keeper._say({"say": "exited", "pid": 1, "code": 0})
    keeper._hear()
    assert keeper._notes == {"job": "words"}
