"""A support bundle: bounded, and without secrets."""

import json
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua.base.errors import ConfigError
from bagua.cli.bundle import ENTRY_BYTES, Bundle, scrub

KEY = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEplanted0\n-----END EC PRIVATE KEY-----"
PLANTED = [
    ("HF_TOKEN=planted01", "planted01"),
    ('{"env": {"AWS_SECRET_ACCESS_KEY": "planted02/+x"}}', "planted02"),
    ("PGPASSWORD='planted 03'", "planted 03"),
    ("postgresql://bagua:planted04@db/bagua", "planted04"),
    ("authorization: Bearer planted05planted05", "planted05"),
    (KEY, "planted0"),
    ("train.py --api-key planted06 --lr 0.1", "planted06"),
    ("train.py --password=planted07", "planted07"),
    ('["--auth-token", "planted08"]', "planted08"),
    ("bagua token create says bagua_0a1b2c3d_planted12planted12planted12planted12", "planted12"),
    ("hub says hf_planted09planted09planted09", "planted09"),
    ("the token is knownplanted10 indeed", "planted10"),
    ('{"api_key":"planted\\"11"}', "11"),
]


@pytest.mark.parametrize(("text", "secret"), PLANTED)
def test_planted_secrets_are_removed(text, secret):
    shown = scrub(f"before {text} after", ["knownplanted10"])
    assert secret not in shown and "***" in shown
    assert shown.startswith("before ") and shown.endswith(" after")


def test_other_texts_stay():
    text = (
        'rank 3 on node a: MAX_TOKENS=12 BAGUA_TOKEN_FILE=/x {"step": 7, "key_size": 4} --lr 0.1 http://a:70/b 1 true'
    )
    assert scrub(text, ["1", "true", ""]) == text


def read(path):
    with tarfile.open(path) as tar:
        found = {}
        for member in tar.getmembers():
            assert member.isfile() and member.name.startswith("bagua-support/")
            file = tar.extractfile(member)
            found[member.name.removeprefix("bagua-support/")] = file.read()
    return found


def test_a_bundle_is_bounded_and_says_what_is_missing(tmp_path):
    bundle = Bundle(["planted-secret"], most=ENTRY_BYTES + 1000)

    def fails():
        raise ConfigError("no such planted-secret")

    bundle.collect("away.txt", fails)
    bundle.add("long.txt", "x" * (ENTRY_BYTES + 50) + "end")
    bundle.add("rest.txt", "y" * 2000)
    bundle.add("none.txt", "z")
    bundle.write(tmp_path / "b.tar.gz")
    found = read(tmp_path / "b.tar.gz")
    manifest = json.loads(found["manifest.json"])
    assert found["long.txt"].endswith(b"end") and len(found["long.txt"]) == ENTRY_BYTES
    assert len(found["rest.txt"]) == 1000 and "none.txt" not in found
    assert manifest["notes"]["away.txt"] == "missing: no such ***"
    assert set(manifest["notes"]) == {"away.txt", "long.txt", "rest.txt", "none.txt"}
    assert (tmp_path / "b.tar.gz").stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [tmp_path / "b.tar.gz"]


@given(st.text(alphabet=st.characters(codec="ascii", exclude_characters="\"'"), max_size=80), st.text(max_size=80))
@settings(max_examples=60, deadline=None)
def test_a_known_secret_is_never_left(before, after):
    assert "planted-secret" not in scrub(f"{before}planted-secret{after}", ["planted-secret"])
