"""Where the job's secret comes from, and what is none."""

import os
import stat

import pytest

from bagua.base.errors import ConfigError
from bagua.enroll import secret

GOOD = "2f1c7be0a94d5836e0a4c1b79d8f2356"
ELSEWHERE = "10.0.0.1"


@pytest.fixture(autouse=True)
def nothing_set(tmp_path, monkeypatch):
    for name in (secret.SECRET, secret.SECRET_FILE, secret.INSECURE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def write(path, text, mode=0o600):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_all_ways_lead_to_the_same_key(tmp_path, monkeypatch):
    write(secret.default_file(), GOOD + "\n")
    by_default = secret.find_key(ELSEWHERE)
    monkeypatch.setenv(secret.SECRET_FILE, str(write(tmp_path / "named", f" {GOOD} ", 0o400)))
    assert secret.find_key(ELSEWHERE) == by_default
    monkeypatch.delenv(secret.SECRET_FILE)
    monkeypatch.setenv(secret.SECRET, GOOD)
    assert secret.find_key(ELSEWHERE) == by_default and len(by_default) == 32
    monkeypatch.setenv(secret.SECRET, GOOD[::-1])
    assert secret.find_key(ELSEWHERE) != by_default
    secret.remove_from_environment()
    assert secret.SECRET not in os.environ


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_can_read_is_refused(tmp_path, monkeypatch, mode):
    monkeypatch.setenv(secret.SECRET_FILE, str(write(tmp_path / "open", GOOD, mode)))
    with pytest.raises(ConfigError, match="chmod 600"):
        secret.find_key(ELSEWHERE)


@pytest.mark.parametrize("weak", ["hunter2", "123456", "0" * 64, "abcd" * 16, GOOD[:-1], "x" * 10_000])
def test_what_can_be_guessed_is_refused(monkeypatch, weak):
    monkeypatch.setenv(secret.SECRET, weak)
    with pytest.raises(ConfigError, match="can be guessed"):
        secret.find_key(ELSEWHERE)


def test_one_machine_makes_its_own(tmp_path):
    key = secret.find_key("127.0.0.1")
    assert secret.find_key("localhost") == key
    made = tmp_path / "bagua" / "job-secret"
    assert stat.S_IMODE(made.stat().st_mode) == 0o600


def test_two_answers_are_one_too_many(monkeypatch):
    monkeypatch.setenv(secret.INSECURE, "1")
    assert secret.find_key(ELSEWHERE) == bytes(32)
    monkeypatch.setenv(secret.SECRET, GOOD)
    with pytest.raises(ConfigError, match="choose one"):
        secret.find_key(ELSEWHERE)
    monkeypatch.setenv(secret.INSECURE, "yes")
    with pytest.raises(ConfigError, match="neither 0 nor 1"):
        secret.find_key(ELSEWHERE)


def test_under_srun_the_first_host_makes_the_file_in_the_shared_home(monkeypatch):
    for name, value in {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(secret, "SHARED_PATIENCE_S", 0.0)
    with pytest.raises(ConfigError, match="needs a secret"):
        secret.find_key(ELSEWHERE)
    made = secret.find_key(ELSEWHERE, first=True)
    assert secret.find_key(ELSEWHERE) == made
    assert secret.default_file().stat().st_mode & 0o777 == 0o600


def test_a_file_of_another_user_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "theirs", GOOD)
    if os.geteuid() != 0:
        pytest.skip("giving a file to another user needs root")
    os.chown(path, 12345, 12345)
    monkeypatch.setenv(secret.SECRET_FILE, str(path))
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        secret.find_key(ELSEWHERE)


def test_ids_of_schedulers_are_no_secrets(monkeypatch):
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "MASTER_PORT", "HOSTNAME"):
        monkeypatch.setenv(name, GOOD)
    with pytest.raises(ConfigError, match="needs a secret"):
        secret.find_key(ELSEWHERE)
