"""The ephemeral cluster: who uses it, what it answers, where it listens for other hosts."""

import asyncio

import pytest

from bagua.base import parent_socket
from bagua.base.errors import ConfigError
from bagua.daemon.ephemeral import admission
from bagua.daemon.ephemeral.users import Users

LIMIT_S = 10.0


@pytest.mark.parametrize("words", [b"{}", b"no json", b"[1]", b'{"value": null}'])
async def test_a_user_that_talks_nonsense_is_gone(words):
    """Those who talk sense are in integration/torch_api/test_torch_worlds.py."""

    async def answer(message):
        return {"doubled": message["value"] * 2}

    users = Users(answer)
    user, ours = parent_socket.pair()
    try:
        with user:
            users.add(ours)
            user.send(words)
            async with asyncio.timeout(LIMIT_S):
                await users.gone()
            assert parent_socket.receive(user) is None
    finally:
        await users.close()


def test_the_first_host_listens_where_it_is_reached_and_nowhere_else():
    assert admission.own_address("127.0.0.1") == admission.own_address("localhost") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"MASTER_ADDR 192\.0\.2\.1 .* is no address of the first host"):
        admission.own_address("192.0.2.1")
    with pytest.raises(ConfigError, match="means nothing on the first host"):
        admission.own_address("no.such.name.invalid")
