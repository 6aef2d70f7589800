"""The handshake ``Noise_NNpsk0_25519_ChaChaPoly_SHA256`` of the Noise protocol framework, revision 34.

One message each way. Both sides prove that they hold the pre-shared key, payloads are encrypted and authenticated, and
keys are fresh: the answer can neither be replayed, nor be read later by somebody who learns the pre-shared key. The
prologue is what both sides must agree on beforehand; it is not sent. All cryptography is that of the package
``cryptography``; the tests compare with the messages of another implementation.
"""

from __future__ import annotations

import hashlib
import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from bagua.base.errors import BaguaError

NAME = b"Noise_NNpsk0_25519_ChaChaPoly_SHA256"
KEY_BYTES = 32


class HandshakeError(BaguaError):
    """The message does not come from a holder of the same pre-shared key and prologue."""


class _Symmetric:
    """Section 5.2 of the specification: the transcript's hash, the chaining key, and the cipher of the moment."""

    def __init__(self, prologue: bytes) -> None:
        self._hash = hashlib.sha256(NAME).digest()  # the name is longer than a hash
        self._chaining = self._hash
        self._key = b""
        self._nonce = 0
        self.mix_hash(prologue)

    def mix_hash(self, data: bytes) -> None:
        self._hash = hashlib.sha256(self._hash + data).digest()

    def mix_key(self, material: bytes) -> None:
        self._chaining, self._key = self._derive(material, 2)
        self._nonce = 0

    def mix_key_and_hash(self, material: bytes) -> None:
        self._chaining, mixed, self._key = self._derive(material, 3)
        self.mix_hash(mixed)
        self._nonce = 0

    def seal(self, text: bytes) -> bytes:
        sealed = ChaCha20Poly1305(self._key).encrypt(self._next_nonce(), text, self._hash)
        self.mix_hash(sealed)
        return sealed

    def open(self, sealed: bytes) -> bytes:
        try:
            text = ChaCha20Poly1305(self._key).decrypt(self._next_nonce(), sealed, self._hash)
        except InvalidTag:
            raise HandshakeError("the message is not authentic") from None
        self.mix_hash(sealed)
        return text

    def _next_nonce(self) -> bytes:
        self._nonce += 1
        return bytes(4) + (self._nonce - 1).to_bytes(8, "little")  # section 12.3

    def _derive(self, material: bytes, outputs: int) -> list[bytes]:
        """Section 4.3: HKDF with the chaining key as salt and without info."""
        secret = hmac.digest(self._chaining, material, "sha256")
        found: list[bytes] = []
        for number in range(1, outputs + 1):
            found.append(hmac.digest(secret, (found[-1] if found else b"") + bytes([number]), "sha256"))
        return found


class Handshake:
    """One side of one handshake. The initiator calls ``write`` then ``read``, the responder ``read`` then ``write``.

    ``ephemeral`` is for tests alone.
    """

    def __init__(self, key: bytes, prologue: bytes, ephemeral: X25519PrivateKey | None = None) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a pre-shared key has {KEY_BYTES} bytes")
        self._symmetric = _Symmetric(prologue)
        self._key = key
        self._own = ephemeral or X25519PrivateKey.generate()
        self._peer = b""
        self._wrote = False

    def write(self, payload: bytes) -> bytes:
        """The message that carries ``payload``."""
        if not self._peer:  # psk0: the secret comes before all else, in the first message
            self._symmetric.mix_key_and_hash(self._key)
        own = self._own.public_key().public_bytes_raw()
        self._mix_ephemeral(own)
        self._wrote = True
        if self._peer:
            self._mix_shared()
        return own + self._symmetric.seal(payload)

    def read(self, message: bytes) -> bytes:
        """The payload of the other side's message. Raises HandshakeError."""
        if len(message) < KEY_BYTES + 16:  # 16: the tag
            raise HandshakeError(f"the message has {len(message)} bytes, too few")
        self._peer = message[:KEY_BYTES]
        if not self._wrote:
            self._symmetric.mix_key_and_hash(self._key)
        self._mix_ephemeral(self._peer)
        if self._wrote:
            self._mix_shared()
        return self._symmetric.open(message[KEY_BYTES:])

    def _mix_ephemeral(self, public: bytes) -> None:
        """Section 9.2: with a pre-shared key, ephemeral keys enter the key, too."""
        self._symmetric.mix_hash(public)
        self._symmetric.mix_key(public)

    def _mix_shared(self) -> None:
        try:
            shared = self._own.exchange(X25519PublicKey.from_public_bytes(self._peer))
        except ValueError:  # a point of small order
            raise HandshakeError("the message holds no usable key") from None
        self._symmetric.mix_key(shared)
