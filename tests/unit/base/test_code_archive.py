"""Packing of a working directory, and unpacking on a node: what is left out, what is refused, what is kept."""

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile

import pytest

from bagua.base.errors import ConfigError
from bagua.client import packing
from bagua.client.packing import pack
from bagua.daemon.node.jobs import code
from bagua.daemon.node.ranks.launch import LaunchError


def file(folder, name, text="x"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "project"
    for name in ("train.py", "lib/util.py", "data/words.txt", "__pycache__/train.pyc", ".venv/bin/python", "notes.tmp"):
        file(made, name, name)
    return made


def unpacked(packed, tmp_path, name="copy"):
    archive = tmp_path / f"{name}.tar.gz"
    archive.write_bytes(b"".join(packed.parts(1000)))
    code.unpack_beside(archive, tmp_path / name)
    return tmp_path / name


def test_a_copy_is_as_the_folder(folder, tmp_path):
    (folder / "train.py").chmod(0o755)
    (folder / "link").symlink_to("lib/util.py")
    (folder / "lib" / "up").symlink_to("../data")
    packed = pack(folder)
    assert packed.names == ("data/words.txt", "lib/up", "lib/util.py", "link", "notes.tmp", "train.py")
    copy = unpacked(packed, tmp_path)
    assert (copy / "train.py").stat().st_mode & 0o777 == 0o755
    assert (copy / "link").read_text() == "lib/util.py" and (copy / "lib" / "up" / "words.txt").exists()
    assert sorted(path.name for path in copy.iterdir()) == ["data", "lib", "link", "notes.tmp", "train.py"]
    data = b"".join(packed.parts(100))
    assert (packed.archive.bytes, packed.archive.digest) == (len(data), hashlib.sha256(data).hexdigest())
    assert (packed.archive.files, packed.archive.unpacked_bytes) == (
        6,
        sum(map(len, ("data/words.txt", "lib/util.py", "notes.tmp", "train.py"))),
    )


def test_the_same_files_give_the_same_archive(folder, tmp_path):
    first = pack(folder).archive.digest
    other = shutil.copytree(folder, tmp_path / "other")
    os.utime(other / "train.py", (1, 1))
    assert pack(other).archive.digest == first
    file(other, "train.py", "changed")
    assert pack(other).archive.digest != first


def environment(path):
    """A virtual environment, whose interpreter is a link out of it."""
    file(path, "pyvenv.cfg")
    file(path, "lib/module.py")
    (path / "bin").mkdir()
    (path / "bin" / "python").symlink_to(sys.executable)


def test_virtual_environments_stay_whatever_their_name(folder):
    expected = pack(folder).names
    environment(folder / "env")
    assert pack(folder).names == expected
    (folder / "env" / "bin" / "python").unlink()
    assert "pyvenv.cfg" in pack(folder / "env").names, "unless one is the folder itself"


def test_ignored_files_stay(folder):
    file(folder, ".gitignore", "*.tmp\n")
    file(folder, ".baguaignore", "data/\n!/train.py\n")
    assert pack(folder).names == (".baguaignore", ".gitignore", "lib/util.py", "train.py")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_says_what_belongs_to_a_checkout(folder):
    def git(*arguments):
        environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
        subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, env=environment)

    git("init")
    file(folder, ".gitignore", "*.tmp\n__pycache__/\n.venv/\n")
    file(folder, "lib/.gitignore", "secret.txt\n")
    file(folder, "lib/secret.txt")
    file(folder, "forced.tmp")
    file(folder, "deleted.py")
    environment(folder / "not ignored")
    git("add", ".")
    git("add", "-f", "forced.tmp")
    (folder / "deleted.py").unlink()
    file(folder, "new é.py")
    expected = (".gitignore", "data/words.txt", "forced.tmp", "lib/.gitignore", "lib/util.py", "new é.py", "train.py")
    assert pack(folder).names == expected
    assert pack(folder / "lib").names == (".gitignore", "util.py"), "a folder of a checkout has its rules"
    file(folder, ".baguaignore", "forced.*\ndata\n")
    assert set(pack(folder).names) == {*expected, ".baguaignore"} - {"forced.tmp", "data/words.txt"}


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_folder_of_git_that_is_a_link_by_now(folder, tmp_path):
    """Git has files below it still, which are those of another folder."""
    subprocess.run(["git", "init", "-q", folder], check=True)
    file(folder, "old/words.txt")
    subprocess.run(["git", "-C", folder, "add", "."], check=True)
    shutil.rmtree(folder / "old")
    (folder / "old").symlink_to("data")
    copy = unpacked(pack(folder), tmp_path)
    assert (copy / "old").is_symlink() and (copy / "old" / "words.txt").read_text() == "data/words.txt"


def test_a_file_that_goes_meanwhile_is_left_out(folder, monkeypatch):
    monkeypatch.setattr(packing, "_of_git", lambda folder: ["train.py", "gone.swp"])
    assert pack(folder).names == ("train.py",)


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "lib/../../outside", "chain"])
def test_links_out_of_the_folder_are_refused(folder, tmp_path, target):
    file(tmp_path, "outside")
    (folder / "link").symlink_to(target)
    (folder / "lib" / "deep").symlink_to("..")
    if target == "chain":
        (folder / "chain").symlink_to("lib/deep/../../outside")  # inside as text, outside as the system follows it
    with pytest.raises(ConfigError, match="leads out of the working directory"):
        pack(folder)


def member(name, data=b"", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def archive_of(path, *members):
    with tarfile.open(path, "w:gz") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return path


LINK = {"type": tarfile.SYMTYPE}
BAD = {
    "parent": ([member("a/../../x", b"x")], "leads out"),
    "absolute": ([member("/x", b"x")], "leads out"),
    "link to a parent": ([member("a", linkname="../x", **LINK)], "link that leads out"),
    "link to a root": ([member("a", linkname="/etc", **LINK)], "link that leads out"),
    "chain of links": (
        [member("d/a", linkname="..", **LINK), member("b", linkname="d/a/../../x", **LINK)],
        "link that leads out",
    ),
    "links through a link": (  # each is inside by itself, and the last one would be made two folders above
        [
            member("d/e/f/up", linkname="../../..", **LINK),
            member("d/e/f/up/g/h/i", linkname="../../../..", **LINK),
            member("g/h/i/out/x", linkname="y", **LINK),
        ],
        "link below another link",
    ),
    "headers of headers": (
        [member("x", **{"type": tarfile.GNUTYPE_LONGNAME}, data=b"name") for _ in range(2000)],
        "can't be unpacked",
    ),
    "through a link": ([member("a", linkname="b", **LINK), member("a/x", b"x")], ""),
    "hard link": ([member("a", b"x"), member("b", type=tarfile.LNKTYPE, linkname="a")], "neither file nor link"),
    "device": ([member("a", type=tarfile.CHRTYPE)], "neither file nor link"),
    "folder": ([member("a", type=tarfile.DIRTYPE)], "neither file nor link"),
    "twice": ([member("a", b"x"), member("a", b"y")], ""),
    "long name": ([member("a" * 1001, b"x")], "more than 1000 bytes"),
    "deep name": ([member("a/" * 64 + "a", b"x")], "more than 64 folders"),
    "folders": ([member(f"{one}/" + "a/" * 60 + "a", b"x") for one in range(20)], "1000 files and folders"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_archive_leaves_nothing(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(code, "MAX_FILES", 1000)
    members, words = BAD[kind]
    inside = tmp_path / "inside"
    inside.mkdir()
    archive = archive_of(inside / "bad.tar.gz", *members)
    with pytest.raises((LaunchError, FileExistsError, NotADirectoryError), match=words or None):
        code.unpack_beside(archive, inside / "copy")
    assert [path.name for path in inside.iterdir()] == ["bad.tar.gz"] and [*tmp_path.iterdir()] == [inside]


def test_what_is_no_archive(tmp_path, monkeypatch):
    good = archive_of(tmp_path / "good.tar.gz", member("a", b"x" * 20_000)).read_bytes()

    def refused(data, words):
        (tmp_path / "bad.tar.gz").write_bytes(data)
        with pytest.raises(LaunchError, match=words):
            code.unpack_beside(tmp_path / "bad.tar.gz", tmp_path / "copy")
        assert not (tmp_path / "copy").exists()

    refused(b"no gzip", "can't be unpacked")
    refused(good[:-20], "can't be unpacked")
    refused(gzip.compress(b"no tar file" * 200), "can't be unpacked")
    monkeypatch.setattr(code, "MAX_FILES", 1)
    monkeypatch.setattr(code, "MAX_UNPACKED_BYTES", 10_000)
    refused(good, "more than 0 MiB when unpacked")
    refused(archive_of(tmp_path / "many", member("a", b"x"), member("b", b"x")).read_bytes(), "more than 1 files")


def test_modes_are_no_more_than_a_file_needs(tmp_path):
    archive = archive_of(tmp_path / "a.tar.gz", member("s", b"x", mode=0o6755), member("r", b"x", mode=0o000))
    code.unpack_beside(archive, tmp_path / "copy")
    assert [(tmp_path / "copy" / name).stat().st_mode & 0o7777 for name in "sr"] == [0o755, 0o600]
