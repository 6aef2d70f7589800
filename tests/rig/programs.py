"""Programs that tests drive, such as Chromium and Redis."""

import os
import shutil

import pytest


def find(name):
    """Returns the path of a program, or "", also where only root has it in PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/sbin") or ""


def program(name):
    """The path of one that ``deploy/dev.py test`` installs. Where it is missing, the test is skipped, and fails in
    CI."""
    if found := find(name):
        return found
    missing(f"{name} is not installed: `python3 deploy/dev.py test` does it for root")


def missing(words):
    """Skips the test, and fails it in CI, where all is there that the test command installs."""
    if os.environ.get("CI"):
        pytest.fail(words)
    pytest.skip(words)
