"""``bagua doctor`` on the library that encrypts connections between hosts: found, missing, unfit, slow."""

import re
from pathlib import Path

import pytest

from bagua.cli.checks import crypto_checks
from bagua.cli.checks.crypto_checks import Probe
from bagua.cli.checks.machine import FAIL, OK, WARN

ROOT = Path(__file__).resolve().parents[3]
FAST = "aes pclmulqdq vaes vpclmulqdq avx512f avx512dq avx512bw avx512vl"
OLD, NEW = 0x30000130, 0x30500090  # OpenSSL 3.0.19 and 3.5.9


def test_library_of_this_machine() -> None:
    found = crypto_checks.encryption()
    if found.status == FAIL:
        pytest.skip(f"no libcrypto here: {found.detail}")
    spoken = re.fullmatch(
        r"OpenSSL .* \((/.*)\): (AES-256-GCM|ChaCha20-Poly1305), [\d.]+ GB/s on one core", found.detail
    )
    assert spoken, found.detail
    assert Path(spoken[1]).is_file()


@pytest.mark.parametrize("name", ["", "/nowhere/libcrypto.so", "libm.so.6"])
def test_file_that_can_not_be_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BAGUA_PLAIN_DATA", raising=False)
    monkeypatch.setenv("BAGUA_LIBCRYPTO", name)
    found = crypto_checks.encryption()
    assert found.status == FAIL
    assert (name or "BAGUA_LIBCRYPTO is empty") in found.detail
    assert "--plain-data" in found.fix and "libssl3" in found.fix


def test_daemons_without_encryption_need_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_PLAIN_DATA", "1")
    monkeypatch.setenv("BAGUA_LIBCRYPTO", "/nowhere/libcrypto.so")
    found = crypto_checks.encryption()
    assert found.status == WARN and "BAGUA_PLAIN_DATA" in found.detail


@pytest.mark.parametrize(
    ("number", "flags", "hint"),
    [
        (OLD, FAST, True),
        (NEW, FAST, False),
        (OLD, FAST.replace("vaes", ""), False),
        (OLD, FAST.replace("avx512vl", ""), False),
        (0, FAST, False),
    ],
    ids=["old library", "new library", "no VAES", "no AVX-512", "library of unknown version"],
)
def test_hint_where_a_newer_library_is_faster(number: int, flags: str, hint: bool) -> None:
    probe = Probe(version="OpenSSL", number=number, path="/lib/libcrypto.so.3", cipher="AES-256-GCM", gb_per_s=4.1)
    found = crypto_checks.judge(probe, set(flags.split()))
    assert found.status == (WARN if hint else OK)
    assert ("OpenSSL 3.1 or later" in found.fix and "BAGUA_LIBCRYPTO" in found.fix) == hint


def test_library_that_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crypto_checks, "PROBE", ["-c", "import os; os.abort()"])
    assert "ended the process" in crypto_checks.encryption().detail


def test_probe_opens_what_the_core_opens() -> None:
    source = next((ROOT / "csrc").rglob("transport/libcrypto.cpp")).read_text()
    assert tuple(re.findall(r'"(libcrypto\.so[^"]*)"', source)) == crypto_checks.NAMES
    assert set(re.findall(r'need\(&t->\w+, \{"(\w+)"\}\)', source)) == set(crypto_checks.FUNCTIONS)
    assert f'kVariable = "{crypto_checks.VARIABLE}"' in source
