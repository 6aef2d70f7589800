"""Folders, addresses, credentials."""

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua.base.address import is_loopback, join_address, split_address
from bagua.base.errors import ConfigError
from bagua.base.paths import make_private_dir
from bagua.base.security import TlsFiles, check_dial_address, check_listen_address, create_token, read_token
from bagua.daemon.coordinator.admin.certs import make_certificates


@given(st.ip_addresses(), st.integers(0, 65535))
def test_addresses_survive_a_round_trip(host, port):
    assert split_address(join_address(str(host), port)) == (str(host), port)


@pytest.mark.parametrize("text", ["", "localhost", ":80", "h:", "h:-1", "h:65536", "h:8o"])
def test_what_is_no_address_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:7670"):
        split_address(text)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("no.such.host.invalid", False),
    ],
)
def test_loopback(host, expected):
    assert is_loopback(host) is expected


def test_beyond_loopback_needs_tls_and_the_message_says_how(tmp_path):
    with pytest.raises(ConfigError, match=r"bagua certs DIR --host 0\.0\.0\.0"):
        check_listen_address("0.0.0.0:7670", None)
    with pytest.raises(ConfigError, match="--tls"):
        check_dial_address("10.1.2.3:7670", None)
    files = TlsFiles.in_folder(tmp_path)
    check_listen_address("0.0.0.0:7670", files)
    check_dial_address("10.1.2.3:7670", files)
    check_listen_address("127.0.0.1:7670", None)
    with pytest.raises(ConfigError, match=r"ca\.pem"):
        files.read()


def test_private_folder_is_private_and_refused_where_it_cannot_be(tmp_path):
    folder = make_private_dir(tmp_path / "a" / "b")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    assert make_private_dir(folder).stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--state-dir"):
        make_private_dir(tmp_path / "file" / "below")


def test_token_is_made_once_even_by_many_at_once(tmp_path):
    path = tmp_path / "token"
    found = []
    threads = [threading.Thread(target=lambda: found.append(create_token(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found[0]) > 30
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["token"]


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o666])
def test_a_token_that_others_can_read_is_refused_with_the_remedy(tmp_path, mode):
    path = tmp_path / "token"
    create_token(path)
    path.chmod(mode)
    for read in (read_token, create_token):
        with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600 {path}"):
            read(path)
    path.chmod(0o400)
    assert read_token(path)


def test_a_group_may_read_a_file_of_root_and_no_other(tmp_path):
    path = tmp_path / "token"
    create_token(path)
    path.chmod(0o640)
    if os.getuid() == 0:
        assert read_token(path), "as Kubernetes mounts secrets for a user's group"
        os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_token(path)


def test_a_damaged_token_is_told_and_one_from_a_pipe_is_taken(tmp_path):
    path = tmp_path / "token"
    path.write_bytes(b"\xff\xfe")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="damaged"):
        read_token(path)
    for text in ("old\nnew\n", "to\0ken", "to\x1b[1mken"):  # gRPC's own words would be "Invalid metadata"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"token has more than one line.*BG804"):
            read_token(path)
    reader, writer = os.pipe()
    os.write(writer, b"t\n")
    os.close(writer)
    try:
        assert read_token(Path(f"/dev/fd/{reader}")) == "t"
    finally:
        os.close(reader)


def test_a_private_key_that_others_can_read_is_refused(tmp_path):
    files = TlsFiles.in_folder(tmp_path)
    for path in (files.ca, files.cert, files.key):
        path.write_bytes(b"x")
        path.chmod(0o644)
    with pytest.raises(ConfigError, match=f"private key {files.key}"):
        files.read()
    files.key.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no certificate"):
        files.read()


def test_certificates_that_can_not_be_used_are_told(tmp_path):
    """gRPC speaks of handshakers and of ports in use, and ends the process for an empty file."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        make_certificates(folder, ["127.0.0.1"])
    files = TlsFiles.in_folder(folders[0])
    good = files.read()
    assert good == (files.ca.read_bytes(), files.cert.read_bytes(), files.key.read_bytes())
    other = (folders[1] / "key.pem").read_bytes()
    for path, data, words in (
        (files.ca, b"", rf"{files.ca} holds no certificate.*BG808"),
        (files.ca, b"\xff", rf"{files.ca} holds no certificate"),
        (files.cert, b"", "are no certificate and its key: one of them is damaged"),
        (files.key, good[2][:50], "are no certificate and its key: one of them is damaged"),
        (files.key, other, "are no pair: the key is that of another certificate"),
    ):
        before = path.read_bytes()
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=words):
            files.read()
        path.write_bytes(before)
