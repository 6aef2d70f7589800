"""Seals values of a cache that others may write to: nothing is unpickled that was not sealed with the job's key."""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import io
import os
import pickle
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from bagua.base.errors import ConfigError
from bagua.base.paths import cache_dir, make_private_dir
from bagua.base.secrets import read_private

MARK = b"bagua-1\n"
TAG_BYTES = hashlib.sha256().digest_size
KEY_BYTES = 32


class Seal:
    """Pickled values with a checksum that only holders of ``secret`` can make (HMAC-SHA256, RFC 2104). It covers the
    key, too, so a value can't be put in the place of another."""

    def __init__(self, secret: bytes) -> None:
        # A key of its own: the job's secret serves other purposes, too.
        self._key = hmac.digest(secret, b"bagua sample cache", "sha256")

    def close(self, key: str, value: Any) -> bytes:
        """Raises what pickle raises for values that it can't take."""
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        payload = buffer.getbuffer()
        return b"".join([MARK, self._tag(key, payload), payload])

    def open(self, key: str, sealed: bytes) -> Any:
        """The value. Raises ValueError if the bytes are not those that ``close`` made for this key."""
        begin = len(MARK) + TAG_BYTES
        payload = memoryview(sealed)[begin:]
        tag = sealed[len(MARK) : begin]
        # compare_digest takes the same time wherever they differ.
        if sealed[: len(MARK)] != MARK or not hmac.compare_digest(tag, self._tag(key, payload)):
            raise ValueError("The entry is damaged, or was sealed with another key.")
        return pickle.loads(payload)

    def _tag(self, key: str, payload: bytes | memoryview) -> bytes:
        name = key.encode()
        # With its length: no part of the value can pass for a part of the key.
        made = hmac.new(self._key, len(name).to_bytes(8, "little") + name, "sha256")
        made.update(payload)
        return made.digest()


class _Pickler(pickle.Pickler):
    """Tensors of the CPU as their bytes: five times as fast as torch's way, and a view takes no more than its own."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.requires_grad or value.device.type != "cpu":
            return NotImplemented
        # The bytes of such tensors alone don't say what they mean.
        if value.layout is not torch.strided or value.is_quantized or value.is_conj() or value.is_neg():
            return NotImplemented
        flat = value.contiguous()
        return _tensor, (ctypes.string_at(flat.data_ptr(), flat.nbytes), flat.dtype, tuple(flat.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    # Bytearray: torch warns of bytes, which nobody may write to.
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def given_secret() -> bytes | None:
    """The job's secret, as BAGUA_JOB_SECRET or the file BAGUA_JOB_SECRET_FILE has it. Raises ConfigError for a file
    that can't be read, or that others can."""
    text = os.environ.get("BAGUA_JOB_SECRET")
    if text:
        return text.encode()
    path = os.environ.get("BAGUA_JOB_SECRET_FILE")
    if not path:
        return None
    try:
        return read_private(Path(path), "The file of BAGUA_JOB_SECRET_FILE").strip()
    except OSError as error:
        raise ConfigError(f"BAGUA_JOB_SECRET_FILE={path} can't be read: {error.strerror}. [BG705]") from error


def host_secret() -> bytes:
    """The secret of this user on this host, made when it is first needed, so that a later job can open what this one
    has sealed. Raises OSError and ConfigError."""
    path = make_private_dir(cache_dir() / "samples") / "secret"
    with suppress(FileExistsError):
        # Written beside it and linked: other processes find all of it or nothing.
        fresh = path.with_name(f".secret.{os.getpid()}.{secrets.token_hex(4)}")
        if not path.exists():
            try:
                with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(secrets.token_bytes(KEY_BYTES))
                os.link(fresh, path)  # fails if another process was first
            finally:
                fresh.unlink(missing_ok=True)
    found = read_private(path, "The secret of the sample cache", personal=True)
    if len(found) != KEY_BYTES:
        raise ConfigError(f"The secret of the sample cache, {path}, is damaged: remove it. [BG705]")
    return found
