"""Everything that needs a GPU, in one command: ``python tests/gpu/run.py`` (see README.md)."""
