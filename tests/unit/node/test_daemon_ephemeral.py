"""The ephemeral cluster: who uses it, what it answers, where it listens for other hosts."""

import asyncio
import socket
from pathlib import Path

import pytest

from bagua.base import parent_socket
from bagua.base.errors import ConfigError
from bagua.daemon.ephemeral import admission
from bagua.daemon.ephemeral.users import Users

LIMIT_S = 10.0


async def double(message):
    """Stands for the cluster's answers."""
    if "odd" in message:
        raise ConfigError("That is odd.")
    if parent_socket.JOINED in message:
        return {}  # nothing to say
    return {"doubled": message["value"] * 2}


def played(play):
    async def main():
        users = Users(double)
        try:
            async with asyncio.timeout(LIMIT_S):
                await play(users)
        finally:
            await users.close()

    asyncio.run(main())


async def ask(user, **message):
    parent_socket.send(user, message)
    return await asyncio.to_thread(parent_socket.receive, user)


def test_users_get_answers_and_the_last_one_that_goes_is_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # paths of sockets are short

    async def play(users):
        starter, ours = parent_socket.pair()
        users.add(ours)
        users.listen(Path("cluster.sock"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other, starter:
            other.connect("cluster.sock")
            assert await ask(other, value=3) == {"doubled": 6}
            assert await ask(starter, value="ab") == {"doubled": "abab"}
            parent_socket.send(starter, {parent_socket.JOINED: "job"})
            assert await ask(starter, odd=True) == {"error": "That is odd."}
            gone = asyncio.ensure_future(users.gone())
            starter.close()
            assert await ask(other, value=1) == {"doubled": 2}
            assert not gone.done()
        await gone

    played(play)


@pytest.mark.parametrize("words", [b"{}", b"no json", b"[1]", b'{"value": null}'])
def test_a_user_that_talks_nonsense_is_gone(words):
    async def play(users):
        user, ours = parent_socket.pair()
        with user:
            users.add(ours)
            user.send(words)
            await users.gone()
            assert parent_socket.receive(user) is None

    played(play)


def test_the_first_host_listens_where_it_is_reached_and_nowhere_else():
    assert admission.own_address("127.0.0.1") == admission.own_address("localhost") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"MASTER_ADDR 192\.0\.2\.1 .* is no address of the first host"):
        admission.own_address("192.0.2.1")
    with pytest.raises(ConfigError, match="means nothing on the first host"):
        admission.own_address("no.such.name.invalid")
