"""Missing things are named in the error: other operating systems, packages of the examples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# As on another system: its name, and none of the modules that only Linux and its like have.
ELSEWHERE = """
import runpy, sys
sys.platform = {platform!r}
for name in ("fcntl", "grp", "pwd", "resource", "termios", "tty", "pty"):
    sys.modules[name] = None
{rest}
"""


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("platform", "name", "command"), [("darwin", "macOS", "run train.py"), ("win32", "Windows", "daemon")]
)
def test_other_systems_are_refused_in_words(platform, name, command):
    start = f"sys.argv = ['bagua', *{command.split()!r}]\nrunpy.run_module('bagua.cli.main', run_name='__main__')"
    done = run("-P", "-c", ELSEWHERE.format(platform=platform, rest=start))
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.startswith(f"error: Bagua runs on Linux, and this is {name}") and done.stderr.count("\n") == 1
    assert ("WSL" in done.stderr) == (platform == "win32")


def test_the_library_refuses_them_before_anything_else():
    rest = "try:\n    import bagua.torch_api\nexcept ImportError as error:\n    print(error, 'torch' in sys.modules)"
    done = run("-P", "-c", ELSEWHERE.format(platform="darwin", rest=rest))
    assert done.stdout.startswith("Bagua runs on Linux, and this is ") and done.stdout.endswith(" False\n"), done
