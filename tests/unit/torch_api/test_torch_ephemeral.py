"""Entries of the rendezvous store that a rank believes, and those that it refuses."""

import os
import socket

import pytest

from bagua.base.errors import ServiceError
from bagua.torch_api.job.ephemeral import _check_socket


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A socket in a folder of this user alone."""
    folder = tmp_path / "own"
    folder.mkdir(mode=0o700)
    monkeypatch.chdir(folder)  # paths of sockets are short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("rank.sock")
        yield folder / "rank.sock"


def test_a_socket_of_this_user(path):
    _check_socket(str(path))


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o777])
def test_a_folder_that_others_may_enter(path, mode):
    path.parent.chmod(mode)
    with pytest.raises(ServiceError, match="not the socket of a daemon of yours"):
        _check_socket(str(path))


@pytest.mark.parametrize("whose", ["socket", "folder"])
def test_of_another_user(path, whose):
    if os.geteuid() != 0:
        pytest.skip("giving a file to another user needs root")
    os.chown(path if whose == "socket" else path.parent, 12345, 12345)
    with pytest.raises(ServiceError, match="somebody else writes to the rendezvous store"):
        _check_socket(str(path))


def test_no_socket_at_all(path):
    (path.parent / "file").touch()
    with pytest.raises(ServiceError, match="not the socket"):
        _check_socket(str(path.parent / "file"))
    for missing in (str(path) + "x", "\0", "a" * 5000, "relative/rank.sock"):
        with pytest.raises(ServiceError, match="There is no node daemon at"):
            _check_socket(missing)
