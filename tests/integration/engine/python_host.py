"""Host 0 of a job in Python: handshake and records of csrc/core/transport once more, by the package `cryptography`."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from dataclasses import dataclass

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from bagua.csrc import load
from bagua.csrc.wire_version import WIRE_VERSION

ENCRYPTED, ACCEPTED = 3, 1
PING, PONG = 3, 4
HEADER = struct.Struct("<IHBBQIIQQQI8xI")
MAGIC = 0x46554742
TAG = 16


def expand(secret: bytes, label: bytes, size: int) -> bytes:
    return HKDFExpand(hashes.SHA256(), size, label).derive(secret)


class Direction:
    """Records of one direction on their first key."""

    def __init__(self, secret: bytes, aes: bool) -> None:
        key = expand(secret, b"key", 32)
        self.cipher = AESGCM(key) if aes else ChaCha20Poly1305(key)
        self.iv = int.from_bytes(expand(secret, b"iv", 12), "big")
        self.number = 0

    def nonce(self) -> bytes:
        self.number += 1
        return (self.iv ^ (self.number - 1)).to_bytes(12, "big")

    def seal(self, text: bytes) -> bytes:
        return self.cipher.encrypt(self.nonce(), text, None)

    def open(self, record: bytes) -> bytes:
        """Raises cryptography.exceptions.InvalidTag."""
        return self.cipher.decrypt(self.nonce(), record, None)


def read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        assert piece, f"the engine closed the connection after {len(data)} of {size} bytes"
        data += piece
    return data


@dataclass
class Dialled:
    """A connection, and what the engine said of it."""

    socket: socket.socket
    protection: int
    verdict: int
    out: Direction
    into: Direction

    def send(self, kind: int, sequence: int) -> bytes:
        """A frame without a payload; what was written."""
        header = HEADER.pack(MAGIC, HEADER.size, kind, 0, 1, 0, 0, 0, 0, sequence, 0, 0)
        record = self.out.seal(header)
        self.socket.sendall(record)
        return record

    def receive(self) -> tuple[int, ...]:
        return HEADER.unpack(self.into.open(read(self.socket, HEADER.size + TAG)))


def dial(address: str, key: bytes, job: str, members: list[int], stream: int, aes: bool = True) -> Dialled:
    """Host 0 calls host 1 for the world."""
    host, port = address.rsplit(":", 1)
    connection = socket.create_connection((host, int(port)), timeout=30)
    private = X25519PrivateKey.generate()
    instance = load().crc32c("".join(f"{member}," for member in members).encode()) << 32  # their first communicator
    job_hash = hashlib.sha256(job.encode()).digest()
    hello = struct.pack("<II32sQIIII", 0x48554742, WIRE_VERSION, job_hash, 1, 0, 0, 1, stream)
    hello += struct.pack("<QII", instance, ENCRYPTED, aes)
    hello += os.urandom(32) + private.public_key().public_bytes_raw()
    connection.sendall(hello)
    answer, mac = read(connection, 72), read(connection, 32)

    def sign(label: bytes, more: bytes = b"") -> bytes:
        return hmac.digest(key, label + hello + answer + more, "sha256")

    assert mac == sign(b"bagua-accept")
    connection.sendall(sign(b"bagua-dial"))
    verdict, mac = read(connection, 4), read(connection, 32)
    assert mac == sign(b"bagua-verdict", verdict)
    theirs, fast = struct.unpack_from("<II", answer, 64)
    shared = private.exchange(X25519PublicKey.from_public_bytes(answer[32:64]))
    root = hmac.digest(key, shared, "sha256")  # HKDF-Extract
    talk = hashlib.sha256(hello + answer).digest()
    directions = [
        Direction(expand(root, label + talk, 32), aes and fast == 1)
        for label in (b"bagua-seal-dial", b"bagua-seal-accept")
    ]
    return Dialled(connection, theirs, struct.unpack("<I", verdict)[0], *directions)
