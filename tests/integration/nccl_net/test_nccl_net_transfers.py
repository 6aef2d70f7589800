"""Messages as NCCL sends them: every size, alignment and order, many at once, both directions."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

import pytest
from netrig import abi
from netrig.fake import Comm, FakeNccl, Memory, NetError, Request, meet, post, wait

SIZES = (0, 1, 3, 8, 63, 64, 65, 127, 1000, 4095, 4096, 4097, 65_535, 65_536, 65_537, 131_073, 1_000_003, 9_999_999)


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def transfer(sender: Comm, receiver: Comm, data: bytes, room: int | None = None, offset: int = 0) -> Memory:
    """Sends ``data`` into a buffer of ``room`` bytes and checks all that NCCL may expect."""
    room = len(data) if room is None else room
    source, target = sender.memory(data, offset), receiver.memory(room, offset)
    received, sent = post(receiver.irecv, target), post(sender.isend, source)
    wait(sent, received)
    assert (sent.size, received.size) == (len(data), len(data))
    assert target.view[: len(data)] == data
    assert bytes(target.view[len(data) :]) == b"\xee" * (room - len(data)), "written behind the message"
    for memory in (source, target):
        memory.check_guards()
        memory.release()
    return target


@pytest.mark.parametrize("size", SIZES)
def test_sizes(nccl: FakeNccl, size: int) -> None:
    sender, receiver = nccl.pair()
    transfer(sender, receiver, content(size))


@pytest.mark.parametrize("offset", (1, 7, 33))
def test_unaligned(nccl: FakeNccl, offset: int) -> None:
    sender, receiver = nccl.pair()
    for size in (1, 1001, 300_001):
        transfer(sender, receiver, content(size, offset), offset=offset)


@pytest.mark.parametrize("size", (0, 1, 5000, 2_000_000))
def test_a_buffer_larger_than_the_message(nccl: FakeNccl, size: int) -> None:
    sender, receiver = nccl.pair()
    transfer(sender, receiver, content(size), room=size + 1)
    transfer(sender, receiver, content(size), room=2 * size + 100_000)


@pytest.mark.parametrize("size", (10, 100_000, 4_000_000))
def test_a_message_larger_than_the_buffer_is_an_error(nccl: FakeNccl, size: int) -> None:
    """And nothing is written behind the buffer."""
    sender, receiver = nccl.pair()
    source, target = sender.memory(content(size)), receiver.memory(size // 2)
    received = post(receiver.irecv, target)
    sent = post(sender.isend, source)
    with pytest.raises(NetError) as caught:
        wait(received)
    assert caught.value.code in (abi.INVALID_USAGE, abi.INTERNAL_ERROR, abi.INVALID_ARGUMENT)
    target.check_guards()
    assert any(str(size) in text for text in nccl.logger.warnings()), "the log does not say which size did not fit"
    assert sent.value


@pytest.mark.full
def test_one_gibibyte(nccl: FakeNccl) -> None:
    size = 1 << 30
    sender, receiver = nccl.pair()
    source, target = sender.memory(size), receiver.memory(size)
    block = content(1 << 20)
    for start in range(0, size, len(block)):
        source.view[start : start + len(block)] = block
        source.view[start : start + 8] = start.to_bytes(8, "little")
    received, sent = post(receiver.irecv, target), post(sender.isend, source)
    wait(sent, received)
    assert received.size == sent.size == (size if size < 1 << 31 else received.size)
    assert source.view == target.view
    target.check_guards()


@pytest.mark.parametrize("version", abi.VERSIONS)
def test_a_window_of_32(make: Callable[..., FakeNccl], version: int) -> None:
    """Senders and receivers with as many requests as NCCL ever has, of mixed sizes, in order."""
    nccl = make(version)
    sender, receiver = nccl.pair()
    sizes = [random.Random(version).choice((0, 8, 700, 20_000, 150_000)) for _ in range(200)]
    stream(sender, receiver, sizes)


def stream(sender: Comm, receiver: Comm, sizes: Sequence[int], window: int = abi.MOST_REQUESTS) -> None:
    """Sends messages of these sizes, ``window`` at a time, and looks at each as it comes."""
    sending: deque[Request] = deque()
    receiving: deque[tuple[int, Request]] = deque()
    posted_sends, posted_receives, done = 0, 0, 0
    while done < len(sizes):
        if posted_receives < len(sizes) and len(receiving) < window:
            request = receiver.irecv(receiver.memory(max(sizes)))
            if request:
                receiving.append((posted_receives, request))
                posted_receives += 1
        if posted_sends < len(sizes) and len(sending) < window:
            request = sender.isend(sender.memory(content(sizes[posted_sends], posted_sends)))
            if request:
                sending.append(request)
                posted_sends += 1
        if sending and sending[0].test():
            sending.popleft()
        if receiving and receiving[0][1].test():
            index, request = receiving.popleft()
            assert request.memory and request.size == sizes[index]
            assert request.memory.view[: sizes[index]] == content(sizes[index], index)
            request.memory.check_guards()
            done += 1
    wait(*sending)


def test_messages_complete_out_of_order(nccl: FakeNccl) -> None:
    """Requests may be tested in any order, and each is moved on by the test of another."""
    sender, receiver = nccl.pair()
    sizes = [3_000_000, 10, 500_000, 0, 70_000, 1, 2_000_000, 64]
    targets = [receiver.memory(size) for size in sizes]
    received = [post(receiver.irecv, target) for target in targets]
    sent = [post(sender.isend, sender.memory(content(size, index))) for index, size in enumerate(sizes)]
    wait(*reversed(received), *reversed(sent))
    for index, (size, target) in enumerate(zip(sizes, targets, strict=True)):
        assert target.view == content(size, index)


def test_receives_that_are_late(nccl: FakeNccl) -> None:
    """Messages of which nobody has asked yet wait; memory for them is the receiver's, when it comes."""
    sender, receiver = nccl.pair()
    sizes = [5_000_000, 100, 1_000_000]
    sent = [post(sender.isend, sender.memory(content(size, index))) for index, size in enumerate(sizes)]
    for _ in range(2000):
        for request in sent:
            if not request.done:
                request.test()
    for index, size in enumerate(sizes):
        target = receiver.memory(size)
        wait(post(receiver.irecv, target), *(request for request in sent[: index + 1] if not request.done))
        assert target.view == content(size, index)


def test_optional_completion_is_overwritten(nccl: FakeNccl) -> None:
    """NCCL leaves 1 in the request of an LL receive; the plugin must give a real one."""
    sender, receiver = nccl.pair()
    target = receiver.memory(100)
    received = receiver.irecv(target, optional=True)
    assert received
    wait(post(sender.isend, sender.memory(b"y" * 100)), received)
    assert bytes(target.view) == b"y" * 100


def test_both_directions_at_once(nccl: FakeNccl) -> None:
    there, back = nccl.pair(), nccl.pair()
    data = [content(3_000_000, seed) for seed in range(2)]
    for _ in range(5):
        targets = [receiver.memory(len(data[0])) for _, receiver in (there, back)]
        requests = [post(pair[1].irecv, target) for pair, target in zip((there, back), targets, strict=True)]
        requests += [post(pair[0].isend, pair[0].memory(data[i])) for i, pair in enumerate((there, back))]
        wait(*requests)
        assert [bytes(target.view) for target in targets] == data


def test_many_connections(nccl: FakeNccl) -> None:
    """64, all made at the same time, all busy at the same time."""
    listeners = [nccl.listen() for _ in range(64)]
    assert len({listener.handle for listener in listeners}) == 64
    connectors = [nccl.connector(listener.handle) for listener in listeners]
    pairs = [meet(*ends) for ends in zip(connectors, listeners, strict=True)]
    data = [content(40_000 + 1000 * index, index) for index in range(64)]
    targets = [receiver.memory(len(text)) for (_, receiver), text in zip(pairs, data, strict=True)]
    requests = [post(receiver.irecv, target) for (_, receiver), target in zip(pairs, targets, strict=True)]
    requests += [post(sender.isend, sender.memory(text)) for (sender, _), text in zip(pairs, data, strict=True)]
    wait(*requests)
    assert [bytes(target.view) for target in targets] == data


def test_one_listener_takes_several(nccl: FakeNccl) -> None:
    """Connections made with one handle find their receivers, each its own."""
    listener = nccl.listen()
    pairs = [meet(nccl.connector(listener.handle), listener) for _ in range(4)]
    listener.close()
    for index, (sender, receiver) in enumerate(pairs):
        transfer(sender, receiver, content(100_000, index))


def test_connections_outlive_their_listener(nccl: FakeNccl) -> None:
    sender, receiver = nccl.pair()  # closes it
    for _ in range(3):
        transfer(sender, receiver, content(500_000))


def test_a_burst_of_small_messages(nccl: FakeNccl) -> None:
    sender, receiver = nccl.pair()
    stream(sender, receiver, [index % 50 for index in range(3000)], window=8)
