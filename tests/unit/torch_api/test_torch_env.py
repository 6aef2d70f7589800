"""Settings from the environment."""

import os

import pytest

from bagua.base.errors import ConfigError
from bagua.torch_api import env
from bagua.torch_api.job import environment
from bagua.torch_api.job.start import _use_store

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in (*NAMES, "BAGUA_DEFAULT_BUCKET_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_node_rank_is_torchruns_where_it_started_us(monkeypatch):
    monkeypatch.setenv("NODE_RANK", "2")
    monkeypatch.setenv("GROUP_RANK", "5")
    assert env.get_node_rank() == 2
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert env.get_node_rank() == 5


def test_what_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="RANK is 'first'"):
        env.get_rank()
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "0")
    with pytest.raises(ConfigError, match="BAGUA_DEFAULT_BUCKET_SIZE"):
        env.get_default_bucket_size()
    monkeypatch.setenv("BAGUA_WAIT_TIMEOUT_S", "-1")
    with pytest.raises(ConfigError, match="BAGUA_WAIT_TIMEOUT_S"):
        env.get_wait_timeout()


def test_a_store_needs_its_numbers(monkeypatch):
    with pytest.raises(ConfigError, match="rank must be given"):
        _use_store(-1, 2, 2)
    with pytest.raises(ConfigError, match="local_world_size must be given"):
        _use_store(0, 2, -1)
    with pytest.raises(ConfigError, match="don't fit"):
        _use_store(2, 2, 2)
    _use_store(5, 8, 4)
    assert (env.get_rank(), env.get_world_size(), env.get_local_rank(), env.get_local_size()) == (5, 8, 1, 4)
    environment.clear_place()
    assert (env.get_rank(), env.get_world_size(), env.get_local_rank(), env.get_local_size()) == (0, 1, 0, 1)


def test_the_environment_is_afterwards_what_it_was(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    environment.set_place({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": ""})
    assert os.environ["RANK"] == "7" and "WORLD_SIZE" not in os.environ and env.get_rank() == 1
    environment.show()
    environment.set_place({"RANK": "0", "NODE_RANK": "3"})  # the next generation
    environment.show()
    assert [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK")] == ["0", "2", None, "3"]
    os.environ["NODE_RANK"] = "4"  # the program's own
    environment.clear_place()
    assert [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["7", None, None]
    assert os.environ.pop("NODE_RANK") == "4" and env.get_rank() == 7
