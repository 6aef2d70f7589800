"""Limits of the system: words for them, and descriptors beyond that of select()."""

import os

import pytest

from bagua.base.system_limits import await_readable, process_words, raise_descriptor_limit

HIGH = 1500  # select.select takes none from 1024 on


@pytest.mark.parametrize(("line", "mount"), [("0::/a/b", ""), ("9:pids:/a/b", "pids")], ids=["version 2", "version 1"])
def test_the_control_group_that_is_full_is_named(tmp_path, line, mount):
    (tmp_path / "cgroup").write_text(f"7:memory:/else\n{line}\n")
    for name, used, most in (("a", 99, "100"), ("a/b", 5, "max")):
        folder = tmp_path / mount / name
        folder.mkdir(parents=True)
        (folder / "pids.current").write_text(f"{used}\n")
        (folder / "pids.max").write_text(f"{most}\n")
    words = process_words(tmp_path, tmp_path)
    assert "control group /a has 99 of the 100" in words and "TasksMax=" in words


@pytest.fixture
def pipe():
    if raise_descriptor_limit() <= HIGH:
        pytest.skip(f"this process may have no descriptor {HIGH}: ulimit -Hn")
    read_end, write_end = os.pipe()
    os.dup2(read_end, HIGH)
    os.close(read_end)
    yield write_end
    os.close(HIGH)


def test_any_number_of_a_descriptor(pipe):
    other, unused = os.pipe()
    assert await_readable([HIGH, other], 0.01) == [] == await_readable([HIGH], -1.0)
    os.write(pipe, b"x")
    assert await_readable([HIGH, other]) == [HIGH]
    os.read(HIGH, 1)
    os.close(pipe)
    assert await_readable([other, HIGH], 10.0) == [HIGH], "its other end is closed"
    os.close(other)
    os.close(unused)
