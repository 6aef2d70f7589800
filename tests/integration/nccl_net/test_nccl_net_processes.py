"""Two processes: NCCL's usual case, and the death of one of them."""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from netrig import machine
from netrig.fake import Comm, FakeNccl, NetError, Request, meet, post, wait
from netrig.peer import Peer


@pytest.fixture
def peer(library: Path, logger_library: Path) -> Iterator[Peer]:
    with Peer(library, logger_library) as made:
        yield made


def connect_to(nccl: FakeNccl, peer: Peer) -> tuple[Comm, Comm]:
    """(sender to the peer, receiver from it); there they are number 0 and 1."""
    handle = bytes.fromhex(peer.ask("listen"))
    peer.tell("accept")
    connector, sender = nccl.connector(handle), None
    while sender is None:
        sender = connector.connect()
    peer.answer()
    listener, receiver = nccl.listen(), None
    peer.tell("connect", handle=listener.handle.hex())
    while receiver is None:
        receiver = listener.accept()
    peer.answer()
    listener.close()
    return sender, receiver


def test_there_and_back(nccl: FakeNccl, peer: Peer) -> None:
    sender, receiver = connect_to(nccl, peer)
    for size in (0, 1, 4096, 100_000, 20_000_000):
        peer.tell("receive", comm=0, size=size)
        peer.tell("send", comm=1, size=size, pattern=7)
        target = receiver.memory(size)
        received = post(receiver.irecv, target)
        sent = post(sender.isend, sender.memory(b"\x05" * size))
        peer.tell("wait")
        wait(received, sent)
        peer.answer(), peer.answer()
        low = min(size, 1)
        assert peer.answer() == [[size, 5 * low, 5 * low], [size, 7 * low, 7 * low]]
        assert bytes(target.view) == b"\x07" * size
    assert not peer.ask("finish")


def until_error(requests: list[Request]) -> NetError:
    """Tests them in turn until one says that it failed. A hang fails the test."""
    with pytest.raises(NetError) as caught:
        wait(*requests)
    return caught.value


@pytest.mark.parametrize("size", (100, 30_000_000))
def test_a_peer_that_is_killed(nccl: FakeNccl, peer: Peer, size: int) -> None:
    """Its death is an error of the next test, sending as well as receiving, and all goes back to the system."""
    before = machine.descriptors(), machine.threads()
    sender, receiver = connect_to(nccl, peer)
    peer.ask("receive", comm=0, size=size)
    received = [post(receiver.irecv, receiver.memory(size)) for _ in range(3)]
    sent = [post(sender.isend, sender.memory(size)) for _ in range(20)]
    for _ in range(50):
        for request in [*sent, *received]:
            if not request.done:
                request.test()
    peer.kill()
    error = until_error([request for request in received if not request.done])
    assert error.code != 0
    with pytest.raises(NetError):  # what was sent may lie in the kernel's buffers: then a later message fails
        while True:
            wait(*(request for request in sent if not request.done))
            sent = [post(sender.isend, sender.memory(size))]
    assert nccl.logger.warnings(), "nobody was told why"
    sender.close()
    receiver.close()
    machine.eventually(lambda: machine.descriptors() <= before[0], "descriptors are left")


def test_after_an_error_everything_is_one(nccl: FakeNccl, peer: Peer) -> None:
    """Requests that follow fail at once, too, and none hangs."""
    sender, receiver = connect_to(nccl, peer)
    peer.kill()
    until_error([post(receiver.irecv, receiver.memory(10))])
    for _ in range(40):
        with pytest.raises(NetError):
            wait(post(receiver.irecv, receiver.memory(10)))
    for _ in range(40):
        try:
            wait(post(sender.isend, sender.memory(1000)))
        except NetError:
            break
    else:
        pytest.fail("40 messages were sent to a dead process")


def test_a_peer_that_stops_for_a_while_is_no_error(nccl: FakeNccl, peer: Peer) -> None:
    sender, _ = connect_to(nccl, peer)
    peer.ask("receive", comm=0, size=8_000_000)
    os.kill(peer.process.pid, signal.SIGSTOP)
    sent = post(sender.isend, sender.memory(b"\x09" * 8_000_000))
    for _ in range(2000):
        assert not sent.test(), "8 MB can't have gone to a process that stands still"
    os.kill(peer.process.pid, signal.SIGCONT)
    peer.tell("wait")
    wait(sent)
    assert peer.answer() == [[8_000_000, 9, 9]]


@pytest.mark.parametrize("closes", ("sender", "receiver"))
def test_a_close_in_the_middle_is_an_error_on_the_other_side(nccl: FakeNccl, closes: str) -> None:
    sender, receiver = nccl.pair()
    received = [post(receiver.irecv, receiver.memory(10_000_000)) for _ in range(2)]
    sent = post(sender.isend, sender.memory(10_000_000))
    for _ in range(5):
        sent.test()
        received[0].test()
    if closes == "sender":
        sender.close()
        until_error(received)
    else:
        receiver.close()
        until_error([sent])


def test_a_close_with_nothing_under_way_is_no_error(nccl: FakeNccl) -> None:
    sender, receiver = nccl.pair()
    target = receiver.memory(100_000)
    received, sent = post(receiver.irecv, target), post(sender.isend, sender.memory(b"z" * 100_000))
    wait(sent)
    sender.close()
    wait(received)
    assert bytes(target.view) == b"z" * 100_000
    assert not nccl.logger.warnings()


def test_a_listener_that_is_gone(nccl: FakeNccl, library: Path, logger_library: Path) -> None:
    """Connecting to it is tried again for a while, and ends with an error and words."""
    listener = nccl.listen()
    listener.close()
    with Peer(library, logger_library, {"BAGUA_NET_CONNECT_TIMEOUT": "1"}) as peer:
        code, warnings = peer.ask("connect_in_vain", handle=listener.handle.hex())
    assert code
    assert any("127.0.0.1" in text for text in warnings), warnings


def test_connections_half_made_go_with_the_context(make: Callable[..., FakeNccl]) -> None:
    """NCCL has no call that gives up connecting: it finalizes."""
    before = machine.descriptors(), machine.threads()
    nccl = make(11)
    for _ in range(20):
        listener = nccl.listen()
        nccl.connector(listener.handle).connect()
        listener.accept()
        listener.close()
    nccl.finish()
    machine.eventually(lambda: (machine.descriptors(), machine.threads()) == before, "half connections are kept")
    nccl.start()


def test_everything_goes_back(make: Callable[..., FakeNccl]) -> None:
    """Connections come and go: descriptors and threads are as before, memory does not grow."""
    nccl = make(11)

    def once() -> None:
        sender, receiver = nccl.pair()
        source, target = sender.memory(300_000), receiver.memory(300_000)
        wait(post(receiver.irecv, target), post(sender.isend, source))
        post(receiver.irecv, target)  # closed while it waits
        source.release()
        sender.close()
        receiver.close()

    for _ in range(5):
        once()
    gc.collect()
    before = machine.descriptors(), machine.threads(), machine.resident_bytes()
    for turn in range(40):
        once()
        if turn % 10 == 0:
            gc.collect()
    machine.eventually(lambda: machine.descriptors() == before[0], "descriptors are left")
    assert machine.threads() == before[1]
    gc.collect()  # of the fake: requests and comms know each other
    assert machine.resident_bytes() - before[2] < 16 << 20


def test_finalize_leaves_nothing(make: Callable[..., FakeNccl], library: Path) -> None:
    """After the last context no thread is left: NCCL unloads the plugin."""
    threads, descriptors = machine.threads(), machine.descriptors()
    nccl = make(11)
    sender, receiver = nccl.pair()
    wait(post(receiver.irecv, receiver.memory(5_000_000)), post(sender.isend, sender.memory(5_000_000)))
    nccl.finish()
    machine.eventually(lambda: machine.threads() == threads, "threads are left")
    machine.eventually(lambda: machine.descriptors() == descriptors, "descriptors are left")
    nccl.start()


def test_a_data_socket_that_is_cut(nccl: FakeNccl) -> None:
    """A connection of which the network takes one socket away ends with an error, not with a hang or wrong bytes."""
    before = set(os.listdir("/proc/self/fd"))
    sender, receiver = nccl.pair()
    made = sorted(int(name) for name in set(os.listdir("/proc/self/fd")) - before)
    sockets = [number for number in made if is_connected(number)]
    victim = socket.socket(fileno=os.dup(sockets[-1]))
    victim.shutdown(socket.SHUT_RDWR)
    victim.close()
    received, sent = post(receiver.irecv, receiver.memory(30_000_000)), post(sender.isend, sender.memory(30_000_000))
    until_error([received, sent])


def is_connected(number: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    except OSError:
        return False


def test_meeting_twice(nccl: FakeNccl) -> None:
    """A second connection while the first is busy."""
    first = nccl.pair()
    received = post(first[1].irecv, first[1].memory(20_000_000))
    sent = post(first[0].isend, first[0].memory(b"\x01" * 20_000_000))
    listener = nccl.listen()
    second = meet(nccl.connector(listener.handle), listener)
    listener.close()
    wait(post(second[1].irecv, second[1].memory(10)), post(second[0].isend, second[0].memory(b"0123456789")))
    wait(received, sent)
