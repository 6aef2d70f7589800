"""Trees that programs of users made: deeper than Python recurses, than paths can name, and closed to everybody."""

import os
import subprocess
import sys

import pytest

from bagua.base.trees import remove_tree, walk_files

DEPTH = 2_200  # names of 4,400 bytes


@pytest.fixture
def deep(tmp_path):
    """Folders in each other, made by descriptors: no path names the last of them."""
    root = tmp_path / "deep"
    root.mkdir()
    folder = os.open(root, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("a", dir_fd=folder)
        below = os.open("a", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
    return root


def test_any_depth_is_removed_and_walked(deep):
    assert 1_000 < sum(1 for _ in walk_files(deep, 100_000)) <= DEPTH
    assert sum(1 for _ in walk_files(deep, 10)) == 10
    remove_tree(deep)
    assert not deep.exists()
    remove_tree(deep)


def test_closed_folders_and_links(tmp_path):
    kept, tree = tmp_path / "kept", tmp_path / "tree"
    (kept / "inside").mkdir(parents=True)
    (tree / "closed" / "below").mkdir(parents=True)
    (tree / "link").symlink_to(kept)
    (tree / "closed").chmod(0)
    assert {entry.name for entry in walk_files(tree, 100)} >= {"closed", "link"}
    assert "inside" not in {entry.name for entry in walk_files(tree, 100)}
    remove_tree(tree)
    assert not tree.exists() and (kept / "inside").is_dir()


MOUNT = """
mount --bind "$1" "$2"
exec "$3" -c 'import sys, pathlib, bagua.base.trees as trees; trees.remove_tree(pathlib.Path(sys.argv[1]))' "$4"
"""


@pytest.mark.root
def test_what_is_mounted_in_a_tree_stays(tmp_path):
    """A rank has bound its data into the folder of its code."""
    kept, tree = tmp_path / "kept", tmp_path / "tree"
    for folder in (kept, tree / "my data"):
        folder.mkdir(parents=True)
    (kept / "data").touch()
    command = ["unshare", "--mount", "sh", "-ec", MOUNT, "sh", kept, tree / "my data", sys.executable, tree]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "bagua" not in done.stderr and done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr}")
    assert (kept / "data").exists() and "remove it by hand" in done.stderr, done
    remove_tree(tree)
    assert not tree.exists()
