"""A folder of checkpoints: names, manifests, rotation, what is whole and what is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua.torch_api.saving import folder as on_disk
from bagua.torch_api.saving.folder import Damaged, Manifest


def write(folder, step, content=b"weights"):
    """A checkpoint with one file."""
    writing = folder / f"{on_disk.WRITING}run-1-{step}"
    writing.mkdir(parents=True)
    (writing / "__0_0.distcp").write_bytes(content)
    files = {"__0_0.distcp": (len(content), on_disk.sum_of_file(writing / "__0_0.distcp"))}
    return on_disk.publish(writing, folder, Manifest(step, 1, files))


def good(at):
    try:
        manifest = on_disk.read_manifest(at)
        on_disk.verify(at, manifest, manifest.files)
    except Damaged:
        return False
    return True


def test_the_newest_comes_first(tmp_path):
    assert on_disk.checkpoints(tmp_path / "none") == []
    for step in (5, 99999999999, 40):
        write(tmp_path, step)
    (tmp_path / "step_x").mkdir()
    (tmp_path / "damaged-step_0000000099").mkdir()
    assert [on_disk.step_of(path.name) for path in on_disk.checkpoints(tmp_path)] == [99999999999, 40, 5]
    assert all(map(good, on_disk.checkpoints(tmp_path)))


def test_one_of_the_same_step_is_replaced(tmp_path):
    write(tmp_path, 5)
    at = write(tmp_path, 5, b"others")
    assert (at / "__0_0.distcp").read_bytes() == b"others" and good(at)
    assert [path.name for path in tmp_path.iterdir()] == [at.name]


@given(st.lists(st.integers(0, 50), unique=True), st.integers(1, 5), st.integers(0, 50))
def test_rotation(steps, keep, newest):
    gone = on_disk.superfluous([*steps, newest], keep, newest)
    assert newest not in gone, "the one that was just written stays"
    left = sorted({*steps, newest} - set(gone))
    assert len([step for step in left if step <= newest]) == min(
        keep, len({s for s in [*steps, newest] if s <= newest})
    )
    assert all(step in left for step in steps if step > newest)
    assert not gone or max(gone) < min(step for step in left if step <= newest)


@pytest.mark.parametrize("where", range(0, 400, 13))
def test_a_manifest_that_was_changed_is_refused(where):
    text = Manifest(7, 2, {"__0_0.distcp": (3, "ab"), ".metadata": (5, "cd")}).text()
    assert Manifest.parse(text).files == {"__0_0.distcp": (3, "ab"), ".metadata": (5, "cd")}
    where %= len(text)
    changed = f"{text[:where]}{chr(ord(text[where]) ^ 1)}{text[where + 1 :]}"
    with pytest.raises(Damaged):
        if Manifest.parse(changed) == Manifest.parse(text):
            raise Damaged("a change of white space, which means nothing")
    with pytest.raises(Damaged):
        Manifest.parse(text[:where])


def test_what_a_killed_run_has_left(tmp_path):
    assert not on_disk.prepare(tmp_path / "new" / "folder")
    at = write(tmp_path, 3)
    (tmp_path / f"{on_disk.WRITING}run-1-4").mkdir()
    at.rename(tmp_path / f"{on_disk.OLD}{at.name}")
    assert on_disk.prepare(tmp_path)
    assert good(at) and sorted(path.name for path in tmp_path.iterdir()) == ["new", at.name]
    write(tmp_path / "x", 3).rename(tmp_path / f"{on_disk.OLD}{at.name}")
    assert on_disk.prepare(tmp_path) and good(at)
