"""Checkpoints in files."""
