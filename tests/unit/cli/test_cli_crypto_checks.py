"""``bagua doctor`` on the library that encrypts connections between hosts: found, missing, unfit, slow."""

import re
from pathlib import Path

import pytest

from bagua.cli.checks import crypto_checks
from bagua.cli.checks.machine import FAIL

ROOT = Path(__file__).resolve().parents[3]
OLD, NEW = 0x30000130, 0x30500090  # OpenSSL 3.0.19 and 3.5.9


def test_library_of_this_machine():
    found = crypto_checks.encryption()
    if found.status == FAIL:
        pytest.skip(f"no libcrypto here: {found.detail}")
    spoken = re.fullmatch(
        r"OpenSSL .* \((/.*)\): (AES-256-GCM|ChaCha20-Poly1305), [\d.]+ GB/s on one core", found.detail
    )
    assert spoken, found.detail
    assert Path(spoken[1]).is_file()


@pytest.mark.parametrize("name", ["", "/nowhere/libcrypto.so", "libm.so.6"])
def test_file_that_can_not_be_used(name, monkeypatch):
    monkeypatch.delenv("BAGUA_PLAIN_DATA", raising=False)
    monkeypatch.setenv("BAGUA_LIBCRYPTO", name)
    found = crypto_checks.encryption()
    assert found.status == FAIL
    assert (name or "BAGUA_LIBCRYPTO is empty") in found.detail
    assert "--plain-data" in found.fix and "libssl3" in found.fix


def test_probe_opens_what_the_core_opens():
    source = next((ROOT / "csrc").rglob("transport/libcrypto.cpp")).read_text()
    assert tuple(re.findall(r'"(libcrypto\.so[^"]*)"', source)) == crypto_checks.NAMES
    assert set(re.findall(r'need\(&t->\w+, \{"(\w+)"\}\)', source)) == set(crypto_checks.FUNCTIONS)
    assert f'kVariable = "{crypto_checks.VARIABLE}"' in source
