"""The cache of samples over Redis: a real redis-server on loopback, with a password, one of them and several."""

import datetime
import ipaddress
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from rig.docs import pages
from rig.programs import program

import bagua.torch_api as bagua
from bagua.base.errors import ConfigError
from bagua.base.system_limits import await_readable
from bagua.torch_api.cache import loader as loader_module
from bagua.torch_api.cache.redis_store import _wait_for
from bagua.torch_api.contrib import CachedDataset, CacheLoader
from bagua.torch_api.contrib.utils.redis_store import RedisStore, create_redis_client, start_redis_server_cli
from bagua.torch_api.contrib.utils.store import StoreError
from bagua.torch_api.env import find_free_network_port

redis = pytest.importorskip("redis", reason="the package redis is not installed: pip install bagua[redis]")
needs_server = pytest.mark.usefixtures("redis_server")
SECRET = b"k" * 32
CAPACITY = 64 << 20


def host_of(server):
    return {"host": "127.0.0.1", "port": server.port, "password": server.password}


def start():
    server = start_redis_server_cli(find_free_network_port(), CAPACITY)
    _wait_for(server)
    return server


@pytest.fixture
def redis_server():
    program("redis-server")


@pytest.fixture
def servers(redis_server):
    made = [start() for _ in range(3)]
    yield made
    for server in made:
        server.stop()


@needs_server
def test_one_server_and_several(servers):
    values = {f"key {number}": bytes([number]) * 100 for number in range(60)}
    for count in (1, 3):
        store = RedisStore([host_of(server) for server in servers[:count]])
        store.clear()
        store.mset(values)
        store.set("one", b"1")
        assert store.mget([*values, "nosuch", "one"]) == [*values.values(), None, b"1"]
        assert store.get("one") == b"1" and store.get("nosuch") is None
        assert store.num_keys() == 61 and store.status()
        assert [one.num_keys() > 5 for one in store.stores] == [True] * count
        store.shutdown()
    alone = RedisStore([host_of(server) for server in servers], cluster_mode=False)
    assert len(alone.stores) == 1


@needs_server
def test_the_server_is_closed_to_others(servers):
    found = host_of(servers[0])
    with pytest.raises(redis.AuthenticationError):
        create_redis_client(found["host"], found["port"]).ping()
    with pytest.raises(StoreError, match="can't be used"):
        RedisStore([found | {"password": "wrong"}]).get("x")
    client = create_redis_client(**found)
    assert client.config_get("bind")["bind"] == "127.0.0.1"
    assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "allkeys-random"
    assert int(client.config_get("maxmemory")["maxmemory"]) == CAPACITY
    command_line = Path(f"/proc/{client.info()['process_id']}/cmdline").read_text()
    client.close()
    assert servers[0].password not in command_line


def certificate(folder):
    """(certificate of 127.0.0.1 that signs itself, its key)."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "redis")])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + datetime.timedelta(hours=1))
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = made.add_extension(address, False).add_extension(x509.BasicConstraints(True, None), True)
    files = folder / "certificate.pem", folder / "key.pem"
    pem = serialization.Encoding.PEM
    files[0].write_bytes(made.sign(key, hashes.SHA256()).public_bytes(pem))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    files[1].write_bytes(key.private_bytes(pem, *plain))
    return files


@needs_server
def test_tls(tmp_path):
    made, key = certificate(tmp_path)
    port = find_free_network_port()
    lines = [f"--tls-port {port}", f"--tls-cert-file {made}", f"--tls-key-file {key}", "--tls-auth-clients no"]
    server = start_redis_server_cli(0, CAPACITY, *lines)
    server.port = port
    try:
        _wait_for(server)
        store = RedisStore([host_of(server) | {"ssl_ca_certs": str(made)}], tls=True)
        store.set("a", b"1")
        assert store.get("a") == b"1"
        page = pages.part_by("test_tls", "docs/data.md").replace("password=...", f"password={server.password!r}")
        for words, here in {"10.0.0.7": "127.0.0.1", "6379": str(port), "ca.pem": str(made)}.items():
            page = page.replace(words, here)
        cached = eval(page, {"CachedDataset": CachedDataset, "dataset": [5, 6]})
        assert [cached[0], cached[1]] == [5, 6]
        cached.cache_loader.flush()
        assert cached.cache_loader.num_keys() == 3, "with the key of before"
        for others in ({}, {"ssl": False}, {"ssl_ca_certs": str(certificate(tmp_path)[0])}):
            with pytest.raises(StoreError):
                RedisStore([host_of(server) | others], tls=True).get("a")
    finally:
        server.stop()


def start_and_wait(connection):
    server = start()
    client = create_redis_client(**host_of(server))
    connection.send((client.info()["process_id"], server.log.parent))
    connection.recv()


@needs_server
def test_a_server_ends_with_its_rank():
    """Killed, so that it can't say so. The folder with the password goes, too."""
    ours, theirs = multiprocessing.Pipe()
    rank = multiprocessing.get_context("fork").Process(target=start_and_wait, args=(theirs,))
    rank.start()
    assert ours.poll(60.0)
    pid, folder = ours.recv()
    ended = os.pidfd_open(pid)
    gone = os.pidfd_open(os.getsid(pid))  # the shell that watches, which leads the session
    assert (folder / "redis.conf").stat().st_mode & 0o777 == 0o600
    rank.kill()
    rank.join()
    for one in (ended, gone):
        assert await_readable([one], 60.0)
        os.close(one)
    assert not folder.exists()


@needs_server
@pytest.mark.parametrize("gone", ["one of three", "all"])
def test_a_server_that_goes_away(servers, gone, monkeypatch):
    """Values are loaded without it, with a count."""
    monkeypatch.setattr(loader_module, "PAUSE_S", 0.0)
    cache = CacheLoader("redis", "d", hosts=[host_of(server) for server in servers], secret=SECRET)
    loaded = []

    def load(key):
        loaded.append(key)
        return key * key

    for _ in range(2):
        assert [cache.get(key, load) for key in range(30)] == [key * key for key in range(30)]
    assert len(loaded) == 30 and cache.num_keys() == 30
    for server in servers[: 1 if gone == "one of three" else 3]:
        server.stop()
    assert [cache.get(key, load) for key in range(30)] == [key * key for key in range(30)]
    found = cache.statistics()
    assert found.failures > 0 and found.uncached > 0
    assert (30 < len(loaded) < 60) if gone == "one of three" else len(loaded) == 60


def rank_cache():
    """Makes a cache without hosts: rank 0 starts a server for all."""
    bagua.init_process_group()
    rank = bagua.get_rank()
    cache = CacheLoader("redis", "ranks", capacity_per_node=CAPACITY)
    values = [cache.get(key, lambda key: torch.full((3,), float(key))) for key in range(rank, 20, 2)]
    bagua.barrier()
    values = [cache.get(key, lambda key: torch.full((3,), -1.0)) for key in range(20)]
    found = cache.statistics()
    bagua.barrier()
    cache.store.shutdown()
    return [float(value[0]) for value in values], [found.hits, found.misses, found.damaged], cache.store.bootstrap


@needs_server
def test_ranks_of_one_host_start_a_server(ranks):
    for values, counts, bootstrap in ranks.run(rank_cache, 2):
        assert values == [float(key) for key in range(20)] and counts == [20, 10, 0] and bootstrap


def rank_on_two_hosts():
    bagua.init_process_group()
    with pytest.raises(ConfigError) as error:
        RedisStore()
    bagua.barrier()  # neither ends while the other one still begins
    return str(error.value)


def test_several_hosts_start_none(ranks):
    assert all("with TLS and a password" in words for words in ranks.run(rank_on_two_hosts, hosts=[[0], [1]]))


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ([], "hosts is empty"),
        ([{"host": "10.0.0.7"}], "'host' and 'port'"),
        ([{"host": "127.0.0.1", "port": 6379}], "has no password"),
        ([{"host": "10.0.0.7", "port": 6379, "password": "p"}], "the connection would be plain"),
    ],
)
def test_bad_hosts(hosts, words, monkeypatch):
    monkeypatch.delenv("BAGUA_REDIS_PASSWORD", raising=False)
    with pytest.raises(ConfigError, match=words):
        RedisStore(hosts)
    monkeypatch.setenv("BAGUA_REDIS_PASSWORD", "p")
    assert RedisStore([{"host": "localhost", "port": 1}]).status() is False


def test_missing_programs_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="redis-server is not installed here"):
        RedisStore()
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    with pytest.raises(ConfigError, match=r'pip install "bagua\[redis\]"'):
        RedisStore()
