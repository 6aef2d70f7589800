"""What tests of several folders start: ranks on real engines. ``tests`` is on the path (tests/conftest.py)."""
