"""Words for limits of the system."""

import pytest

from bagua.base.system_limits import process_words


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
