"""Coordinators ask each other for how long they have not reached their common database.

One that reaches it no more can't know whether others do, and may give its nodes up. If all of them say that they don't,
nobody has counted anything meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import structlog

from bagua.base.errors import ConfigError
from bagua.base.security import TlsFiles, call_metadata, channel_credentials, read_token
from bagua.proto import node_pb2
from bagua.proto.node_pb2_grpc import NodeServiceStub

_ANSWER_S = 2.0
_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]

log = structlog.get_logger("coordinator")


class DatabaseSilence:
    """Asks the others. Shows them the token in the file, and the certificate in the folder ``tls`` (None: none)."""

    def __init__(self, token_file: Path, tls: Path | None) -> None:
        self._token_file = token_file
        self._tls = tls
        self._told: dict[str, str] = {}  # why one was not asked with success, as was logged

    async def ask(self, others: Mapping[str, str]) -> dict[str, float]:
        """Returns the seconds that each has said; who gives no answer is left out. ``others``: addresses by name."""
        try:
            metadata = call_metadata(await asyncio.to_thread(read_token, self._token_file))
            channel = await asyncio.to_thread(self._channels)
        except ConfigError as error:
            self._tell("", str(error))
            return {}
        try:
            answers = await asyncio.gather(*(self._ask(name, channel(at), metadata) for name, at in others.items()))
        except Exception:  # a question is a help in an outage: its failure must not end this coordinator in one
            log.exception("others_not_asked")
            return {}
        return {name: silent_s for name, silent_s in zip(others, answers, strict=True) if silent_s is not None}

    def _channels(self) -> Callable[[str], grpc.aio.Channel]:
        if self._tls is None:
            return lambda address: grpc.aio.insecure_channel(address, options=_OPTIONS)
        credentials = channel_credentials(TlsFiles.in_folder(self._tls))
        return lambda address: grpc.aio.secure_channel(address, credentials, options=_OPTIONS)

    async def _ask(self, name: str, channel: grpc.aio.Channel, metadata: Any) -> float | None:
        async with channel:
            stub: Any = NodeServiceStub(channel)  # its types are those of a blocking stub
            call = stub.DatabaseSilence(node_pb2.DatabaseSilenceRequest(), metadata=metadata, timeout=_ANSWER_S)
            try:
                reply = await call
            except grpc.aio.AioRpcError as error:
                self._tell(name, error.details() or error.code().name)
                return None
        if reply.coordinator != name:
            self._tell(name, f"{reply.coordinator[:64]!r} is there")
            return None
        self._told.pop(name, None)
        return float(reply.silent_s)

    def _tell(self, name: str, reason: str) -> None:
        if self._told.get(name) != reason:
            self._told[name] = reason
            log.warning("another_coordinator_not_asked", coordinator=name, reason=reason)
