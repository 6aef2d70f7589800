"""Requests for another daemon on a node, and what answers them."""

import asyncio

import pytest

from bagua.base.errors import ConflictError, UnavailableError
from bagua.daemon.coordinator.streams import sessions
from bagua.daemon.coordinator.streams.sessions import NodeSession, Upgrades
from bagua.proto import node_pb2


def session(node="n", boot="boot", life=1):
    return NodeSession(node, boot, "h", number=life << 32, life=life)


async def asked(found, of):
    task = asyncio.create_task(found.upgrade(of))
    directive = await of.outgoing.get()
    return task, directive.upgrade.request_id


async def test_the_next_daemon_is_the_answer():
    found, former = Upgrades(), session()
    task, _ = await asked(found, former)
    found.introduced(session(node="other", life=2))
    found.introduced(session(life=1))  # its stream broke meanwhile
    assert not task.done()
    found.introduced(session(life=2))
    await task
    found.introduced(session(life=3))


async def test_a_refusal_and_another_keeper():
    found, former = Upgrades(), session()
    task, number = await asked(found, former)
    found.refused(session(node="other"), node_pb2.UpgradeRefusal(request_id=number, reason="mine"))
    found.refused(former, node_pb2.UpgradeRefusal(request_id=number + 1, reason="of nobody"))
    assert not task.done()
    found.refused(former, node_pb2.UpgradeRefusal(request_id=number, reason="its core differs"))
    with pytest.raises(ConflictError, match="Node n keeps its daemon: its core differs"):
        await task
    task, _ = await asked(found, former)
    found.introduced(session(boot="next"))
    with pytest.raises(ConflictError, match="was restarted meanwhile"):
        await task


async def test_silence(monkeypatch):
    monkeypatch.setattr(sessions, "UPGRADE_S", 0.0)
    with pytest.raises(UnavailableError, match="Node n neither started another daemon"):
        await Upgrades().upgrade(session())
