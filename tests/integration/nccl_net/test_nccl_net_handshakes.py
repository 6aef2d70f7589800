"""Strangers at the port: whatever they send, the right peer connects, and nobody else does."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from netrig import machine
from netrig.fake import Comm, FakeNccl, Listener, NetError, meet, post, wait

STRANGERS = 1500


class Door:
    """A listener and the port that it opened."""

    def __init__(self, nccl: FakeNccl) -> None:
        before = machine.listening()
        self.nccl, self.listener = nccl, nccl.listen()
        (self.address,) = machine.listening() - before

    def stranger(self, data: bytes = b"") -> socket.socket:
        """A connection on which ``data`` was sent."""
        made = socket.create_connection(self.address, timeout=30)
        made.settimeout(30)
        if data:
            made.sendall(data)
        return made

    def nobody(self, calls: int = 20) -> None:
        for _ in range(calls):
            assert self.listener.accept() is None, "a stranger was accepted"

    def check(self) -> None:
        """The right peer gets in, and bytes get through."""
        sender, receiver = meet(self.nccl.connector(self.listener.handle), self.listener)
        check_pair(sender, receiver)


def check_pair(sender: Comm, receiver: Comm) -> None:
    for size in (64, 500_000):
        data = random.Random(size).randbytes(size)
        target = receiver.memory(size)
        wait(post(receiver.irecv, target), post(sender.isend, sender.memory(data)))
        assert target.view == data


@pytest.fixture
def door(nccl: FakeNccl) -> Iterator[Door]:
    yield Door(nccl)


def hung_up(stranger: socket.socket) -> bool:
    """Whether the other end closed this connection, which it must within the deadline."""
    try:
        return stranger.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("seed", range(4))
def test_garbage_is_dropped(door: Door, seed: int) -> None:
    numbers = random.Random(seed)
    for _ in range(25):
        data = numbers.randbytes(numbers.choice((1, 4, 16, 63, 64, 65, 128, 4096)))
        door.stranger(data).close()
        door.nobody(2)
    door.check()


def test_whoever_speaks_another_protocol_is_hung_up_on(door: Door) -> None:
    for words in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(512), b"\x16\x03\x01" + bytes(509), b"\xff" * 4096):
        with closing(door.stranger(words)) as stranger:
            stranger.setblocking(False)
            machine.eventually(lambda s=stranger: door.listener.accept() is None and seen_end(s), "no end")  # type: ignore[misc]
    door.check()


def seen_end(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_strangers_that_say_nothing_hinder_nobody(door: Door) -> None:
    """Slow ones, too: a byte now and then must not keep the place of the right peer."""
    with ExitStack() as stack:
        silent = [stack.enter_context(closing(door.stranger())) for _ in range(100)]
        for stranger in silent[:50]:
            stranger.sendall(b"B")
            door.nobody(1)
        door.check()
        for stranger in silent:
            stranger.close()
    door.check()


def test_a_right_beginning_is_not_enough(nccl: FakeNccl, door: Door) -> None:
    """A recorded handshake, cut anywhere, or with any byte changed, opens nothing."""
    for hello in recorded_hello(nccl):
        numbers = random.Random(1)
        for position in range(len(hello)):
            changed = bytearray(hello)
            changed[position] ^= 1 << numbers.randrange(8)
            door.stranger(bytes(changed)).close()
            door.stranger(hello[:position]).close()
            door.nobody(1)
    door.check()


def recorded_hello(nccl: FakeNccl) -> list[bytes]:
    """Returns the first bytes that a connecting plugin sends to a port of ours."""
    before = machine.listening()
    listener = nccl.listen()
    ((_, port),) = machine.listening() - before
    with socket.create_server(("127.0.0.1", 0)) as ours:
        ours.settimeout(30)
        handle = listener.handle.replace(port.to_bytes(2, "little"), ours.getsockname()[1].to_bytes(2, "little"), 1)
        if handle == listener.handle:
            handle = handle.replace(port.to_bytes(2, "big"), ours.getsockname()[1].to_bytes(2, "big"), 1)
        connector = nccl.connector(handle)
        found = []
        assert connector.connect() is None
        with closing(ours.accept()[0]) as first:
            first.settimeout(0.01)
            said = b""
            while len(said) < 64:
                assert connector.connect() is None
                try:
                    said += first.recv(4096)
                except TimeoutError:
                    continue
            found.append(said)
    listener.close()
    return found


def test_a_wrong_nonce_is_refused(nccl: FakeNccl, door: Door) -> None:
    """Handles of which one byte is another reach nobody, and the right one still does."""
    right = door.listener.handle
    used = [index for index, byte in enumerate(right) if byte]
    for index in used:
        wrong = bytearray(right)
        wrong[index] ^= 0x55
        attempt(nccl, bytes(wrong), door.listener)
    door.check()


def attempt(nccl: FakeNccl, handle: bytes, listener: Listener) -> None:
    """Some calls with a wrong handle: an error, or nothing yet, but no connection."""
    try:
        connector = nccl.connector(handle)
        for _ in range(30):
            assert connector.connect() is None, "a wrong handle connects"
            assert listener.accept() is None, "a wrong handle is accepted"
    except NetError:
        pass


def test_a_handle_of_another_listener(nccl: FakeNccl) -> None:
    """Two listeners, their connections made crosswise in time: each gets its own."""
    first, second = nccl.listen(), nccl.listen()
    to_second, to_first = nccl.connector(second.handle), nccl.connector(first.handle)
    assert first.handle != second.handle
    pair_of_first = meet(to_first, first)
    pair_of_second = meet(to_second, second)
    for sender, receiver in (pair_of_first, pair_of_second):
        check_pair(sender, receiver)


def test_thousands_of_strangers(door: Door) -> None:
    """They come and go while the right peer connects: it gets in, and no descriptor is left of them."""
    before = machine.descriptors()
    connector = door.nccl.connector(door.listener.handle)
    sender: Comm | None = None
    receiver: Comm | None = None
    numbers = random.Random(7)
    for index in range(STRANGERS):
        stranger = door.stranger()
        if index % 3 == 0:
            stranger.sendall(numbers.randbytes(64))
        stranger.close()
        accepted = door.listener.accept()
        assert not (accepted and receiver), "a stranger was accepted"
        receiver = receiver or accepted
        if index > STRANGERS // 2:
            sender = sender or connector.connect()
    while sender is None or receiver is None:
        receiver = receiver or door.listener.accept()
        sender = sender or connector.connect()
    check_pair(sender, receiver)
    sender.close()
    receiver.close()

    def drained() -> bool:
        door.listener.accept()
        return machine.descriptors() <= before

    machine.eventually(drained, "strangers keep descriptors")


def test_a_listener_that_many_beset_closes(door: Door) -> None:
    before = machine.descriptors()
    strangers = [door.stranger(b"B" * (index % 64)) for index in range(60)]
    door.nobody(80)
    door.listener.close()
    for stranger in strangers:
        stranger.close()
    machine.eventually(lambda: machine.descriptors() < before, "descriptors of strangers are left")
