"""How a client finds its coordinator, and what errors become."""

import json
from pathlib import Path

import grpc
import pytest

import bagua.base.errors as errors
from bagua.base.rpc import CODES, code_of, error_of
from bagua.base.security import TlsFiles
from bagua.client import find_reach


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """An empty state folder and no settings."""
    for name in ("BAGUA_COORDINATOR", "BAGUA_TOKEN", "BAGUA_TOKEN_FILE", "BAGUA_TLS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BAGUA_STATE_DIR", str(tmp_path))
    (tmp_path / "coordinator").mkdir()
    return tmp_path


def write_token(path, text):
    path.write_text(text)
    path.chmod(0o600)


def publish(state, **what):
    (state / "coordinator" / "coordinator.json").write_text(json.dumps(what))


def test_without_anything_it_is_the_default_address_and_the_token_of_the_folder(state):
    write_token(state / "token", "t\n")
    reach = find_reach()
    assert (reach.address, reach.token, reach.tls) == ("127.0.0.1:7670", "t", None)


def test_what_the_coordinator_published_is_used(state, tmp_path):
    write_token(tmp_path / "other-token", "t2")
    publish(state, address="127.0.0.1:1", pid=7, token_file=str(tmp_path / "other-token"), tls="/certs")
    reach = find_reach()
    assert (reach.address, reach.token) == ("127.0.0.1:1", "t2")
    assert reach.tls == TlsFiles.in_folder(Path("/certs"))


def test_an_address_that_was_given_has_nothing_to_do_with_the_published_one(state, monkeypatch):
    write_token(state / "token", "t")
    publish(state, address="127.0.0.1:1", token_file="/nowhere", tls="/certs")
    assert find_reach("h:2") == find_reach("h:2", "t", None)
    monkeypatch.setenv("BAGUA_COORDINATOR", "h:3")
    assert find_reach().address == "h:3" and find_reach().tls is None
    assert find_reach("h:4").address == "h:4"


def test_the_environment_comes_before_the_folder(state, monkeypatch, tmp_path):
    monkeypatch.setenv("BAGUA_TOKEN_FILE", str(tmp_path / "t"))
    write_token(tmp_path / "t", "from a file")
    assert find_reach().token == "from a file"
    monkeypatch.setenv("BAGUA_TOKEN", "direct")
    monkeypatch.setenv("BAGUA_TLS", "/env")
    assert (find_reach().token, find_reach().tls) == ("direct", TlsFiles.in_folder(Path("/env")))
    assert find_reach(token="given", tls=Path("/given")) == find_reach(
        token="given", tls=TlsFiles.in_folder(Path("/given"))
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"address": 5}'])
def test_a_broken_file_is_as_good_as_none(state, text):
    write_token(state / "token", "t")
    (state / "coordinator" / "coordinator.json").write_text(text)
    assert find_reach().address == "127.0.0.1:7670"


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in CODES}, key=lambda kind: kind.__name__))
def test_an_error_survives_the_way_over_the_wire(kind):
    raised = error_of(code_of(kind("words")), "words")
    assert type(raised) is kind and str(raised) == "words"


def test_every_service_error_is_in_the_table_and_unknown_codes_are_errors_too():
    assert {kind for kind, _ in CODES} == {errors.ServiceError, *errors.ServiceError.__subclasses__()}
    assert type(error_of(grpc.StatusCode.DATA_LOSS, "x")) is errors.ServiceError


def test_a_token_that_can_not_be_sent_is_told(monkeypatch):
    monkeypatch.setenv("BAGUA_TOKEN", " from-the-environment\n")
    assert find_reach().token == "from-the-environment"
    monkeypatch.setenv("BAGUA_TOKEN", "one\ntwo")
    with pytest.raises(errors.ConfigError, match=r"BAGUA_TOKEN has more than one line.*BG804"):
        find_reach()
    with pytest.raises(errors.ConfigError, match=r"The token has more than one line, or characters"):
        find_reach(token="tökèn")
