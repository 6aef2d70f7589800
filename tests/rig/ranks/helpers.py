"""Where ranks find what their test's file imports."""

import sys
from pathlib import Path


def find_helpers(file):
    """Folders above a test's file that have a conftest.py have modules for their tests, too."""
    folders = [str(folder) for folder in Path(file).parents if (folder / "conftest.py").exists()]
    sys.path += [folder for folder in folders if folder not in sys.path]
