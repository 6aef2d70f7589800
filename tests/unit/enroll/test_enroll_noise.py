"""The handshake: equal to another implementation's, and nothing else than what its holders wrote is accepted."""

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from bagua.enroll.noise import Handshake, HandshakeError

KEY = bytes(range(32))
PROLOGUE = b"There is no right and wrong. There's only fun and boring."


def test_messages_are_those_of_another_implementation():
    """Made with the package noiseprotocol 0.3.1 from the same keys, prologue and payloads."""
    first = Handshake(KEY, PROLOGUE, X25519PrivateKey.from_private_bytes(bytes(range(64, 96))))
    second = Handshake(KEY, PROLOGUE, X25519PrivateKey.from_private_bytes(bytes(range(128, 160))))
    hello = first.write(b"request")
    assert hello.hex() == (
        "79a631eede1bf9c98f12032cdeadd0e7a079398fc786b88cc846ec89af85a51a238ccc50c4ec699a49a01dd50faedc1c228b97e9ee952d"
    )
    assert second.read(hello) == b"request"
    answer = second.write(b"certificate")
    assert answer.hex() == (
        "493e82fc74464a59268817623d2053c5eb8e2cc4a988b4fee179ec6b010d531d"
        "4ae84dbf16005be43c465cdef57fd1e0574f3a032d2b0034542faa"
    )
    assert first.read(answer) == b"certificate"


@pytest.mark.parametrize("key, prologue", [(bytes(32), PROLOGUE), (KEY, b"another job")])
def test_both_sides_must_hold_the_same(key, prologue):
    hello = Handshake(KEY, PROLOGUE).write(b"request")
    with pytest.raises(HandshakeError, match="not authentic"):
        Handshake(key, prologue).read(hello)


def test_every_byte_counts():
    first, second = Handshake(KEY, PROLOGUE), Handshake(KEY, PROLOGUE)
    hello = first.write(b"request")
    for index in range(len(hello)):
        changed = bytes(byte ^ (i == index) for i, byte in enumerate(hello))
        with pytest.raises(HandshakeError):
            Handshake(KEY, PROLOGUE).read(changed)
    second.read(hello)
    answer = second.write(b"certificate")
    changed = answer[:-1] + bytes([answer[-1] ^ 1])
    with pytest.raises(HandshakeError, match="not authentic"):
        first.read(changed)


def test_an_answer_belongs_to_its_question():
    first, other = Handshake(KEY, PROLOGUE), Handshake(KEY, PROLOGUE)
    second = Handshake(KEY, PROLOGUE)
    other.write(b"request")
    second.read(first.write(b"request"))
    with pytest.raises(HandshakeError, match="not authentic"):
        other.read(second.write(b"certificate"))


def test_a_message_that_comes_back_is_no_answer():
    first = Handshake(KEY, PROLOGUE)
    with pytest.raises(HandshakeError, match="not authentic"):
        first.read(first.write(b"request"))


def test_a_point_of_small_order_yields_no_key():
    """It would make the shared secret the same for everybody."""
    first = Handshake(KEY, PROLOGUE)
    first.write(b"request")
    with pytest.raises(HandshakeError, match="no usable key"):
        first.read(bytes(64))


@pytest.mark.parametrize("message", [b"", bytes(47), bytes(48), bytes(1000)])
def test_garbage(message):
    with pytest.raises(HandshakeError):
        Handshake(KEY, PROLOGUE).read(message)
