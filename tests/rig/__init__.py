"""Helpers of several folders: they start ranks on real engines. ``tests`` is on the path (tests/conftest.py)."""
